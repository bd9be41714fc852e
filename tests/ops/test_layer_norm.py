"""quartz::layer_norm and aten::native_layer_norm on quartz against float64, and the bits of a row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

DEVICES = ["quartz", "cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7,), (3, 16), (2, 5, 33), (2, 4096), (1, 1, 576), (0, 8), (3, 0)])
def test_values(device, dtype, shape):
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(shape).to(dtype) + 3,
        torch.randn(shape[-1]).to(dtype),
        torch.randn(shape[-1]).to(dtype),
    )
    for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
        got = ops.layer_norm(x.to(device), *(None if p is None else p.to(device) for p in (w, b)), eps=1e-5)
        want = F.layer_norm(x.double(), shape[-1:], *(None if p is None else p.double() for p in (w, b)), eps=1e-5)
        assert got.device.type == device and got.dtype == dtype and got.shape == x.shape
        torch.testing.assert_close(got.cpu(), want.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("parameter", [None, "same", torch.float32])
@pytest.mark.parametrize("normalized", [1, 2])
def test_of_pytorch_with_its_backward(dtype, parameter, normalized):
    shape = (4, 3, 24)[-normalized:]
    x = torch.randn(5, 4, 3, 24).to(dtype)
    if torch.quartz.substrate() == "cuda" and parameter == torch.float32 != dtype:  # as on plain CUDA
        wide = torch.ones(shape, device="quartz")
        with pytest.raises(RuntimeError, match="expected scalar type"):
            F.layer_norm(x.to("quartz"), shape, wide, wide)
        return
    parameters, cotangent = [], torch.randn(x.shape).to(dtype)
    if parameter is not None:
        parameters = [torch.randn(shape).to(dtype if parameter == "same" else parameter) for _ in range(2)]

    def run(device, cast):
        leaves = [t.to(device).to(cast(t.dtype)).requires_grad_() for t in (x, *parameters)]
        y = F.layer_norm(leaves[0], shape, *leaves[1:])
        return y, torch.autograd.grad(y, leaves, cotangent.to(device).to(y.dtype))

    y, gradients = run("quartz", lambda dtype: dtype)
    want, want_gradients = run("cpu", lambda _: torch.float64)
    torch.testing.assert_close(y.cpu(), want.to(dtype))
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    for got, expected in zip(gradients, want_gradients, strict=True):
        torch.testing.assert_close(
            got.cpu().double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
        )


def test_statistics_have_the_shape_and_dtype_of_the_native_device():
    native = "cpu" if torch.quartz.substrate() == "host" else "cuda"
    for dtype in FLOATS:
        x = torch.randn(3, 4, 8).to(dtype)
        got = torch.native_layer_norm(x.to("quartz"), (8,), None, None, 1e-5)
        want = torch.native_layer_norm(x.to(native), (8,), None, None, 1e-5)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-2, atol=1e-2)


def test_float64_runs_the_native_kernel():
    x = torch.randn(3, 8, dtype=torch.float64)
    assert (
        torch.equal(F.layer_norm(x.to("quartz"), (8,)).cpu(), F.layer_norm(x, (8,)))
        or torch.quartz.substrate() != "host"
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bits_of_a_row_depend_on_the_row_alone(data):
    dtype = data.draw(st.sampled_from(FLOATS))
    width, rows = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    row = torch.randn(width, generator=generator).to(dtype)
    alone = F.layer_norm(row.to("quartz"), (width,))
    batch = torch.randn(rows, width, generator=generator).to(dtype)
    batch[::3] = float("nan")
    place = data.draw(st.integers(0, rows - 1))
    batch[place] = row
    for layout in (batch.to("quartz"), surrounded(batch.to("quartz")), batch.to("quartz").t().contiguous().t()):
        assert same_bits(F.layer_norm(layout, (width,))[place], alone)
        assert same_bits(ops.layer_norm(layout)[place], alone)


@pytest.mark.parametrize("dtype", FLOATS)
def test_instruction_sets_agree(dtype, instruction_sets):
    x, weight = torch.randn(9, 203).to("quartz", dtype), torch.randn(203, device="quartz")
    results = [ops.layer_norm(x, weight, weight) for _ in instruction_sets()]
    assert all(same_bits(result, results[0]) for result in results)


def test_gradients():
    x, weight, bias = (torch.randn(shape, device="quartz", requires_grad=True) for shape in ((3, 10), (10,), (10,)))
    cotangent = torch.randn(3, 10, device="quartz")
    want = torch.autograd.grad(F.layer_norm(x, (10,), weight, bias), (x, weight, bias), cotangent)
    got = torch.autograd.grad(ops.layer_norm(x, weight, bias), (x, weight, bias), cotangent)
    torch.testing.assert_close(got, want)


def test_registrations():
    x, weight = torch.randn(2, 8, device="quartz", requires_grad=True), torch.ones(8, device="quartz")
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.quartz.layer_norm.default, (x, weight, weight, 1e-5), test_utils=checks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 3), torch.ones(4)), "quartz::layer_norm: weight must have one element"),
        ((torch.ones(2, 3), None, torch.ones(3, 3)), "quartz::layer_norm: bias must have one element"),
        (
            (torch.ones(2, 3, dtype=torch.int64),),
            "quartz::layer_norm: x must be float32, float16 or bfloat16, got Long",
        ),
        ((torch.ones(2, 3), torch.ones(3), torch.ones(3).half()), "bias must have the dtype of weight, got Half"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        ops.layer_norm(*(a if a is None else a.to("quartz") for a in arguments))
