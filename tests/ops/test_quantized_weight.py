"""The layouts of checkpoints, each against a plain loop over its bytes; bad scales (case I1)."""

import math

import pytest
import torch
from torch_quartz import ops
from torch_quartz.testing import same_bits

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def values_of(packed):
    """The numbers of packed e2m1 codes, the low half of a byte first, in plain Python."""
    flat = [E2M1[half] for byte in packed.flatten().tolist() for half in (byte & 15, byte >> 4)]
    return torch.tensor(flat).reshape(*packed.shape[:-1], -1)


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def random_e4m3(*shape):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 8 + 0.1).to(torch.float8_e4m3fn)


def test_nvfp4_of_compressed_tensors():
    packed, scale, total = random_bytes(6, 32), random_e4m3(6, 4), torch.tensor([256.0])
    weight = ops.from_compressed_tensors(weight_packed=packed, weight_scale=scale, weight_global_scale=total)
    expected = values_of(packed) * (scale.float() / total).repeat_interleave(16, -1)
    assert same_bits(weight.dequantize(torch.float32), expected)
    assert weight.codes.data_ptr() == packed.data_ptr() and weight.scales.data_ptr() == scale.data_ptr()
    x = torch.randn(3, 64)
    torch.testing.assert_close(ops.linear_quantized(x, weight), x @ expected.t(), rtol=1e-5, atol=1e-5)


def test_nvfp4_of_modelopt():
    packed, scale, total = random_bytes(6, 32), random_e4m3(6, 4), torch.tensor(0.25)
    weight = ops.from_modelopt(weight=packed, weight_scale=scale, weight_scale_2=total)
    expected = values_of(packed) * scale.float().repeat_interleave(16, -1) * total
    assert same_bits(weight.dequantize(torch.float32), expected)
    assert weight.codes.data_ptr() == packed.data_ptr()


def test_stacks_with_a_global_scale_for_each_expert_and_row():
    packed, scale = random_bytes(3, 6, 32), random_e4m3(3, 6, 4)
    plain = values_of(packed) * scale.float().repeat_interleave(16, -1)
    for total in (torch.tensor([0.5, 2.0, 4.0]), torch.tensor([0.5, 2.0, 4.0]).reshape(3, 1, 1)):
        weight = ops.from_modelopt(weight=packed, weight_scale=scale, weight_scale_2=total)
        assert same_bits(weight.dequantize(torch.float32), plain * total.reshape(3, 1, 1))
        assert weight[1].codes.data_ptr() == packed[1].data_ptr()
    each_row = 2.0 ** torch.arange(18).reshape(3, 6).float()
    weight = ops.from_modelopt(weight=packed, weight_scale=scale, weight_scale_2=each_row)
    assert same_bits(weight.dequantize(torch.float32), plain * each_row.unsqueeze(-1))
    x, ids, weights = torch.randn(4, 64), torch.tensor([[0], [1], [2], [1]]), torch.ones(4, 1)
    down = ops.QuantizedWeight(*ops.quantize_mxfp4(torch.randn(3, 64, 3)), format="mxfp4", columns=3)
    up = ops.from_compressed_tensors(weight_packed=packed, weight_scale=scale.view(torch.uint8)[..., ::2])
    assert up.format == "mxfp4"
    assert ops.moe_experts_quantized(x, ids, weights, up, down).shape == (4, 64)


def test_mxfp4_of_gpt_oss():
    blocks, scales = random_bytes(2, 6, 3, 16), torch.randint(110, 140, (2, 6, 3), dtype=torch.uint8)
    weight = ops.from_mxfp4(blocks, scales)
    expected = values_of(blocks) * 2.0 ** (scales.float() - 127).unsqueeze(-1)
    assert same_bits(weight.dequantize(torch.float32), expected.flatten(-2))
    assert weight.codes.data_ptr() == blocks.data_ptr() and weight.codes.shape == (2, 6, 48) and weight.columns == 96
    with pytest.raises(ValueError, match="blocks must have 16 bytes for each of scales"):
        ops.from_mxfp4(blocks, scales[..., :2])


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_of_transformers(scale_dtype):
    codes = torch.randn(200, 300).to(torch.float8_e4m3fn)
    inverse = (torch.rand(2, 3) + 0.5).to(scale_dtype)
    weight = ops.from_fp8(codes, inverse)
    wide = inverse.float().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert same_bits(weight.dequantize(torch.float32), codes.float() * wide)
    assert weight.codes.data_ptr() == codes.data_ptr()
    x = torch.randn(2, 300)
    torch.testing.assert_close(ops.linear_quantized(x, weight), x @ (codes.float() * wide).t(), rtol=1e-5, atol=1e-4)
    for shape in ((), (1,), (200, 1)):
        scale = torch.rand(shape) + 0.5
        for weight in (
            ops.from_compressed_tensors(weight=codes, weight_scale=scale),
            ops.from_modelopt(weight=codes, weight_scale=scale),
        ):
            assert same_bits(weight.dequantize(torch.float32), codes.float() * scale)
    with pytest.raises(ValueError, match=r"fp8 checkpoint, got torch\.float8_e5m2"):
        ops.from_fp8(torch.ones(2, 2).to(torch.float8_e5m2), torch.ones(1, 1))


def test_bad_scales_are_refused_or_repaired():
    """I1: an infinite or NaN scale is an error, or has no effect where everything it covers is zero."""
    packed, scale = random_bytes(4, 32) | 1, random_e4m3(4, 4)
    with pytest.raises(ValueError, match="inverse of weight_global_scale must be finite, got nan"):
        ops.from_compressed_tensors(
            weight_packed=packed, weight_scale=scale, weight_global_scale=torch.tensor([math.inf])
        )
    with pytest.raises(ValueError, match="weight_scale_2 must be finite, got inf"):
        ops.from_modelopt(weight=packed, weight_scale=scale, weight_scale_2=torch.tensor(math.inf))
    with pytest.raises(ValueError, match="weight_scale_inv must be finite, got nan"):
        ops.from_fp8(torch.ones(2, 2).to(torch.float8_e4m3fn), torch.tensor([[math.nan]]))
    bad = scale.view(torch.uint8).clone()
    bad[1, 2] = 0x7F
    with pytest.raises(ValueError, match=r"weight_scale must be numbers, got NaN at \[1, 2\]"):
        ops.from_modelopt(weight=packed, weight_scale=bad.view(torch.float8_e4m3fn), weight_scale_2=torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"scales must be numbers, got NaN at \[0, 0\]"):
        ops.from_mxfp4(random_bytes(1, 1, 16) | 1, torch.full((1, 1), 255, dtype=torch.uint8))

    zero_group = packed.clone()
    zero_group[1, 16:24] = 0x88  # -0
    with pytest.warns(UserWarning, match="has NaN where all codes are zero"):
        weight = ops.from_modelopt(
            weight=zero_group, weight_scale=bad.view(torch.float8_e4m3fn), weight_scale_2=torch.tensor(1.0)
        )
    assert (weight.dequantize()[1, 32:48] == 0).all() and not weight.dequantize().isnan().any()
    stack = torch.stack([packed, torch.zeros_like(packed)])
    with pytest.warns(UserWarning, match="is not finite where all codes are zero"):
        weight = ops.from_compressed_tensors(
            weight_packed=stack,
            weight_scale=torch.stack([scale, scale]),
            weight_global_scale=torch.tensor([2.0, math.inf]),
        )
    assert (weight[1].dequantize() == 0).all() and not weight[0].dequantize().isnan().any()


def test_tensors_that_make_no_format():
    packed, scale = random_bytes(4, 32), random_e4m3(4, 4)
    with pytest.raises(ValueError, match="weight_packed or weight must be given"):
        ops.from_compressed_tensors(weight_scale=scale)
    with pytest.raises(ValueError, match="weight_global_scale must be given"):
        ops.from_compressed_tensors(weight_packed=packed, weight_scale=scale)
    with pytest.raises(ValueError, match=r"for NVFP4, got torch\.uint8"):
        ops.from_compressed_tensors(
            weight_packed=packed, weight_scale=random_bytes(4, 2), weight_global_scale=torch.ones(1)
        )
    with pytest.raises(IndexError, match="only a stack has matrices"):
        ops.from_modelopt(weight=packed, weight_scale=scale, weight_scale_2=torch.ones(()))[0]


@pytest.mark.parametrize("rows", [1, 128, 200])
@pytest.mark.parametrize("columns", [1, 4, 7])
def test_unswizzled_scales(rows, columns):
    down, across = -(-rows // 128), -(-columns // 4)
    swizzled = random_bytes(down * across * 512)
    plain = ops.unswizzle_scales(swizzled, rows, columns)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * across + c // 4
            at = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
            assert plain[r, c] == swizzled[at]
    assert ops.unswizzle_scales(swizzled.view(torch.float8_e4m3fn), rows, columns).dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="scales must have"):
        ops.unswizzle_scales(swizzled[:-1], rows, columns)
