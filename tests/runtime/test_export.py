"""FakeTensor, torch.export, tracing and dispatch modes."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x):
        y = self.layer(x) + self.offset
        return torch.where(y > 0, y, 0.1 * y).softmax(-1)


def test_fake_tensors_compute_no_values():
    torch.quartz.reset_op_counts()
    before = torch.quartz.memory_allocated()
    with FakeTensorMode():
        x = torch.empty(1 << 20, 1 << 10, device="quartz")
        y = (x @ x.t()[:, :3]).relu().sum(0)
        assert isinstance(y, FakeTensor) and y.device == torch.device("quartz:0") and y.shape == (3,)
        assert x.to("cpu").device.type == "cpu"
        model = nn.Linear(3, 3, device="quartz")
        assert model(torch.empty(1, 3, device="quartz")).device.type == "quartz"
    assert torch.quartz.memory_allocated() == before and torch.quartz.op_counts() == {}


def test_fake_from_real():
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    real = torch.randn(2, 3, device="quartz")
    fake = mode.from_tensor(real)
    with mode:
        out = torch.nn.functional.scaled_dot_product_attention(fake[None], fake[None], fake[None])
    assert out.device == real.device and out.shape == (1, 2, 3)


def test_fake_mixed_devices_are_refused():
    with FakeTensorMode(), pytest.raises(RuntimeError, match="device"):
        torch.empty(3, device="quartz") + torch.empty(3)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    torch.manual_seed(0)
    model = Net().to("quartz")
    x = torch.randn(3, 4, device="quartz")
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: batch}}, strict=strict)
    torch.testing.assert_close(program.module()(x), model(x))
    y = torch.randn(7, 4, device="quartz")
    torch.testing.assert_close(program.module()(y), model(y))
    values = [node.meta["val"] for node in program.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert values and all(value.device.type == "quartz" for value in values)
    assert program.run_decompositions().module()(x).device.type == "quartz"


def test_exported_programs_are_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    model = Net().to("quartz")
    x = torch.randn(3, 4, device="quartz")
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2")
    torch.testing.assert_close(loaded.module()(x), model(x))


def test_make_fx_and_symbolic_trace():
    x = torch.randn(3, 4, device="quartz")
    graph = make_fx(lambda t: t.sin() + torch.ones(4, device=t.device))(x)
    torch.testing.assert_close(graph(x), x.sin() + 1)
    model = Net().to("quartz")
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))
    traced = torch.jit.trace(model, x)
    torch.testing.assert_close(traced(x), model(x))


def test_dispatch_modes_see_quartz_calls():
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                seen.append((str(func), result.device.type))
            return result

    with Log():
        (torch.ones(2, 2, device="quartz") @ torch.ones(2, 2, device="quartz")).relu_()
    assert ("aten.mm.default", "quartz") in seen and ("aten.relu_.default", "quartz") in seen
    assert not any(device == "cpu" for _, device in seen)


def test_tensor_subclass_and_torch_function():
    class Tagged(torch.Tensor):
        pass

    x = torch.ones(2, device="quartz").as_subclass(Tagged)
    assert type(x + 1) is Tagged and (x + 1).device.type == "quartz"
    assert type(x.cpu()) is Tagged


def test_meta_and_back():
    x = torch.ones(2, 3, device="quartz")
    assert torch.empty_like(x.to("meta"), device="quartz").shape == (2, 3)
    with pytest.raises(NotImplementedError, match="meta"):
        x.to("meta").to("quartz")


def test_script():
    @torch.jit.script
    def f(x):
        return torch.relu(x) + 1

    assert f(-torch.ones(2, device="quartz")).tolist() == [1, 1]
