"""Triton kernels launched on quartz tensors.

Triton takes the pointer of whatever has a ``data_ptr()``, and current device and stream from ``torch.cuda``. On the
cuda substrate all three are those of quartz, so a kernel written for CUDA tensors needs no change and no patch.
"""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.cuda


@triton.jit
def saxpy_kernel(x, y, out, scale, count, BLOCK: tl.constexpr):
    """out = scale * x + y"""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, scale * tl.load(x + at, inside) + tl.load(y + at, inside), inside)


@triton.autotune([triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256}, num_warps=8)], key=["count"])
@triton.jit
def tuned_kernel(x, out, count, BLOCK: tl.constexpr):
    """out = x * x"""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < count)
    tl.store(out + at, value * value, at < count)


def saxpy(x, y, scale):
    out = torch.empty_like(x)
    saxpy_kernel[(triton.cdiv(x.numel(), 256),)](x, y, out, scale, x.numel(), BLOCK=256)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launch(dtype):
    x, y = (torch.randn(1000, device="quartz", dtype=dtype) for _ in range(2))
    out = saxpy(x, y, 2.0)
    assert out.device.type == "quartz"
    assert torch.equal(out.cpu(), saxpy(x.cpu().cuda(), y.cpu().cuda(), 2.0).cpu())


def test_launch_on_a_view_with_an_offset():
    base = torch.arange(100.0, device="quartz")
    assert torch.equal(saxpy(base[10:50], base[10:50], 1.0).cpu(), torch.arange(10.0, 50.0) * 2)


def test_launch_on_a_quartz_stream():
    x = torch.ones(1 << 20, device="quartz")
    stream = torch.quartz.Stream()
    stream.wait_stream(torch.quartz.current_stream())
    with torch.quartz.stream(stream):
        for _ in range(20):
            x = saxpy(x, x, 1.0)
    torch.quartz.current_stream().wait_stream(stream)
    assert torch.equal(x.cpu(), torch.full((1 << 20,), 2.0**20))


def test_autotune():
    x = torch.randn(5000, device="quartz")
    out = torch.empty_like(x)
    tuned_kernel[lambda meta: (triton.cdiv(5000, meta["BLOCK"]),)](x, out, 5000)
    assert torch.equal(out, x * x)


def test_inside_torch_compile():
    x, y = torch.randn(777, device="quartz"), torch.randn(777, device="quartz")
    out = torch.compile(lambda x, y: saxpy(x.relu(), y, 3.0) + 1, fullgraph=True)(x, y)
    torch.testing.assert_close(out, x.relu() * 3 + y + 1)


def test_triton_op():
    from torch.library import triton_op, wrap_triton

    @triton_op("quartz_test::triton_saxpy", mutates_args=())
    def operator(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        wrap_triton(saxpy_kernel)[(triton.cdiv(x.numel(), 256),)](x, y, out, 2.0, x.numel(), BLOCK=256)
        return out

    x, y = torch.randn(50, device="quartz"), torch.randn(50, device="quartz")
    torch.testing.assert_close(operator(x, y), x * 2 + y)
    torch.testing.assert_close(torch.compile(operator)(x, y), x * 2 + y)


@pytest.mark.two_devices
def test_second_device():
    with torch.quartz.device(1):
        x = torch.randn(100, device="quartz:1")
        assert torch.equal(saxpy(x, x, 1.0).cpu(), x.cpu() * 2)
