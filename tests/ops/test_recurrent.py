"""`selective_scan`, `gated_delta_rule` and depthwise convolutions over a sequence: values, and bits under every cut."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz.ops import gated_delta_rule, selective_scan
from torch_quartz.testing import same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(seed, *shape, dtype=torch.float32, device="quartz"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


# ---- selective_scan ----


def scan_inputs(batch=2, channels=3, length=7, states=5, dtype=torch.float32, seed=0):
    return {
        "x": random(seed, batch, channels, length, dtype=dtype),
        "dt": random(seed + 1, batch, channels, length, dtype=dtype),
        "A": -random(seed + 2, channels, states).exp(),
        "B": random(seed + 3, batch, length, states, dtype=dtype),
        "C": random(seed + 4, batch, length, states, dtype=dtype),
        "D": random(seed + 5, channels),
        "z": random(seed + 6, batch, channels, length, dtype=dtype),
        "dt_bias": random(seed + 7, channels),
    }


def scan_reference(x, dt, A, B, C, D=None, z=None, dt_bias=None, softplus=True, state=None):
    x, dt, A, B, C = (t.cpu().double() for t in (x, dt, A, B, C))
    d = dt if dt_bias is None else dt + dt_bias.cpu().double()[:, None]
    d = F.softplus(d) if softplus else d
    h = torch.zeros(*x.shape[:2], A.shape[1], dtype=torch.float64) if state is None else state.cpu().double()
    outputs = []
    for t in range(x.shape[2]):
        h = torch.exp(d[:, :, t, None] * A) * h + d[:, :, t, None] * B[:, None, t] * x[:, :, t, None]
        y = (h * C[:, None, t]).sum(-1)
        y = y if D is None else y + D.cpu().double() * x[:, :, t]
        outputs.append(y if z is None else y * F.silu(z.cpu().double()[:, :, t]))
    return torch.stack(outputs, 2), h


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left_out", [(), ("D",), ("z", "dt_bias"), ("D", "z", "dt_bias")], ids=str)
@pytest.mark.parametrize("softplus", [True, False])
def test_scan_values(dtype, left_out, softplus):
    inputs = {key: None if key in left_out else value for key, value in scan_inputs(dtype=dtype).items()}
    if not softplus:
        inputs["dt"] = inputs["dt"].abs()
        inputs["dt_bias"] = None
    state = random(9, 2, 3, 5)
    y, h = selective_scan(**inputs, dt_softplus=softplus, state=state)
    expected_y, expected_h = scan_reference(**inputs, softplus=softplus, state=state)
    assert y.dtype == h.dtype == torch.float32
    torch.testing.assert_close(y.cpu().double(), expected_y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h.cpu().double(), expected_h, rtol=1e-5, atol=1e-5)


def test_softplus_of_large_and_small_numbers():
    dt = torch.tensor([-90.0, -30.0, -17.0, -5.0, 0.0, 5.0, 19.0, 21.0, 80.0], device="quartz")
    one = torch.ones(1, 1, 1, device="quartz")
    for value in dt:
        # A = 0: the state is softplus(dt) itself.
        _, h = selective_scan(one, value.view(1, 1, 1), torch.zeros(1, 1, device="quartz"), one, one, dt_softplus=True)
        expected = F.softplus(value.cpu().double(), threshold=50).item()
        assert h.item() == pytest.approx(expected, rel=3e-7, abs=1e-38)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 4), st.data())
def test_scan_bits_under_every_cut(length, states, channels, data):
    inputs = scan_inputs(3, channels, length, states, seed=data.draw(st.integers(0, 99)))
    y, h = selective_scan(**inputs, dt_softplus=True)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=4)) | {0, length})
    state, parts = None, []
    for begin, end in itertools.pairwise(cuts):
        piece = {
            key: value[:, :, begin:end] if key in ("x", "dt", "z") else value[:, begin:end] if key in "BC" else value
            for key, value in inputs.items()
        }
        part, state = selective_scan(**piece, dt_softplus=True, state=state)
        parts.append(part)
    assert same_bits(torch.cat(parts, 2), y) and same_bits(state, h)
    alone, _ = selective_scan(
        **{key: value[1:2] if key in ("x", "dt", "z", "B", "C") else value for key, value in inputs.items()},
        dt_softplus=True,
    )
    assert same_bits(alone[0], y[1])


# ---- gated_delta_rule ----


def rule_inputs(batch=2, length=6, key_heads=2, heads=4, key_size=9, value_size=5, dtype=torch.float32, seed=0):
    key = random(seed + 1, batch, length, key_heads, key_size)
    return {
        "query": random(seed, batch, length, key_heads, key_size, dtype=dtype),
        "key": F.normalize(key, dim=-1).to(dtype),
        "value": random(seed + 2, batch, length, heads, value_size, dtype=dtype),
        "g": -random(seed + 3, batch, length, heads).exp(),
        "beta": random(seed + 4, batch, length, heads, dtype=dtype).sigmoid(),
    }


def rule_reference(query, key, value, g, beta, state=None):
    q, k, v, g, beta = (t.cpu().double() for t in (query, key, value, g, beta))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    s = torch.zeros(*v.shape[0:1], v.shape[2], q.shape[3], v.shape[3], dtype=torch.float64)
    s = s if state is None else state.cpu().double()
    outputs = []
    for t in range(v.shape[1]):
        s = s * g[:, t].exp()[..., None, None]
        error = (v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t])) * beta[:, t, :, None]
        s = s + k[:, t, :, :, None] * error[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(outputs, 1), s


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(9, 5), (16, 64), (8, 70)], ids=str)
def test_rule_values(dtype, sizes):
    inputs = rule_inputs(key_size=sizes[0], value_size=sizes[1], dtype=dtype)
    state = random(9, 2, 4, *sizes)
    for initial in (None, state):
        output, s = gated_delta_rule(**inputs, state=initial)
        expected, expected_s = rule_reference(**inputs, state=initial)
        torch.testing.assert_close(output.cpu().double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(s.cpu().double(), expected_s, rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 20), st.integers(1, 80), st.data())
def test_rule_bits_under_every_cut(length, key_size, value_size, data):
    inputs = rule_inputs(3, length, 1, 2, key_size, value_size, seed=data.draw(st.integers(0, 99)))
    output, s = gated_delta_rule(**inputs)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=4)) | {0, length})
    state, parts = None, []
    for begin, end in itertools.pairwise(cuts):
        part, state = gated_delta_rule(**{key: t[:, begin:end] for key, t in inputs.items()}, state=state)
        parts.append(part)
    assert same_bits(torch.cat(parts, 1), output) and same_bits(state, s)
    alone, _ = gated_delta_rule(**{key: t[1:2] for key, t in inputs.items()})
    assert same_bits(alone[0], output[1])


# ---- what both refuse ----


def test_errors_are_named():
    scan, rule = scan_inputs(), rule_inputs()
    with pytest.raises(RuntimeError, match="quartz::selective_scan: B must have the shape"):
        selective_scan(**{**scan, "B": scan["B"][:, 1:]})
    with pytest.raises(RuntimeError, match="quartz::selective_scan: state must have the shape"):
        selective_scan(**scan, state=random(0, 2, 3, 4))
    with pytest.raises(RuntimeError, match="quartz::gated_delta_rule: g must have the shape"):
        gated_delta_rule(**{**rule, "g": rule["g"][..., :1]})
    with pytest.raises(RuntimeError, match="quartz::gated_delta_rule: beta must be float32, float16 or bfloat16"):
        gated_delta_rule(**{**rule, "beta": rule["beta"].double()})
    with pytest.raises(NotImplementedError, match="quartz::selective_scan: has no gradient"):
        selective_scan(**{**scan, "x": scan["x"].requires_grad_()})
    with pytest.raises(NotImplementedError, match="quartz::gated_delta_rule: has no gradient"):
        gated_delta_rule(**{**rule, "key": rule["key"].requires_grad_()})


def test_fake_kernels():
    scan, rule = scan_inputs(), rule_inputs()
    arguments = (*(scan[key] for key in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")), True, None)
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.quartz.selective_scan.default, arguments, test_utils=utilities)
    torch.library.opcheck(torch.ops.quartz.gated_delta_rule.default, tuple(rule.values()), test_utils=utilities)


# ---- depthwise convolution ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{"padding": 3}, {"padding": 0}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 4}], ids=str
)
@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_values(dtype, options, multiplier, bias):
    x, w = random(0, 2, 6, 11, dtype=dtype), random(1, 6 * multiplier, 1, 4, dtype=dtype)
    b = random(2, 6 * multiplier, dtype=dtype) if bias else None
    got = F.conv1d(x, w, b, groups=6, **options)
    exact = F.conv1d(*(t if t is None else t.cpu().double() for t in (x, w, b)), groups=6, **options)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(got.cpu().double(), exact, **tolerance)
    strided = F.conv1d(x.transpose(1, 2).contiguous().transpose(1, 2), w, b, groups=6, **options)
    assert same_bits(strided, got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_of_pieces_behind_their_state_has_the_bits_of_the_whole(dtype):
    x, w, b = random(0, 3, 5, 20, dtype=dtype), random(1, 5, 1, 4, dtype=dtype), random(2, 5, dtype=dtype)
    whole = F.conv1d(x, w, b, padding=3, groups=5)[..., :20]
    state = torch.zeros(3, 5, 3, dtype=dtype, device="quartz")
    parts = []
    for piece in x.split([7, 1, 1, 11], -1):
        known = torch.cat([state, piece], -1)
        parts.append(F.conv1d(known, w, b, groups=5))
        state = known[..., -3:]
    assert same_bits(torch.cat(parts, -1), whole)
    assert same_bits(F.conv1d(x[1:2], w, b, padding=3, groups=5)[..., :20][0], whole[1])


def test_convolution_gradients():
    x, w, b = (random(i, *s) for i, s in ((0, (2, 6, 11)), (1, (6, 1, 4)), (2, (6,))))
    results = []
    for device in ("quartz", "cpu"):
        leaves = [t.detach().to(device).requires_grad_() for t in (x, w, b)]
        F.conv1d(*leaves, padding=3, groups=6).square().sum().backward()
        results.append([leaf.grad.cpu() for leaf in leaves])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
