"""Quantised weights: bits of the product with the decoded weight, float64, bad input. Cases I1, I2, I4."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits

DEVICES = ["quartz", "cpu"] + (["cuda"] if torch.cuda.is_available() else [])
KINDS = ["fp8 tensor", "fp8 row", "fp8 group", "fp8 block", "nvfp4", "mxfp4"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def quantized(kind, *shape, seed=0, block=32):
    """A weight whose scales of matrices and rows are powers of two, so that they commute with every rounding."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator) * 0.2
    if kind == "nvfp4":
        codes, scales, _ = ops.quantize_nvfp4(w, torch.tensor(2.0**-12))
        total = torch.tensor(2.0**-12) * 2.0 ** torch.arange(shape[0]) if len(shape) == 3 else torch.tensor(2.0**-12)
        return ops.QuantizedWeight(codes, scales, total, kind, shape[-1])
    if kind == "mxfp4":
        return ops.QuantizedWeight(*ops.quantize_mxfp4(w), None, kind, shape[-1])
    granularity = kind.split()[1]
    if granularity == "block" and len(shape) == 3:
        parts = [ops.quantize_fp8(part, granularity, block) for part in w]
        codes, scales = (torch.stack(t) for t in zip(*parts, strict=True))
    else:
        codes, scales = ops.quantize_fp8(w, granularity, block)
    if scales.numel() == 1 or scales.shape[-1] == 1:  # also what one group or block makes of a small weight
        scales = 2.0 ** torch.ceil(torch.log2(scales))
        if granularity == "row":  # rows of different scales
            scales = scales * 2.0 ** (torch.arange(shape[-2]).reshape(-1, 1) % 5 - 2)
    return ops.QuantizedWeight(codes, scales, None, "fp8", shape[-1], block)


def rows_of(shape, dtype, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(33, 16), (300, 517), (64, 1024), (1, 47), (3, 24), (130, 1), (64, 128)])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_bits_of_the_product_with_the_decoded_weight(device, dtype, kind, shape, rows):
    weight, x = quantized(kind, *shape).to(device), rows_of((rows, shape[1]), dtype).to(device)
    bias = rows_of((shape[0],), dtype, 2).to(device)
    got = ops.linear_quantized(x, weight, bias)
    decoded = weight.dequantize(dtype)
    assert same_bits(got, ops.linear(x, decoded, bias))
    reference = x.cpu().double() @ decoded.cpu().double().t() + bias.cpu().double()
    largest = (x.cpu().double().abs() @ decoded.cpu().double().abs().t()).max().item() + 1
    torch.testing.assert_close(
        got.cpu().double(), reference, rtol=TOLERANCE[dtype], atol=0.1 * TOLERANCE[dtype] * largest
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_matrices_and_rows_come_after_the_sum(device, kind):
    weight, x = quantized(kind, 40, 300).to(device), rows_of((5, 300), torch.float32).to(device)
    scale = torch.rand(40, 1).to(device) + 0.5
    if kind in ("fp8 tensor", "fp8 row"):
        plain = ops.QuantizedWeight(weight.codes, torch.ones((), device=device))
        scaled = ops.QuantizedWeight(weight.codes, scale)
    elif kind.endswith("fp4"):
        plain = ops.QuantizedWeight(weight.codes, weight.scales, None, kind, 300)
        scaled = ops.QuantizedWeight(weight.codes, weight.scales, scale, kind, 300)
    else:
        return
    assert same_bits(ops.linear_quantized(x, scaled), ops.linear_quantized(x, plain) * scale.reshape(1, -1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set_gives_the_same_bits(instruction_sets, dtype, kind):
    weight, x = quantized(kind, 70, 333).to("quartz"), rows_of((9, 333), dtype).to("quartz")
    results = [ops.linear_quantized(x, weight, None, "silu").cpu() for _ in instruction_sets()]
    assert all(same_bits(results[0], result) for result in results)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 40), row=st.integers(0, 39), dtype=st.sampled_from(FLOATS), quantize=st.booleans())
def test_a_row_does_not_see_the_others(kind, rows, row, dtype, quantize):
    weight, row = quantized(kind, 37, 200).to("quartz"), row % rows
    x = rows_of((rows, 200), dtype).to("quartz")
    x[torch.arange(rows) != row] *= 1000
    how = "token" if quantize else "none"
    alone = ops.linear_quantized(x[row : row + 1].clone(), weight, quantize_input=how)
    assert same_bits(ops.linear_quantized(x, weight, quantize_input=how)[row : row + 1], alone)
    strided = torch.zeros(rows, 400, dtype=dtype, device="quartz")[:, ::2].copy_(x)
    assert same_bits(ops.linear_quantized(strided, weight, quantize_input=how)[row : row + 1], alone)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_input(device, dtype, kind):
    weight, x = quantized(kind, 50, 300).to(device), rows_of((6, 300), dtype).to(device)
    x[2] = 0
    codes, scales = ops.quantize_fp8(x, "group", 128)
    got = ops.linear_quantized(x, weight, quantize_input="group")
    assert same_bits(got, ops.linear_quantized(ops.dequantize_fp8(codes, scales, dtype, 128), weight))

    codes, scales = ops.quantize_fp8(x, "row")
    got = ops.linear_quantized(x, weight, quantize_input="token").cpu().double()
    reference = codes.cpu().double() @ weight.dequantize(torch.float32).cpu().double().t() * scales.cpu().double()
    torch.testing.assert_close(got, reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if dtype == torch.float32 and kind != "fp8 tensor" and kind != "fp8 row":
        plain = ops.linear_quantized(codes.float(), weight)
        assert same_bits(ops.linear_quantized(x, weight, quantize_input="token"), plain * scales)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu", "gelu_tanh", "gelu_quick"])
def test_activations(device, activation):
    weight, x = quantized("mxfp4", 50, 96).to(device), rows_of((6, 96), torch.bfloat16).to(device)
    bias = rows_of((50,), torch.bfloat16).to(device)
    decoded = weight.dequantize(torch.bfloat16)
    got = ops.linear_quantized(x, weight, bias, activation)
    assert same_bits(got, ops.linear(x, decoded, bias, activation))


@pytest.mark.parametrize("device", DEVICES)
def test_special_scales_and_codes(device):
    """I1: zeros stay zeros; a NaN in one row of the weight is in its column only."""
    for kind in KINDS:
        weight = quantized(kind, 20, 64)
        codes = weight.codes.view(torch.uint8).clone()
        codes[7] = 0
        if kind.startswith("fp8"):
            codes[3, 5] = 0x7F
            weight = ops.QuantizedWeight(codes.view(torch.float8_e4m3fn), weight.scales, None, "fp8", 64, 32)
        else:
            scales = weight.scales.view(torch.uint8).clone()
            scales[3, 1] = 0x7F if kind == "nvfp4" else 0xFF
            scales[4] = 0  # 0, or the subnormal 2^-127
            weight = ops.QuantizedWeight(codes, scales.view(weight.scales.dtype), weight.global_scale, kind, 64)
        got = ops.linear_quantized(rows_of((3, 64), torch.bfloat16).to(device), weight.to(device)).cpu()
        assert got[:, 3].isnan().all()
        assert not got[:, [n for n in range(20) if n != 3]].isnan().any()
        assert (got[:, 7] == 0).all()
    zeros = ops.quantize_nvfp4(torch.zeros(4, 32))
    weight = ops.QuantizedWeight(*zeros, "nvfp4", 32).to(device)
    assert (ops.linear_quantized(torch.ones(2, 32, device=device), weight) == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_layouts_and_empty_sizes(device):
    weight = quantized("nvfp4", 24, 48).to(device)
    x = rows_of((2, 3, 48), torch.bfloat16).to(device)
    got = ops.linear_quantized(x, weight)
    assert got.shape == (2, 3, 24) and same_bits(got.reshape(6, 24), ops.linear_quantized(x.reshape(6, 48), weight))
    assert same_bits(ops.linear_quantized(x[0, 0], weight), got[0, 0])
    wide = torch.zeros(24, 40, dtype=torch.uint8, device=device)
    wide[:, 3:27] = weight.codes
    strided = ops.QuantizedWeight(wide[:, 3:27], weight.scales, weight.global_scale, "nvfp4", 48)
    assert same_bits(ops.linear_quantized(x, strided), got)
    assert ops.linear_quantized(x[:0], weight).shape == (0, 3, 24)
    none = ops.QuantizedWeight(weight.codes[:0], weight.scales[:0], None, "nvfp4", 48)
    assert ops.linear_quantized(x, none).shape == (2, 3, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_gradients(device, kind, activation):
    weight = quantized(kind, 20, 64).to(device)
    x, bias = rows_of((4, 64), torch.float32).to(device), rows_of((20,), torch.float32).to(device)
    grad = rows_of((4, 20), torch.float32, 5).to(device)
    leaves = [t.clone().requires_grad_() for t in (x, bias)]
    got = torch.autograd.grad(ops.linear_quantized(leaves[0], weight, leaves[1], activation), leaves, grad)
    decoded = weight.dequantize(torch.float32).cpu()
    plain = [t.cpu().requires_grad_() for t in (x, bias)]
    out = torch.nn.functional.linear(plain[0], decoded, plain[1])
    out = torch.nn.functional.silu(out) if activation == "silu" else out
    for one, other in zip(got, torch.autograd.grad(out, plain, grad.cpu()), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="quantize_input must be 'none' where x requires a gradient, got 'token'"):
        ops.linear_quantized(leaves[0], weight, quantize_input="token")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 61)}, "codes must have a byte for two columns of its input, got"),
        ({"x": torch.ones(2, 64).int()}, "x must be float32, float16 or bfloat16, got Int"),
        ({"codes": torch.ones(8, 32)}, "codes must be uint8, two codes a byte, got Float"),
        ({"codes": torch.ones(8, 2, 32, dtype=torch.uint8)}, "codes must be a matrix, got"),
        ({"scales": torch.ones(8, 4)}, "the scales of 'nvfp4' must be float8_e4m3fn or its bytes, got Float"),
        ({"scales": torch.ones(8, 3, dtype=torch.uint8)}, "the scales of 'nvfp4' must be one for each 16 elements"),
        ({"global_scale": torch.ones(3)}, "global_scale must be one number, one a matrix or one a row, got"),
        ({"global_scale": torch.ones(1).half()}, "global_scale must be float32, got Half"),
        ({"bias": torch.ones(7)}, "bias must have one element for each row of codes, got"),
        ({"bias": torch.ones(8).half()}, "bias must have the dtype of x, got Half"),
        ({"format": "fp8"}, "codes must be float8_e4m3fn for format 'fp8', got Byte"),
    ],
)
def test_bad_arguments(change, message):
    weight = quantized("nvfp4", 8, 64)
    arguments = {
        "x": torch.ones(2, 64),
        "codes": weight.codes,
        "scales": weight.scales,
        "global_scale": weight.global_scale,
        "bias": None,
        "format": "nvfp4",
    } | change
    arguments = {k: v.to("quartz") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.quartz.linear_quantized(**arguments)


def test_bad_values_and_shapes_of_fp8():
    weight, x = quantized("fp8 block", 64, 64), torch.ones(2, 64)
    for wrong, message in (({"scales": torch.ones(3, 2)}, "one for each group or block"), ({"block": 0}, "positive")):
        arguments = {"scales": weight.scales, "block": 32} | wrong
        with pytest.raises(RuntimeError, match=message):
            torch.ops.quartz.linear_quantized(x, weight.codes, format="fp8", **arguments)
    with pytest.raises(RuntimeError, match="global_scale must be None for format 'fp8'"):
        torch.ops.quartz.linear_quantized(x, weight.codes, weight.scales, torch.ones(()), block=32)
    for wrong in ({"format": "int4"}, {"activation": "tanh"}, {"quantize_input": "tensor"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            torch.ops.quartz.linear_quantized(x, weight.codes, weight.scales, block=32, **wrong)
    with pytest.raises(RuntimeError, match="must be on the device of"):
        ops.linear_quantized(x.to("quartz"), weight)
    with pytest.raises(ValueError, match="format must be one of fp8, nvfp4, mxfp4, got 'int8'"):
        ops.QuantizedWeight(weight.codes, weight.scales, format="int8")


@pytest.mark.parametrize("kind", ["fp8 block", "nvfp4", "mxfp4"])
def test_opcheck_and_compile(kind):
    weight = quantized(kind, 16, 64).to("quartz")
    x = rows_of((3, 64), torch.float32).to("quartz").requires_grad_()
    arguments = (x, weight.codes, weight.scales, weight.global_scale, None, weight.format, weight.block)
    # test_schema and the gradient tests compute with every argument, and no device multiplies one-byte floats.
    torch.library.opcheck(torch.ops.quartz.linear_quantized.default, arguments, test_utils=("test_faketensor",))
    compiled = torch.compile(lambda x: ops.linear_quantized(x, weight) * 2, backend="aot_eager")
    assert same_bits(compiled(x.detach()), ops.linear_quantized(x.detach(), weight) * 2)


def experts(kind, seed=3, gated=True):
    """Sizes that the GPU's kernels serve."""
    width = 128 if gated else 64
    return quantized(kind, 5, width, 128, seed=seed), quantized(kind, 5, 128, 64, seed=seed + 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["plain", "gpt-oss", "ungated"])
def test_experts_have_the_bits_of_decoded_experts(device, dtype, kind, style):
    on_gpu = device == "cuda" or (device == "quartz" and torch.quartz.substrate() == "cuda")
    if on_gpu and (dtype == torch.float32 or style == "ungated"):
        with pytest.raises(NotImplementedError, match="on a GPU, float16 or bfloat16, gated by"):
            up, down = (w.to(device) for w in experts(kind, gated=style != "ungated"))
            x, ids = torch.ones(1, 128, dtype=dtype, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)
            ops.moe_experts_quantized(x, ids, ids.float(), up, down, gated=style != "ungated")
        return
    up, down = (w.to(device) for w in experts(kind, gated=style != "ungated"))
    x, ids = rows_of((9, 128), dtype).to(device), torch.randint(-1, 5, (9, 3)).to(device)
    weights = torch.rand(9, 3).to(device)
    options = {
        "plain": {},
        "gpt-oss": {"interleaved": True, "alpha": 1.702, "limit": 7.0, "up_offset": 1.0},
        "ungated": {"gated": False, "activation": "relu_squared"},
    }[style]
    if style == "gpt-oss":
        options |= {"up_bias": rows_of((5, 128), dtype).to(device), "down_bias": rows_of((5, 128), dtype).to(device)}
    got = ops.moe_experts_quantized(x, ids, weights, up, down, **options)
    decoded = [w.dequantize(dtype) for w in (up, down)]
    if style == "gpt-oss":  # the layout that moe_experts wants on a GPU
        decoded = [w.transpose(1, 2).contiguous() for w in decoded]
        options["transposed"] = True
    assert same_bits(got, ops.moe_experts(x, ids, weights, *decoded, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_experts_in_any_order(kind):
    up, down = (w.to("quartz") for w in experts(kind))
    x, ids, weights = rows_of((33, 128), torch.bfloat16), torch.randint(-1, 5, (33, 3)), torch.rand(33, 3)
    ids[4] = -1
    x, ids, weights = (t.to("quartz") for t in (x, ids, weights))
    got = ops.moe_experts_quantized(x, ids, weights, up, down)
    assert (got[4] == 0).all()
    order = torch.randperm(33).to("quartz")
    assert same_bits(ops.moe_experts_quantized(x[order], ids[order], weights[order], up, down), got[order])
    for t in (0, 17):
        alone = ops.moe_experts_quantized(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], up, down)
        assert same_bits(alone, got[t : t + 1])
    assert ops.moe_experts_quantized(x[:0], ids[:0], weights[:0], up, down).shape == (0, 128)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "fp8 block"])
def test_nan_in_one_expert_stays_there(kind):
    """I4: a NaN scale of expert 0 does not reach tokens of expert 1."""
    up, down = (w.to("quartz") for w in experts(kind))
    x, weights = rows_of((6, 128), torch.bfloat16).to("quartz"), torch.ones(6, 1, device="quartz")
    ids = torch.tensor([[0], [1], [0], [1], [2], [1]], device="quartz")
    before = ops.moe_experts_quantized(x, ids, weights, up, down)
    scales = up.scales.clone()
    (scales if kind == "fp8 block" else scales.view(torch.uint8))[0] = {"nvfp4": 0x7F, "mxfp4": 255}.get(
        kind, float("nan")
    )
    bad = ops.QuantizedWeight(up.codes, scales, up.global_scale, up.format, up.columns, up.block)
    after = ops.moe_experts_quantized(x, ids, weights, bad, down)
    assert after[[0, 2]].isnan().all() and same_bits(after[[1, 3, 4, 5]], before[[1, 3, 4, 5]])


@pytest.mark.host  # float32 experts
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_experts(kind, interleaved):
    up, down = (w.to("quartz") for w in experts(kind))
    ids = torch.tensor([[0, 1], [4, -1], [2, 2]]).to("quartz")
    x, weights = rows_of((3, 128), torch.float32).to("quartz"), torch.rand(3, 2).to("quartz")
    grad = rows_of((3, 128), torch.float32, 7).to("quartz")

    def gradients(function, *matrices):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        out = function(leaves[0], ids, leaves[1], *matrices, interleaved=interleaved)
        return torch.autograd.grad(out, leaves, grad)

    decoded = [w.dequantize(torch.float32) for w in (up, down)]
    for got, expected in zip(
        gradients(ops.moe_experts_quantized, up, down), gradients(ops.moe_experts, *decoded), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_bad_experts():
    up, down = experts("nvfp4")
    x, ids, weights = torch.ones(2, 128), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    with pytest.raises(RuntimeError, match="down must have a byte for two columns of its input"):
        ops.moe_experts_quantized(x, ids, weights, up, up)
    with pytest.raises(RuntimeError, match="down must fit the experts, width and hidden size of up"):
        ops.moe_experts_quantized(x, ids, weights, up, quantized("nvfp4", 4, 128, 64))
    with pytest.raises(ValueError, match="one format and block, got nvfp4 128 and mxfp4 128"):
        ops.moe_experts_quantized(x, ids, weights, up, experts("mxfp4")[1])
    bias = torch.zeros(5, 128, requires_grad=True)
    with pytest.raises(RuntimeError, match="up_bias and down_bias must not require a gradient"):
        ops.moe_experts_quantized(x.requires_grad_(), ids, weights, up, down, up_bias=bias)
