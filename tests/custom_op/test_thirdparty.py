"""A C++ extension with CPU and CUDA kernels only, built without quartz, works on quartz through the fallback."""

import pytest
import torch

NATIVE = str(torch.quartz.native_device(0))


def storage(tensor):
    return tensor.untyped_storage()._cdata


def test_functional_operator_runs_the_native_kernel(thirdparty):
    x = torch.randn(5, 3)
    torch.quartz.reset_op_counts()
    y = thirdparty.scale(x.to("quartz"), 2.5)
    assert y.device == torch.device("quartz:0") and torch.equal(y.cpu(), x * 2.5)
    assert torch.quartz.op_counts()["thirdparty::scale"].fallback == 1
    bits = thirdparty.scale(x.to("quartz").t()[1:], 0.3)
    assert torch.equal(bits.cpu(), thirdparty.scale(x.to(NATIVE).t()[1:], 0.3).cpu())


def test_autograd_function_under_the_autograd_key(thirdparty):
    x = torch.randn(4, device="quartz", requires_grad=True)
    y = thirdparty.scale(x, 3.0)
    assert "ScaleFunction" in y.grad_fn.name()
    y.sum().backward()
    assert x.grad.device.type == "quartz" and x.grad.tolist() == [3.0] * 4


def test_optional_tensor(thirdparty):
    x = torch.ones(3, device="quartz")
    assert thirdparty.add_optional(x).tolist() == [1.0] * 3
    assert thirdparty.add_optional(x, None).device.type == "quartz"
    assert thirdparty.add_optional(x, torch.full((3,), 2.0, device="quartz")).tolist() == [3.0] * 3


def test_tensor_lists(thirdparty):
    tensors = [torch.full((3,), float(i), device="quartz") for i in range(4)]
    assert thirdparty.sum_list(tensors).tolist() == [6.0] * 3
    assert thirdparty.sum_list([tensors[1], tensors[1]]).tolist() == [2.0] * 3


def test_list_of_optional_tensors(thirdparty):
    x = torch.arange(12.0).view(3, 4)
    index = torch.tensor([2, 0])
    got = thirdparty.take(x.to("quartz"), [None, index.to("quartz")])
    assert got.device.type == "quartz" and torch.equal(got.cpu(), x[:, index])
    assert torch.equal(thirdparty.take(x.to("quartz"), [index]).cpu(), x[index])  # an index may stay on the CPU


def test_in_place_operators_return_the_same_tensors(thirdparty):
    x = torch.ones(4, device="quartz")
    pointer = x.data_ptr()
    assert thirdparty.scale_(x, 2.0) is x and x.tolist() == [2.0] * 4
    assert thirdparty.scale_(x[1:3], 5.0).tolist() == [10.0] * 2 and x.tolist() == [2.0, 10.0, 10.0, 2.0]
    assert thirdparty.scale_list_([x, x[:1]], 2.0) is None
    assert x.tolist() == [8.0, 20.0, 20.0, 4.0] and x.data_ptr() == pointer


def test_out_is_filled_and_resized(thirdparty):
    x = torch.arange(6.0, device="quartz").view(2, 3)
    out = torch.empty(2, 3, device="quartz")
    pointer = out.data_ptr()
    assert thirdparty.scale(x, 2.0, out=out) is out and out.data_ptr() == pointer
    assert torch.equal(out.cpu(), x.cpu() * 2)
    small = torch.empty(0, device="quartz")
    assert thirdparty.scale(x, 3.0, out=small) is small
    assert small.shape == (2, 3) and torch.equal(small.cpu(), x.cpu() * 3)
    assert small.untyped_storage().nbytes() == 24


def test_views_share_the_storage(thirdparty):
    x = torch.zeros(5, 2, device="quartz")
    view = thirdparty.middle(x)
    assert view.shape == (3, 2) and storage(view) == storage(x)
    view.fill_(1)
    assert x.sum().item() == 6
    first, second = thirdparty.halves(x)
    assert storage(first) == storage(x) == storage(second) and second.shape == (2, 2)


def test_several_outputs(thirdparty):
    x = torch.tensor([-1.0, 2.0], device="quartz")
    value, mask = thirdparty.value_and_mask(x)
    assert value.tolist() == [0.0, 2.0] and mask.tolist() == [False, True] and mask.device.type == "quartz"


def test_numbers_come_back_as_numbers(thirdparty):
    assert thirdparty.count(torch.tensor([1.0, -1.0, 3.0], device="quartz")) == 2


def test_generators(thirdparty):
    x = torch.zeros(50, device="quartz")
    torch.manual_seed(5)
    first, second = thirdparty.noise(x), thirdparty.noise(x)
    assert not torch.equal(first, second)
    torch.quartz.manual_seed(5)
    assert torch.equal(thirdparty.noise(x), first) and torch.equal(thirdparty.noise(x), second)
    generator = torch.Generator("quartz").manual_seed(9)
    third = thirdparty.noise(x, generator=generator)
    reference = torch.Generator(NATIVE).manual_seed(9)
    assert torch.equal(third.cpu(), thirdparty.noise(x.to(NATIVE), generator=reference).cpu())
    with pytest.raises(RuntimeError, match="generator"):
        thirdparty.noise(x, generator=torch.Generator("cpu"))


def test_device_arguments(thirdparty):
    x = torch.ones(3, device="quartz")
    moved = thirdparty.moved(x, device="quartz:0")
    assert moved.device == torch.device("quartz:0") and moved.data_ptr() != x.data_ptr()
    to_cpu = thirdparty.moved(x, device="cpu")
    assert to_cpu.device.type == "cpu" and to_cpu.tolist() == [1.0] * 3


def test_errors_keep_their_type_and_the_device_works_on(thirdparty):
    with pytest.raises(IndexError, match="no such thing in"):
        thirdparty.fails(torch.ones(2, device="quartz"))
    with pytest.raises(RuntimeError, match="same device"):
        thirdparty.add_optional(torch.ones(3, device="quartz"), torch.ones(3))
    assert thirdparty.scale(torch.ones(2, device="quartz"), 2.0).tolist() == [2.0, 2.0]


def test_under_autocast_inference_mode_and_vmap(thirdparty):
    x = torch.ones(4, 3, device="quartz")
    with torch.inference_mode():
        assert thirdparty.scale(x, 2.0).is_inference()
    with torch.autocast("quartz"):
        assert thirdparty.scale(x, 2.0).dtype == torch.float32
    assert torch.equal(torch.vmap(lambda row: thirdparty.add_optional(row))(x), x)


def test_compiled(thirdparty):
    x = torch.randn(6, requires_grad=True)
    q = x.detach().to("quartz").requires_grad_()
    out = torch.compile(lambda x: thirdparty.scale(x.sin(), 2.0) + 1, fullgraph=True)(q)
    out.sum().backward()
    torch.testing.assert_close(out.detach().cpu(), x.detach().sin() * 2 + 1)
    torch.testing.assert_close(q.grad.cpu(), x.detach().cos() * 2)


def test_native_tensors_are_as_before(thirdparty):
    x = torch.ones(3, device=NATIVE, requires_grad=True)
    y = thirdparty.scale(x, 4.0)
    assert str(y.device) == str(x.device)
    y.sum().backward()
    assert x.grad.tolist() == [4.0] * 3
