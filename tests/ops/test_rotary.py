"""quartz::rotary against plain formulas in float64, PyTorch's own operators bit by bit, and its gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

DEVICES = ["quartz", "cpu"] + (["cuda"] if torch.cuda.is_available() else [])
STYLES = ("half", "interleaved", "deinterleaved")


def pairs(x, style, rotated):
    part = x[..., :rotated]
    return (
        (part[..., : rotated // 2], part[..., rotated // 2 :]) if style == "half" else (part[..., ::2], part[..., 1::2])
    )


def reference(x, cos, sin, style, pair_table, heads_dim):
    """Step by step in the dtype of the arguments, as a model's module would."""
    rotated = cos.shape[-1] * (2 if pair_table else 1)
    cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
    if pair_table:
        tables = (cos, cos, sin, sin)
    elif style == "interleaved":
        tables = (cos[..., ::2], cos[..., 1::2], sin[..., ::2], sin[..., 1::2])
    else:
        half = rotated // 2
        tables = (cos[..., :half], cos[..., half:], sin[..., :half], sin[..., half:])
    a, b = pairs(x, style, rotated)
    first, second = a * tables[0] - b * tables[2], b * tables[1] + a * tables[3]
    turned = torch.stack((first, second), -1).flatten(-2) if style == "interleaved" else torch.cat((first, second), -1)
    return torch.cat((turned, x[..., rotated:].to(turned.dtype)), -1)


def arguments(dtype, size, rotated, pair_table, heads_dim=-3, batch=2, positions=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, heads, positions, size) if heads_dim == -3 else (batch, positions, heads, size) for heads in (4, 2)
    ]
    q, k = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    tables = torch.randn(2, batch, positions, rotated // 2 if pair_table else rotated, generator=generator).to(dtype)
    return q, k, tables[0], tables[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("pair_table", [False, True])
@pytest.mark.parametrize(("size", "rotated"), [(2, 2), (8, 8), (64, 64), (128, 128), (80, 20), (128, 64), (6, 2)])
def test_bits_of_the_usual_formula(device, dtype, style, pair_table, size, rotated):
    for heads_dim in (-3, -2):
        q, k, cos, sin = arguments(dtype, size, rotated, pair_table, heads_dim)
        got = ops.rotary_qk(
            *(t.to(device) for t in (q, k, cos, sin)), style=style, pair_table=pair_table, heads_dim=heads_dim
        )
        for x, y in zip((q, k), got, strict=True):
            expected = reference(x, cos, sin, style, pair_table, heads_dim)
            assert y.device.type == device and same_bits(y, expected)
            one = ops.rotary(
                x.to(device), cos.to(device), sin.to(device), style=style, pair_table=pair_table, heads_dim=heads_dim
            )
            assert same_bits(one, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_tables_round_once(dtype):
    q, k, cos, sin = arguments(torch.float32, 32, 32, False)
    q, k = q.to(dtype), k.to(dtype)
    got = ops.rotary_qk(*(t.to("quartz") for t in (q, k, cos, sin)))
    for x, y in zip((q, k), got, strict=True):
        assert same_bits(y, reference(x.float(), cos, sin, "half", False, -3).to(dtype))


def test_tables_without_a_batch_and_three_dimensions():
    q, _k, cos, sin = arguments(torch.float32, 16, 16, False)
    for shape in ((1, 3, 16), (3, 16)):
        c, s = cos[:1].reshape(shape), sin[:1].reshape(shape)
        got = ops.rotary(q.to("quartz"), c.to("quartz"), s.to("quartz"))
        assert same_bits(got, reference(q, cos[:1], sin[:1], "half", False, -3))
    got = ops.rotary(q[0].to("quartz"), cos[0].to("quartz"), sin[0].to("quartz"))
    assert same_bits(got, reference(q[:1], cos[:1], sin[:1], "half", False, -3)[0])


def test_strides_are_those_of_the_input():
    q, _k, cos, sin = (t.to("quartz") for t in arguments(torch.bfloat16, 16, 16, False, heads_dim=-2))
    y = ops.rotary(q.transpose(1, 2), cos, sin)
    assert y.stride() == q.transpose(1, 2).stride()
    assert same_bits(y, ops.rotary(q, cos, sin, heads_dim=-2).transpose(1, 2))


@pytest.mark.parametrize("style", STYLES)
def test_inverse_undoes_it(style):
    q, k, cos, sin = arguments(torch.float32, 24, 16, True)
    cos, sin = torch.cos(cos), torch.sin(cos)
    q, k, cos, sin = (t.to("quartz") for t in (q, k, cos, sin))
    turned = ops.rotary_qk(q, k, cos, sin, style=style, pair_table=True)
    back = ops.rotary_qk(*turned, cos, sin, style=style, pair_table=True, inverse=True)
    torch.testing.assert_close(back, (q, k))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("pair_table", [False, True])
def test_gradients(style, pair_table):
    q, k, cos, sin = arguments(torch.float32, 12, 8, pair_table)
    leaves = [t.to("quartz").requires_grad_() for t in (q, k)]
    native = [t.clone().requires_grad_() for t in (q, k)]
    got = ops.rotary_qk(*leaves, cos.to("quartz"), sin.to("quartz"), style=style, pair_table=pair_table)
    want = [reference(t, cos, sin, style, pair_table, -3) for t in native]
    weights = [torch.randn(t.shape) for t in (q, k)]
    sum((a * w.to("quartz")).sum() for a, w in zip(got, weights, strict=True)).backward()
    sum((a * w).sum() for a, w in zip(want, weights, strict=True)).backward()
    for a, b in zip(leaves, native, strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bits_of_a_position_depend_on_it_alone(data):
    dtype, style = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(STYLES))
    half, batch, positions = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    q, _k, cos, sin = arguments(dtype, 2 * half + 3, 2 * half, False, batch=batch, positions=positions)
    b, p = data.draw(st.integers(0, batch - 1)), data.draw(st.integers(0, positions - 1))
    alone = ops.rotary(
        *(t.to("quartz") for t in (q[b : b + 1, :, p : p + 1], cos[b : b + 1, p : p + 1], sin[b : b + 1, p : p + 1])),
        style=style,
    )
    keep = torch.zeros(batch, 1, positions, 1, dtype=torch.bool)
    keep[b, :, p] = True
    q = torch.where(keep, q, torch.full_like(q, float("nan")))
    for layout in (
        q.to("quartz"),
        surrounded(q.to("quartz")),
        q.transpose(1, 2).contiguous().to("quartz").transpose(1, 2),
    ):
        y = ops.rotary(layout, cos.to("quartz"), sin.to("quartz"), style=style)
        assert same_bits(y[b : b + 1, :, p : p + 1], alone)


@pytest.mark.parametrize("style", STYLES)
def test_instruction_sets_agree(style, instruction_sets):
    for dtype in FLOATS:
        q, _k, cos, sin = (t.to("quartz") for t in arguments(dtype, 70, 66, False))
        results = [ops.rotary(q, cos, sin, style=style) for _ in instruction_sets()]
        assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("shape", [(0, 4, 3, 8), (2, 0, 3, 8), (2, 4, 0, 8)])
def test_empty(shape):
    x, table = torch.empty(shape, device="quartz"), torch.empty(shape[0], shape[2], 8, device="quartz")
    assert ops.rotary(x, table, table).shape == shape


def test_registrations():
    q, k, cos, sin = (t.to("quartz") for t in arguments(torch.float32, 8, 8, False))
    q.requires_grad_()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.quartz.rotary.default, (q, cos, sin), test_utils=checks)
    torch.library.opcheck(
        torch.ops.quartz.rotary_qk.default, (q, k, cos, sin), {"style": "interleaved"}, test_utils=checks
    )


def test_errors():
    q, k, cos, sin = (t.to("quartz") for t in arguments(torch.float32, 8, 8, False))
    with pytest.raises(RuntimeError, match=r"cos must have shape \(positions, n\)"):
        ops.rotary(q, cos[:, :2], sin)
    with pytest.raises(RuntimeError, match="sin must be on the device of x, quartz:0, got cpu"):
        ops.rotary(q, cos, sin.cpu())
    with pytest.raises(RuntimeError, match="the rotated part must be even and at most the size of a head, got 16 of 8"):
        ops.rotary(q, cos, sin, pair_table=True)
    with pytest.raises(RuntimeError, match="k must have the dtype of the first tensor, got Half"):
        ops.rotary_qk(q, k.half(), cos, sin)
    with pytest.raises(RuntimeError, match="heads_dim must be the second or third"):
        ops.rotary(q, cos, sin, heads_dim=-1)
    with pytest.raises(ValueError, match="style must be one of half, interleaved and deinterleaved, got other"):
        ops.rotary(q, cos, sin, style="other")
    with pytest.raises(RuntimeError, match="cos and sin must not require gradients"):
        ops.rotary(q, cos.requires_grad_(), sin).sum().backward()
