"""Fourier transforms of every dtype the native device takes, float16 on cuda included, against the CPU in float64."""

import pytest
import torch

REAL = ["fft", "ifft", "rfft", "ihfft", "irfft", "hfft"]
NAMES = [name + suffix for name in REAL for suffix in ("", "2", "n")]
DTYPES = [torch.float32, torch.float64] + ([torch.float16] if torch.quartz.substrate() == "cuda" else [])
TOLERANCE = {torch.float16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def calls(name):
    """Arguments of a transform: default, cut and padded, along another dimension, scaled in both other ways."""
    if name.strip("2n") not in ("irfft", "hfft"):
        yield {}  # float16: sizes must be powers of two, and the default of these is 14
    if name[-1] in "2n":
        yield {"s": (8, 16), "dim": (0, 2), "norm": "ortho"}
        yield {"s": (2, 8), "norm": "forward"} if name[-1] == "2" else {"s": (4, 8), "dim": (0, 1), "norm": "forward"}
    else:
        yield {"n": 16, "dim": 0, "norm": "ortho"}
        yield {"n": 4, "dim": -2, "norm": "forward"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    function, close = getattr(torch.fft, name), {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for call in calls(name):
        exact, ours = x.to(torch.float64, copy=True).requires_grad_(), x.to("quartz").requires_grad_()
        expected, result = function(exact, **call), function(ours, **call)
        assert result.dtype == (dtype.to_complex() if expected.is_complex() else dtype)
        scale = expected.abs().max().item()
        torch.testing.assert_close(result.detach().cpu().to(expected.dtype) / scale, expected.detach() / scale, **close)
        weight = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
        (torch.view_as_real(expected * weight) if expected.is_complex() else expected * weight).sum().backward()
        scaled = result * weight.to(result.dtype).to("quartz")
        (torch.view_as_real(scaled) if scaled.is_complex() else scaled).sum().backward()
        scale = exact.grad.abs().max().item()
        torch.testing.assert_close(ours.grad.cpu().double() / scale, exact.grad / scale, **close)

        out = torch.empty(0, dtype=result.dtype, device="quartz")
        assert function(ours.detach(), **call, out=out) is out
        torch.testing.assert_close(out, result.detach(), **close)
        with torch.inference_mode():
            assert torch.equal(function(ours.detach().clone(), **call), result.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_are_pytorchs(dtype):
    x = torch.ones(4, 8, dtype=dtype, device="quartz")
    with pytest.raises(RuntimeError, match="Invalid normalization mode"):
        torch.fft.rfft(x, norm="no")
    with pytest.raises(RuntimeError, match="Invalid number of data points"):
        torch.fft.ihfft(x, n=0)
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.fft.fft(x, dim=5)
    with pytest.raises(RuntimeError):
        torch.fft.rfft(x, out=torch.empty(0, dtype=torch.int64, device="quartz"))
