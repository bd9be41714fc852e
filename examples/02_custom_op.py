"""Give an operator of your own a native quartz kernel: in Python, and in C++.

Run it with ``python examples/02_custom_op.py``; it needs a C++ compiler and ninja, no GPU. An operator that has kernels
for the CPU and CUDA only works on quartz as it is; what follows is for an author who wants more.
"""

import os
import sys
from pathlib import Path

import torch
import torch_quartz
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
PACKAGE = Path(torch_quartz.__file__).resolve().parent


# ---------------------------------------------------------------- in Python: torch.library, as for any device


@torch.library.custom_op("example::softclip", mutates_args=(), device_types=("cpu", "cuda"))
def softclip(x: torch.Tensor, limit: float) -> torch.Tensor:
    """limit * tanh(x / limit): the kernel for plain CPU and CUDA tensors."""
    return torch.tanh(x / limit) * limit


@softclip.register_kernel("quartz")
def _(x: torch.Tensor, limit: float) -> torch.Tensor:
    # A quartz tensor here. Its memory under the native device's name, without a copy, is what Triton, NumPy or any
    # other library that knows CUDA or the CPU can be given.
    native = torch.quartz.native_alias(x)
    result = torch.tanh(native / limit).mul_(limit)
    return torch.quartz.adopt(result, x.device)


@softclip.register_fake
def _(x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    x, ctx.limit = inputs
    ctx.save_for_backward(x)


def _backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * (1 - torch.tanh(x / ctx.limit) ** 2), None


softclip.register_autograd(_backward, setup_context=_save)


# ---------------------------------------------------------------- in C++: examples/02_custom_op/rms_scale.cpp


def build_rms_scale() -> None:
    """Compile and load the operator ``example_cpp::rms_scale``.

    ``examples/02_custom_op/CMakeLists.txt`` builds the same file with CMake.
    """
    # The ninja of this virtual environment, whether it is activated or not.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cpp_extension.load(
        name="rms_scale",
        sources=[str(HERE / "02_custom_op" / "rms_scale.cpp")],
        extra_include_paths=[str(PACKAGE / "include"), str(PACKAGE / "include" / "quartz")],
        extra_ldflags=[f"-L{PACKAGE / 'lib'}", "-lquartz", f"-Wl,-rpath,{PACKAGE / 'lib'}"],
        extra_cflags=["-std=c++20", "-O2"],
        is_python_module=False,
    )

    @torch.library.register_fake("example_cpp::rms_scale")
    def _(x, weight, eps):
        return torch.empty_like(x)

    def setup(ctx, inputs, output):
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        inverse = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        scaled = grad * weight
        grad_x = inverse * (scaled - x * inverse**2 * (scaled * x).mean(-1, keepdim=True))
        return grad_x, (grad * x * inverse).flatten(0, -2).sum(0), None

    torch.library.register_autograd("example_cpp::rms_scale", backward, setup_context=setup)


def main() -> None:
    """Call both operators, with gradients and compiled."""
    torch.manual_seed(0)
    x = torch.randn(4, 16, device="quartz", requires_grad=True)
    y = softclip(x, 2.0)
    y.sum().backward()
    print("softclip:", y.device, "largest value", round(y.abs().max().item(), 3), "gradient", tuple(x.grad.shape))

    build_rms_scale()
    rms_scale = torch.ops.example_cpp.rms_scale
    weight = torch.rand(16, device="quartz", requires_grad=True)
    reference = torch.nn.functional.rms_norm(x, (16,), weight, 1e-6)
    error = (rms_scale(x, weight, 1e-6) - reference).abs().max().item()
    print(f"rms_scale: largest difference to torch.nn.functional.rms_norm {error:.1e}")
    assert error < 1e-5
    double = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    assert torch.autograd.gradcheck(lambda x, weight: rms_scale(x, weight, 1e-6), double)

    compiled = torch.compile(lambda x: softclip(rms_scale(x, weight, 1e-6) * 3, 1.5).relu(), fullgraph=True)
    torch.testing.assert_close(compiled(x), softclip(rms_scale(x, weight, 1e-6) * 3, 1.5).relu())
    print("both inside torch.compile: equal")


if __name__ == "__main__":
    main()
