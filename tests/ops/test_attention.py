"""quartz::attention and scaled_dot_product_attention against float64, and what must not change their bits."""

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

# Of values up to about 3. float32: a score up to 15 is wrong by 1e-6 of it, the relative error of a probability.
TOLERANCE = {torch.float32: 1.5e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

# The kernels of a GPU work on tiles of keys, counted from the first slot (docs/ops/attention.md).
TILES = torch.quartz.substrate() == "cuda"


def reference(q, k, v, mask=None, *, causal=False, scale=None, window=None, soft_cap=None, sinks=None, offset=None):
    """The formula in float64, every step of it written out."""
    q, k, v = q.cpu().double(), k.cpu().double(), v.cpu().double()
    group, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        mask = mask.cpu()
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    position = torch.arange(queries)[:, None] + (keys - queries if offset is None else offset)
    if causal:
        scores = scores.masked_fill(torch.arange(keys) > position, -math.inf)
    if window is not None:
        scores = scores.masked_fill(torch.arange(keys) <= position - window, -math.inf)
    if sinks is not None:
        extra = sinks.cpu().double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, extra], -1), -1).nan_to_num()[..., :-1] @ v
    return torch.softmax(scores, -1).nan_to_num() @ v


def inputs(dtype, batch=2, heads=6, kv_heads=2, queries=5, keys=9, size=32, value_size=None, device="quartz", seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, heads, queries, size),
        (batch, kv_heads, keys, size),
        (batch, kv_heads, keys, size if value_size is None else value_size),
    )
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys", "size", "value_size"),
    [
        (1, 1, 1, 1, 16, 16),
        (9, 3, 1, 300, 64, 64),
        (8, 8, 70, 70, 128, 128),
        (32, 2, 3, 129, 80, 80),
        (4, 1, 40, 65, 256, 24),
        (3, 3, 17, 500, 17, 5),
        (2, 1, 2, 64, 576, 512),
        (71, 1, 1, 20, 64, 64),
    ],
)
def test_values(dtype, heads, kv_heads, queries, keys, size, value_size):
    q, k, v = inputs(dtype, 2, heads, kv_heads, queries, keys, size, value_size)
    for options in ({}, {"causal": True}, {"causal": True, "window": 7}, {"scale": 0.3}, {"soft_cap": 5.0}):
        got = ops.attention(q, k, v, **options)
        assert got.dtype == dtype and got.shape == (2, heads, queries, value_size) and got.device.type == "quartz"
        want = reference(q, k, v, **options)
        torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=TOLERANCE[dtype])
        if torch.quartz.substrate() == "host":  # a GPU has an order of its own
            assert same_bits(got, ops.attention(q.cpu(), k.cpu(), v.cpu(), **options))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (9,), (5, 9), (1, 1, 9), (6, 5, 1), (2, 1, 5, 9), (2, 6, 5, 9), (1, 6, 1, 9)])
def test_masks_of_every_shape(dtype, shape):
    q, k, v = inputs(dtype)
    generator = torch.Generator().manual_seed(1)
    for mask in (
        torch.rand(shape, generator=generator) < 0.6,
        torch.randn(shape, generator=generator),
        torch.randn(shape, generator=generator).to(dtype),
        torch.randn(shape, generator=generator).masked_fill(torch.rand(shape, generator=generator) < 0.4, -math.inf),
    ):
        for layout in (mask, mask.transpose(-1, -2).contiguous().transpose(-1, -2) if mask.dim() > 1 else mask):
            got = ops.attention(q, k, v, layout.to("quartz"), causal=True, sinks=torch.ones(6, device="quartz"))
            want = reference(q, k, v, mask, causal=True, sinks=torch.ones(6))
            torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=TOLERANCE[dtype])


def test_sinks_and_logsumexp():
    q, k, v = inputs(torch.float32)
    sinks = torch.linspace(-3, 3, 6, device="quartz")
    got = ops.attention(q, k, v, sinks=sinks, causal=True)
    torch.testing.assert_close(got.cpu().double(), reference(q, k, v, sinks=sinks, causal=True), rtol=0, atol=3e-6)
    scores = q.cpu().double() @ k.cpu().double().repeat_interleave(3, 1).transpose(-1, -2) * 32**-0.5
    _, logarithm = ops.attention(q, k, v, return_logsumexp=True)
    torch.testing.assert_close(logarithm.cpu().double(), scores.logsumexp(-1), rtol=0, atol=2e-6)
    scores = torch.cat([scores, sinks.cpu().double().view(1, 6, 1, 1).expand(2, 6, 5, 1)], -1)
    _, logarithm = ops.attention(q, k, v, sinks=sinks, return_logsumexp=True)
    torch.testing.assert_close(logarithm.cpu().double(), scores.logsumexp(-1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_without_keys_are_zero(dtype):
    q, k, v = inputs(dtype, queries=3, keys=2)
    assert not ops.attention(q, k, v, causal=True, query_offset=-1)[:, :, 0].any()
    mask = torch.tensor([[False, False], [True, True], [False, False]], device="quartz")
    got, logarithm = ops.attention(q, k, v, mask, return_logsumexp=True)
    assert not got[:, :, ::2].any() and not got.isnan().any() and (logarithm[:, :, ::2] == -math.inf).all()
    assert not ops.attention(q, k, v, mask, sinks=torch.zeros(6, device="quartz"))[:, :, ::2].any()
    assert not ops.attention(q, k[:, :, :0], v[:, :, :0]).any()
    assert ops.attention(q[:0], k[:0], v[:0]).shape == (0, 6, 3, 32)
    assert ops.attention(q[:, :, :0], k, v).shape == (2, 6, 0, 32)


def test_long_rows_and_large_scores():
    q, k, v = inputs(torch.float32, 1, 2, 1, 2, 20000, 64)
    torch.testing.assert_close(ops.attention(q, k, v).cpu().double(), reference(q, k, v), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        ops.attention(q * 40, k, v).cpu().double(), reference(q * 40, k, v), rtol=0, atol=2e-4
    )  # scores up to 200: their rounding errors, 1e-5, are the relative errors of the result


options_of_rows = st.fixed_dictionaries(
    {
        "window": st.sampled_from([None, 1, 3, 16, 70]),
        "soft_cap": st.sampled_from([None, 10.0]),
        "sinks": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_way_through_a_sequence_gives_the_same_bits(data):
    """Whole prompt = chunks = token by token = rows to verify, in any batch, on any number of threads."""
    dtype = data.draw(st.sampled_from(FLOATS))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 3, 7]))
    size, length = data.draw(st.sampled_from([16, 40, 64, 128])), data.draw(st.integers(1, 200))
    q, k, v = inputs(dtype, 1, kv_heads * group, kv_heads, length, length, size, seed=data.draw(st.integers(0, 99)))
    options = data.draw(options_of_rows)
    options["sinks"] = torch.randn(kv_heads * group).to("quartz") if options["sinks"] else None
    whole = ops.attention(q, k, v, causal=True, **options)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.sampled_from([1, 2, 3, 8])))
        begin = 0
        while begin < length:
            end = min(length, begin + data.draw(st.sampled_from([1, 1, 2, 5, 17, 64, 200])))
            part = ops.attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], causal=True, **options)
            assert same_bits(part, whole[:, :, begin:end])
            # Not causal over the keys that are there, with a mask for the rest and garbage behind.
            if end == begin + 1:
                mask = torch.arange(length, device="quartz") < end
                if options["window"] is not None:
                    mask &= torch.arange(length, device="quartz") > begin - options["window"]
                dirty_k, dirty_v = k.clone(), v.clone()
                behind = 3e4 if TILES and dtype != torch.float32 else float("nan")
                dirty_k[:, :, end:], dirty_v[:, :, end:] = behind, behind
                masked = {**options, "window": None}
                row = ops.attention(q[:, :, begin:end], dirty_k, dirty_v, mask, **masked)
                assert same_bits(row, part)
            begin = end
    finally:
        torch.set_num_threads(threads)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_padding_neighbours_and_layout_change_no_bit(data):
    dtype = data.draw(st.sampled_from(FLOATS))
    left, right = data.draw(st.integers(0, 0 if TILES else 90)), data.draw(st.integers(0, 90))
    length, batch = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 4))
    place = data.draw(st.integers(0, batch - 1))
    size = data.draw(st.sampled_from([16, 64, 96]))
    q, k, v = inputs(dtype, 1, 4, 2, length, length, size, seed=data.draw(st.integers(0, 99)))
    alone = ops.attention(q, k, v, causal=True)
    total = left + length + right
    not_finite = [] if TILES else [float("nan"), float("inf")]  # docs/ops/attention.md, limits
    garbage = data.draw(st.sampled_from([*not_finite, 6e4, 0.0]))
    wide = [torch.full((batch, t.shape[1], total, size), garbage, device="quartz", dtype=dtype) for t in (q, k, v)]
    for target, source in zip(wide, (q, k, v), strict=True):
        target[place, :, left : left + length] = source[0]
    position = torch.arange(total, device="quartz")
    visible = (position <= position[:, None]) & (position >= left) & (position < left + length)
    masks = [visible, torch.zeros(total, total, device="quartz").masked_fill(~visible, -math.inf), None]
    if left or right:
        masks.pop()
    for mask in masks:
        for q_, k_, v_ in (
            wide,
            [surrounded(t) for t in wide],
            [t.transpose(1, 2).contiguous().transpose(1, 2) for t in wide],
        ):
            got = ops.attention(q_, k_, v_, mask, causal=mask is None)
            assert same_bits(got[place, :, left : left + length], alone[0])


@pytest.mark.skipif(TILES, reason="a GPU counts tiles from the first slot, so such a cache gives other bits")
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_cache_that_keeps_the_last_keys_of_a_window(dtype):
    """A sliding-window cache drops old keys, so that a key's place in memory is not its position."""
    q, k, v = inputs(dtype, 2, 4, 2, 150, 150, 64)
    whole = ops.attention(q, k, v, causal=True, window=40)
    for t in (0, 39, 40, 77, 149):
        first = max(0, t - 39)
        row = ops.attention(q[:, :, t : t + 1], k[:, :, first : t + 1], v[:, :, first : t + 1])
        assert same_bits(row, whole[:, :, t : t + 1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 6e4])
def test_values_that_a_query_may_not_see_do_not_reach_it(dtype, garbage):
    if TILES and dtype != torch.float32 and not math.isfinite(garbage):
        pytest.skip("documented: within a tile of 128 keys such a value reaches the rows that do not see it")
    q, k, v = inputs(dtype, 1, 6, 3, 100, 100, 64)
    clean = ops.attention(q, k, v, causal=True)
    for place in (1, 50, 99):
        dirty_k, dirty_v = k.clone(), v.clone()
        dirty_k[:, :, place], dirty_v[:, :, place] = garbage, garbage
        got = ops.attention(q, dirty_k, dirty_v, causal=True)
        assert same_bits(got[:, :, :place], clean[:, :, :place])
        mask = torch.arange(100, device="quartz") != place
        hidden = ops.attention(q, k, v, mask, causal=True)
        assert same_bits(ops.attention(q, dirty_k, dirty_v, mask, causal=True), hidden)
        for t in (place, 99):  # decoding skips it in the same way
            row = ops.attention(q[:, :, t : t + 1], dirty_k, dirty_v, mask, causal=True, query_offset=t)
            assert same_bits(row, hidden[:, :, t : t + 1])


@pytest.mark.skipif(TILES, reason="documented: within a tile of 128 keys they reach the others, too")
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_values_that_are_not_finite_reach_the_rows_that_see_them_only(size, window):
    """Over several tiles of keys: every row has the bits that it has alone."""
    q, k, v = inputs(torch.bfloat16, 1, 4, 2, 300, 300, size)
    clean = ops.attention(q, k, v, causal=True, window=window)
    v[:, 0, 20, 5], v[:, 1, 128, 0], v[:, :, 290] = float("inf"), float("nan"), -float("inf")
    whole = ops.attention(q, k, v, causal=True, window=window)
    assert same_bits(whole[:, :, :20], clean[:, :, :20])
    if window is not None:
        assert same_bits(whole[:, :, 220:290], clean[:, :, 220:290])
    assert not whole[:, :, 290:].isfinite().any()
    for t in (19, 20, 100, 127, 128, 150, 289, 290, 299):
        options = {"causal": True, "window": window, "query_offset": t}
        row = ops.attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], **options)
        assert same_bits(row, whole[:, :, t : t + 1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_instruction_sets_agree(dtype, instruction_sets):
    for shape in ((1, 9, 3, 1, 300, 64), (2, 4, 4, 70, 70, 80), (1, 16, 1, 3, 100, 17)):
        q, k, v = inputs(dtype, *shape)
        mask = torch.randn(shape[3], shape[4], device="quartz")
        sinks = torch.randn(shape[1], device="quartz")
        results = [ops.attention(q, k, v, mask, causal=True, soft_cap=3.0, sinks=sinks) for _ in instruction_sets()]
        assert all(same_bits(result, results[0]) for result in results)


def test_gradients():
    torch.manual_seed(0)
    options = [
        {},
        {"causal": True, "window": 3},
        {"soft_cap": 2.0, "scale": 0.5},
        {"sinks": True},
        {"mask": torch.rand(5, 9) < 0.5},
        {"mask": torch.randn(2, 1, 5, 9)},
        {"mask": torch.randn(1, 6, 1, 9), "causal": True, "sinks": True, "soft_cap": 4.0},
    ]
    for option in options:
        tensors = inputs(torch.float32, value_size=16)
        extra = dict(option)
        mask = extra.pop("mask", None)
        names = ["q", "k", "v"]
        if extra.pop("sinks", False):
            extra["sinks"] = torch.randn(6)
            names.append("sinks")
        if mask is not None and mask.dtype != torch.bool:
            names.append("mask")
        ours = {n: t.detach().to("quartz").requires_grad_() for n, t in zip("qkv", tensors, strict=True)}
        wide = {n: t.detach().cpu().double().requires_grad_() for n, t in zip("qkv", tensors, strict=True)}
        for target, device, dtype in ((ours, "quartz", torch.float32), (wide, "cpu", torch.float64)):
            target["mask"] = mask if mask is None else mask.to(device)
            if "mask" in names:
                target["mask"] = mask.to(device, dtype).requires_grad_()
            target["sinks"] = extra["sinks"].to(device, dtype).requires_grad_() if "sinks" in extra else None
        rest = {n: value for n, value in extra.items() if n != "sinks"}
        got = ops.attention(ours["q"], ours["k"], ours["v"], ours["mask"], sinks=ours["sinks"], **rest)
        want = reference(**wide, **rest)
        cotangent = torch.randn(want.shape, dtype=torch.float64)
        got = torch.autograd.grad(got, [ours[n] for n in names], cotangent.to("quartz", torch.float32))
        want = torch.autograd.grad(want, [wide[n] for n in names], cotangent)
        for name, a, b in zip(names, got, want, strict=True):
            torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-5, msg=f"{name} {option}")


def test_registrations():
    q, k, v = (t.requires_grad_() for t in inputs(torch.float32))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for extra in ((), (None, True, 0.5, 4, 3.0, torch.ones(6, device="quartz"), 2)):
        torch.library.opcheck(torch.ops.quartz.attention.default, (q, k, v, *extra), test_utils=checks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(1, 2, 3, 4, dtype=torch.float64)}, "query must be float32, float16 or bfloat16, got Double"),
        ({"q": torch.ones(2, 3, 4)}, r"query must have the shape \(batch, heads, tokens, size\), got \[2, 3, 4\]"),
        ({"k": torch.ones(1, 2, 3, 4).half()}, "key must have the dtype of query, got Half"),
        ({"k": torch.ones(2, 2, 3, 4)}, "key must have the batch size of query, got 2 and 1"),
        ({"k": torch.ones(1, 2, 3, 5)}, "key must have the head size of query, got 5 and 4"),
        ({"v": torch.ones(1, 1, 3, 4)}, "value must have the heads and tokens of key"),
        ({"q": torch.ones(1, 3, 3, 4)}, "query must have a multiple of the heads of key, got 3 and 2"),
        ({"mask": torch.ones(3, 2)}, r"mask must broadcast to \(batch, heads, queries, keys\), got \[3, 2\]"),
        ({"mask": torch.ones(3, 3, dtype=torch.int64)}, "mask must be bool, float32, float16 or bfloat16, got Long"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"soft_cap": -1.0}, "soft_cap must be positive, got -1"),
        ({"sinks": torch.ones(3)}, r"sinks must have one element for each head, got \[3\] and 2 heads"),
    ],
)
def test_errors(change, message):
    arguments = {"q": torch.ones(1, 2, 3, 4), "k": torch.ones(1, 2, 3, 4), "v": torch.ones(1, 2, 3, 4), **change}
    arguments = {n: a.to("quartz") if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    with pytest.raises(RuntimeError, match="quartz::attention: " + message):
        ops.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_tensors_on_two_devices():
    q, k, v = inputs(torch.float32)
    with pytest.raises(RuntimeError, match="key must be on the device of query, quartz:0, got cpu"):
        ops.attention(q, k.cpu(), v)


# ---- scaled_dot_product_attention ------------------------------------------------------------------------------------


def counted(call):
    torch.quartz.reset_op_counts()
    result = call()
    name = "aten::_scaled_dot_product_fused_attention_overrideable"
    return result, torch.quartz.op_counts().get(name, (0, 0))[0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.rand(5, 9) < 0.6},
        {"attn_mask": torch.randn(2, 1, 5, 9)},
        {"dropout_p": 0.0, "attn_mask": torch.rand(2, 6, 1, 9) < 0.8},
    ],
)
def test_sdpa_is_this_kernel_with_and_without_gradients(dtype, options):
    q, k, v = inputs(dtype, value_size=24)
    options = {n: t.to("quartz") if isinstance(t, torch.Tensor) else t for n, t in options.items()}
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        mask = options["attn_mask"] = mask.to(dtype)
    plain, calls = counted(lambda: sdpa(q, k, v, enable_gqa=True, **options))
    assert calls == 1 and plain.shape == (2, 6, 5, 24)
    tracked = sdpa(*(t.clone().requires_grad_() for t in (q, k, v)), enable_gqa=True, **options)
    assert tracked.requires_grad and same_bits(tracked, plain)
    ours = ops.attention(
        q, k, v, mask, causal=options.get("is_causal", False), scale=options.get("scale"), query_offset=0
    )
    assert same_bits(ours, plain)
    native = sdpa(
        q.cpu(),
        k.cpu(),
        v.cpu(),
        enable_gqa=True,
        **{n: t.cpu() if n == "attn_mask" else t for n, t in options.items()},
    )
    torch.testing.assert_close(plain.cpu(), native, rtol=0, atol=TOLERANCE[dtype] * 2)


def test_sdpa_on_three_dimensions():
    q, k, v = (t[0] for t in inputs(torch.float32, heads=2))
    got, calls = counted(lambda: sdpa(q, k, v))
    torch.testing.assert_close(got.cpu(), sdpa(q.cpu(), k.cpu(), v.cpu()))
    assert calls == 0  # PyTorch's composition of products and a softmax


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tracked", [False, True])
def test_sdpa_fully_masked_rows(dtype, tracked):  # B1
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 2, 4).to("quartz", dtype).requires_grad_(tracked) for _ in range(3))
    visible = torch.tensor([[False, False], [True, True]])
    for mask in (visible, torch.zeros(2, 2, dtype=dtype).masked_fill(~visible, -math.inf)):
        got = sdpa(q, k, v, attn_mask=mask.to("quartz"))
        assert not got[:, :, 0].any() and not got.isnan().any()
        want = sdpa(q.detach().cpu(), k.detach().cpu(), v.detach().cpu(), attn_mask=mask)
        torch.testing.assert_close(got[:, :, 1].detach().cpu(), want[:, :, 1], rtol=0, atol=TOLERANCE[dtype])
        if tracked:
            gradients = torch.autograd.grad(got.sum(), (q, k, v))
            assert all(not gradient.isnan().any() for gradient in gradients)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.rand(5, 9) < 0.6},
        {"attn_mask": torch.randn(6, 1, 9)},
        {"scale": 0.5},
    ],
)
@pytest.mark.parametrize("value_size", [32, 24])
@pytest.mark.parametrize("kv_heads", [2, 6])
def test_sdpa_gradients(options, value_size, kv_heads):
    tensors = inputs(torch.float32, kv_heads=kv_heads, value_size=value_size, device="cpu")
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        tensors.append(mask)
    cotangent = torch.randn(2, 6, 5, value_size)
    results = []
    for device, dtype in (("quartz", torch.float32), ("cpu", torch.float64)):
        leaves = [t.to(device, dtype).requires_grad_() for t in tensors]
        extra = {**options}
        if mask is not None:
            extra["attn_mask"] = leaves[3] if len(leaves) == 4 else mask.to(device)
        out = sdpa(*leaves[:3], enable_gqa=True, **extra)
        cotangent = cotangent.to(device, dtype)
        plain = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH) if device == "cpu" else nullcontext():
            out = sdpa(*leaves[:3], enable_gqa=True, **extra)
        once = torch.autograd.grad(out, leaves, cotangent, create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in once), leaves)
        results.append([t.detach().cpu().double() for t in (*plain, *once, *twice)])
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-3)


def test_what_sdpa_leaves_to_pytorch():
    q, k, v = inputs(torch.float32, heads=2)
    torch.quartz.manual_seed(3)
    first, calls = counted(lambda: sdpa(q, k, v, dropout_p=0.5))
    assert calls == 0
    torch.quartz.manual_seed(3)
    assert same_bits(first, sdpa(q, k, v, dropout_p=0.5))  # dropout draws from quartz's generator
    assert not same_bits(first, sdpa(q, k, v, dropout_p=0.5))
    wide, calls = counted(lambda: sdpa(q.double(), k.double(), v.double()))
    assert calls == 0
    torch.testing.assert_close(wide.cpu(), sdpa(q.cpu().double(), k.cpu().double(), v.cpu().double()))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, calls = counted(lambda: sdpa(q, k, v))
    assert calls == 0


def test_sdpa_under_transformations():
    """Within `torch.func` PyTorch's own kernel serves it: the operator has no batching rule."""
    q = torch.randn(3, 2, 4, 5, 8)

    def attend(x):
        return sdpa(x, x, x, is_causal=True)

    slope = torch.func.grad(lambda x: attend(x).square().sum())
    for function in (torch.vmap(attend), torch.vmap(slope), lambda x: slope(x[0])):
        torch.testing.assert_close(function(q.to("quartz")).cpu(), function(q), rtol=1e-4, atol=1e-4)


def test_a_compiled_sdpa_has_the_bits_of_the_eager_one():
    q, k, v = inputs(torch.float32, heads=2)

    def attend(q, k, v):
        return sdpa(q, k, v, is_causal=True) * 2

    assert same_bits(torch.compile(attend, backend="aot_eager")(q, k, v), attend(q, k, v))
