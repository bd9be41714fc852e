"""Operators written in Python with torch.library: without a quartz kernel, and with one."""

import pytest
import torch

NATIVE = torch.quartz.native_device(0).type


@torch.library.custom_op("quartz_test::cube", mutates_args=(), device_types=("cpu", "cuda"))
def cube(x: torch.Tensor) -> torch.Tensor:
    """Kernels for CPU and CUDA only."""
    assert x.device.type == NATIVE
    return x**3


@cube.register_fake
def _(x):
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("quartz_test::push", mutates_args=("buffer",), device_types=("cpu", "cuda"))
def push(buffer: torch.Tensor, value: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Writes an argument and returns a new tensor; CPU and CUDA only."""
    buffer.mul_(0.5).add_(value, alpha=scale)
    return buffer.sum()


@push.register_fake
def _(buffer, value, scale=1.0):
    return buffer.new_empty(())


@torch.library.custom_op("quartz_test::where_am_i", mutates_args=())
def where_am_i(x: torch.Tensor) -> torch.Tensor:
    """One kernel for every device: it sees the tensors as the caller has them."""
    return x + (1 if x.device.type == "quartz" else 100)


@where_am_i.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("quartz_test::negate", mutates_args=(), device_types="cpu")
def negate(x: torch.Tensor) -> torch.Tensor:
    """A CPU kernel and, below, one for quartz."""
    return -x


@negate.register_kernel("quartz")
def _(x):
    assert x.device.type == "quartz"
    return -x - 10  # recognisably another kernel


@negate.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_kernel_for_cpu_and_cuda_runs_on_aliases():
    x = torch.tensor([1.0, 2.0, 3.0], device="quartz", requires_grad=True)
    y = cube(x)
    assert y.device.type == "quartz" and y.tolist() == [1.0, 8.0, 27.0]
    y.sum().backward()
    assert x.grad.tolist() == [3.0, 12.0, 27.0]


def test_mutated_arguments():
    buffer = torch.ones(3, device="quartz")
    version, pointer = buffer._version, buffer.data_ptr()
    assert push(buffer, torch.full((3,), 2.0, device="quartz"), 3.0).item() == 19.5
    assert buffer.tolist() == [6.5] * 3 and buffer.data_ptr() == pointer and buffer._version > version


def test_one_kernel_for_all_devices_sees_quartz():
    assert where_am_i(torch.zeros(2, device="quartz")).tolist() == [1.0, 1.0]


def test_a_quartz_kernel_wins():
    assert negate(torch.ones(2, device="quartz")).tolist() == [-11.0, -11.0]
    assert negate(torch.ones(2)).tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (cube, lambda: (torch.randn(3, device="quartz", requires_grad=True),)),
        (push, lambda: (torch.randn(3, device="quartz"), torch.randn(3, device="quartz"))),
        (negate, lambda: (torch.randn(2, 2, device="quartz"),)),
    ],
)
def test_opcheck(operator, arguments):
    # Without test_autograd_registration, which knows CPU, CUDA and XPU only.
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments(), test_utils=checks)


def test_compiled_graphs_call_them_where_eager_does():
    def run(x, buffer):
        total = push(buffer, x * 2)
        return cube(x) + total, where_am_i(x), negate(x.relu())

    x, buffer = torch.tensor([1.0, 2.0]), torch.ones(2)
    expected = run(x.to("quartz"), eager_buffer := buffer.to("quartz"))
    compiled_buffer = buffer.to("quartz")
    got = torch.compile(run, fullgraph=True)(x.to("quartz"), compiled_buffer)
    for reference, tensor in zip(expected, got, strict=True):
        assert tensor.device.type == "quartz" and torch.equal(tensor.cpu(), reference.cpu())
    assert torch.equal(compiled_buffer.cpu(), eager_buffer.cpu())


_KEPT = []  # torch.export looks at every operator that torch.ops has handed out, also at one whose library is gone


def test_library_impl_with_the_device_name():
    library = torch.library.Library("quartz_test_library", "DEF")
    _KEPT.append(library)
    library.define("twice(Tensor x, Tensor[] more) -> Tensor[]")
    torch.library.impl("quartz_test_library::twice", "cpu", lib=library)(lambda x, more: [t * 2 for t in (x, *more)])
    torch.library.impl("quartz_test_library::twice", "cuda", lib=library)(lambda x, more: [t * 2 for t in (x, *more)])
    x = torch.ones(2, device="quartz")
    assert [t.tolist() for t in torch.ops.quartz_test_library.twice(x, [x + 1])] == [[2.0] * 2, [4.0] * 2]
    torch.library.impl("quartz_test_library::twice", "quartz", lib=library)(lambda x, more: [x * 3])
    assert torch.ops.quartz_test_library.twice(x, [])[0].tolist() == [3.0] * 2
