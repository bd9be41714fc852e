"""Quantised formats against PyTorch's own float8 types and a plain loop; cases I1 and I2."""

import pytest
import torch
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits

DEVICES = ["quartz", "cpu"] + (["cuda"] if torch.cuda.is_available() else [])
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest_e2m1(value):
    """The code of the nearest number, ties to the even code, in plain Python."""
    magnitude = min(abs(value), 6.0)
    best = min(range(8), key=lambda code: (abs(E2M1[code] - magnitude), code % 2))
    return best if value >= 0 or best == 0 else best + 8


def unpack(packed, columns):
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return codes[..., :columns]


@pytest.mark.parametrize("device", DEVICES)
def test_every_code_of_e4m3(device):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = ops.dequantize_fp8(codes.to(device), torch.ones((), device=device), torch.float32).cpu()
    torch.testing.assert_close(got, codes.float(), equal_nan=True, rtol=0, atol=0)
    back, _ = ops.quantize_fp8((got.nan_to_num(0).to(device)), "tensor")
    finite = ~codes.float().isnan()
    scale = ops.quantize_fp8(got.nan_to_num(0).to(device))[1]
    assert scale.item() == 1.0
    assert torch.equal(back.cpu().float()[finite], codes.float()[finite])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("granularity", ["tensor", "row", "group", "block"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 16), (3, 48), (130, 300), (2, 47)])
def test_fp8(device, dtype, granularity, shape):
    torch.manual_seed(0)
    w = (torch.randn(shape) * 3).to(dtype)
    codes, scales = ops.quantize_fp8(w.to(device), granularity, 32)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == w.shape and scales.dtype == torch.float32
    wide, covered = w.float(), torch.empty(shape)
    height, width = {"tensor": shape, "row": (1, shape[1]), "group": (1, 32), "block": (32, 32)}[granularity]
    for r in range(0, shape[0], height):
        for c in range(0, shape[1], width):
            part = wide[r : r + height, c : c + width]
            covered[r : r + height, c : c + width] = part.abs().max() / 448
    assert torch.equal(codes.cpu().float(), (wide / covered).to(torch.float8_e4m3fn).float())
    back = ops.dequantize_fp8(codes, scales, dtype, 32).cpu()
    assert same_bits(back, (codes.cpu().float() * covered).to(dtype))
    assert ((back.float() - wide).abs() <= wide.abs() * 0.0725 + covered).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(33, 16), (1, 16), (3, 48), (2, 47), (2, 24), (5, 1), (2, 3, 32)])
def test_nvfp4_is_the_plain_loop(device, dtype, shape):
    torch.manual_seed(1)
    w = (torch.randn(shape) * 0.3).to(dtype)
    packed, scales, total = ops.quantize_nvfp4(w.to(device))
    assert packed.shape == (*shape[:-1], -(-shape[-1] // 2)) and scales.shape == (*shape[:-1], -(-shape[-1] // 16))
    assert total.item() == pytest.approx(w.float().abs().max().item() / 2688)
    codes = unpack(packed.cpu(), shape[-1]).reshape(-1, shape[-1])
    rows, groups = w.float().reshape(-1, shape[-1]), scales.cpu().float().reshape(-1, scales.shape[-1])
    for r in range(rows.shape[0]):
        for g in range(groups.shape[1]):
            part = rows[r, 16 * g : 16 * g + 16]
            wanted = (part.abs().max() / 6 / total.cpu()).to(torch.float8_e4m3fn).float()
            assert groups[r, g] == wanted
            step = groups[r, g] * total.cpu()
            assert codes[r, 16 * g : 16 * g + 16].tolist() == [nearest_e2m1((v / step).item()) for v in part]
    values = torch.tensor([*E2M1, *[-v for v in E2M1]])[codes.long()].view(shape)
    exact = values * scales.cpu().float().repeat_interleave(16, -1)[..., : shape[-1]]
    assert torch.equal(ops.dequantize_nvfp4(packed, scales, None, shape[-1], torch.bfloat16).cpu().float(), exact)
    expected = (exact * total.cpu()).to(dtype)
    assert torch.equal(ops.dequantize_nvfp4(packed, scales, total, shape[-1], dtype).cpu(), expected)
    as_bytes = ops.dequantize_nvfp4(packed, scales.view(torch.uint8), total, shape[-1], dtype)
    assert torch.equal(as_bytes.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(3, 32), (1, 64), (2, 47), (5, 1)])
def test_mxfp4_is_the_plain_loop(device, dtype, shape):
    torch.manual_seed(2)
    w = (torch.randn(shape) * torch.logspace(-4, 3, shape[0]).unsqueeze(1)).to(dtype)
    packed, scales = ops.quantize_mxfp4(w.to(device))
    codes, exponents = unpack(packed.cpu(), shape[-1]), scales.cpu().view(torch.uint8).int() - 127
    for r in range(shape[0]):
        for g in range(scales.shape[1]):
            part = w[r, 32 * g : 32 * g + 32].float()
            _, exponent = torch.frexp(part.abs().max())
            assert exponents[r, g] == exponent.item() - 1 - 2
            step = 2.0 ** exponents[r, g].item()
            assert codes[r, 32 * g : 32 * g + 32].tolist() == [nearest_e2m1(v.item() / step) for v in part]
    values = torch.tensor([*E2M1, *[-v for v in E2M1]])[codes.long()]
    exact = values * torch.exp2(exponents.float()).repeat_interleave(32, -1)[..., : shape[-1]]
    got = ops.dequantize_mxfp4(packed, scales, shape[-1], torch.bfloat16)
    assert torch.equal(got.cpu().float(), exact)


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_come_back_as_zeros_and_no_nan_byte_is_written(device):
    torch.manual_seed(0)
    w = torch.rand(32, 64, device=device) - 0.5
    w[:, 16:32] = 0
    packed, scales, total = ops.quantize_nvfp4(w)
    back = ops.dequantize_nvfp4(packed, scales, total, 64, torch.float32)
    assert back.isfinite().all() and back[:, 16:32].eq(0).all() and scales.float().isfinite().all()
    for zeros in (torch.zeros(4, 32, device=device), torch.zeros(0, 32, device=device)):
        packed, scales, total = ops.quantize_nvfp4(zeros)
        assert ops.dequantize_nvfp4(packed, scales, total, 32, torch.float32).eq(0).all() and total.item() == 1
        packed, scales = ops.quantize_mxfp4(zeros)
        assert ops.dequantize_mxfp4(packed, scales, 32, torch.float32).eq(0).all()
        codes, scale = ops.quantize_fp8(zeros)
        assert scale.item() == 1 and ops.dequantize_fp8(codes, scale, torch.float32).eq(0).all()


def test_scales_of_a_group_depend_on_the_group_alone():
    w = torch.randn(8, 64, device="quartz")
    total = torch.tensor(0.01, device="quartz")
    packed, scales, _ = ops.quantize_nvfp4(w, total)
    alone = ops.quantize_nvfp4(w[3:4, 16:32], total)
    assert torch.equal(packed[3:4, 8:16], alone[0]) and torch.equal(
        scales[3:4, 1:2].view(torch.uint8), alone[1].view(torch.uint8)
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w: ops.quantize_fp8(w, "column"), ValueError, "granularity must be 'tensor'.*got 'column'"),
        (lambda w: ops.quantize_fp8(w.long()), RuntimeError, "w must be float32, float16 or bfloat16, got Long"),
        (lambda w: ops.dequantize_fp8(w, w), RuntimeError, "codes must be float8_e4m3fn, got Float"),
        (
            lambda w: ops.dequantize_nvfp4(w.byte(), w, None, 8),
            RuntimeError,
            "scales must be float8_e4m3fn or its bytes",
        ),
        (
            lambda w: ops.dequantize_nvfp4(w.byte(), w.byte(), None, 9),
            RuntimeError,
            "columns must be the number of elements",
        ),
        (
            lambda w: ops.dequantize_mxfp4(w.byte(), w.byte(), 8),
            RuntimeError,
            "scales must be one for each 32 elements",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ones(2, 4, device="quartz"))


def test_registrations():
    checks = ("test_schema", "test_faketensor")
    w = torch.randn(4, 40, device="quartz")
    q = torch.ops.quartz
    for granularity in ("tensor", "row", "group", "block"):
        torch.library.opcheck(q.quantize_fp8.default, (w, granularity, 32), test_utils=checks[1:])
    torch.library.opcheck(q.quantize_nvfp4.default, (w,), test_utils=checks[1:])
    # test_schema multiplies what it compares, for which PyTorch has no kernels in float8
    torch.library.opcheck(q.quantize_mxfp4.default, (w,), test_utils=checks[1:])
    packed, scales = ops.quantize_mxfp4(w)
    torch.library.opcheck(
        q.dequantize_mxfp4.default, (packed, scales.view(torch.uint8), 40, torch.bfloat16), test_utils=checks
    )
    packed, scales, total = ops.quantize_nvfp4(w)
    torch.library.opcheck(
        q.dequantize_nvfp4.default, (packed, scales.view(torch.uint8), total, 40, torch.float16), test_utils=checks
    )
    torch.library.opcheck(q.dequantize_fp8.default, (*ops.quantize_fp8(w), torch.float32), test_utils=checks[1:])
