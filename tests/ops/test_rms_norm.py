"""quartz::rms_norm against float64, and its bits under everything that must not change them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

DEVICES = ["quartz", "cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def reference(x, weight, eps, offset):
    wide = x.double()
    y = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * (weight.double() + offset)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 16), (2, 5, 33), (4, 1), (2, 4096), (1, 1, 576), (0, 8), (3, 0)])
def test_values(device, dtype, shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    for w, offset in ((weight, 0.0), (weight, 1.0), (None, 0.0)):
        got = ops.rms_norm(x.to(device), None if w is None else w.to(device), 1e-5, weight_offset=offset)
        assert got.device.type == device and got.dtype == dtype and got.shape == x.shape
        torch.testing.assert_close(got.cpu(), reference(x, w, 1e-5, offset).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_with_a_residual_it_is_the_norm_of_the_rounded_sum(device, dtype):
    x, residual, weight = (torch.randn(5, 40).to(device, dtype), torch.randn(5, 40).to(device, dtype), torch.ones(40))
    y, total = ops.add_rms_norm(x, residual, weight.to(device), 1e-6)
    assert same_bits(total, x + residual)
    assert same_bits(y, ops.rms_norm(total, weight.to(device), 1e-6))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bits_of_a_row_depend_on_the_row_alone(data):
    dtype = data.draw(st.sampled_from(FLOATS))
    width, rows = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    row, weight = torch.randn(width, generator=generator).to(dtype), torch.randn(width, generator=generator)
    alone = ops.rms_norm(row.to("quartz"), weight.to("quartz"), 1e-6)
    batch = torch.randn(rows, width, generator=generator).to(dtype)
    batch[::3] = float("nan")  # neighbours
    place = data.draw(st.integers(0, rows - 1))
    batch[place] = row
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.sampled_from([1, 2, 3])))
        for layout in (batch.to("quartz"), surrounded(batch.to("quartz")), batch.to("quartz").t().contiguous().t()):
            assert same_bits(ops.rms_norm(layout, weight.to("quartz"), 1e-6)[place], alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", FLOATS)
def test_instruction_sets_agree(dtype, instruction_sets):
    x, weight = torch.randn(9, 203).to("quartz", dtype), torch.randn(203, device="quartz")
    results = [ops.rms_norm(x, weight, 1e-6) for _ in instruction_sets()]
    assert all(same_bits(result, results[0]) for result in results)


def test_gradients():
    x, weight = (
        torch.randn(3, 10, device="quartz", requires_grad=True),
        torch.randn(10, device="quartz").requires_grad_(),
    )
    expected = torch.nn.functional.rms_norm(x, (10,), weight, 1e-6)
    cotangent = torch.randn_like(expected)
    want = torch.autograd.grad(expected, (x, weight), cotangent)
    got = torch.autograd.grad(ops.rms_norm(x, weight, 1e-6), (x, weight), cotangent)
    torch.testing.assert_close(got, want)
    residual = torch.randn(3, 10, device="quartz", requires_grad=True)
    y, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    got = torch.autograd.grad((y * 2 + total).sum(), (x, residual, weight))
    z = x + residual
    want = torch.autograd.grad(
        (torch.nn.functional.rms_norm(z, (10,), weight, 1e-6) * 2 + z).sum(), (x, residual, weight)
    )
    torch.testing.assert_close(got, want)


def test_registrations():
    x, weight = torch.randn(2, 8, device="quartz", requires_grad=True), torch.ones(8, device="quartz")
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.quartz.rms_norm.default, (x, weight, 1e-6), test_utils=checks)
    torch.library.opcheck(torch.ops.quartz.add_rms_norm.default, (x, x.detach(), weight, 1e-6), test_utils=checks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 3), torch.ones(4)), "quartz::rms_norm: weight must have one element"),
        (
            (torch.ones(2, 3, dtype=torch.int64), None),
            "quartz::rms_norm: x must be float32, float16 or bfloat16, got Long",
        ),
        ((torch.tensor(1.0), None), "quartz::rms_norm: x must have at least one dimension"),
    ],
)
def test_errors(arguments, message):
    arguments = [a if a is None else a.to("quartz") for a in arguments]
    with pytest.raises(RuntimeError, match=message):
        ops.rms_norm(*arguments)
    with pytest.raises(RuntimeError, match="weight must be on the device of x, quartz:0, got cpu"):
        ops.rms_norm(torch.ones(2, device="quartz"), torch.ones(2))
