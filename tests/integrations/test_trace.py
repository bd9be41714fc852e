"""Tracers other than torch.compile: FakeTensor, torch.export, make_fx, torch.jit.trace and script, torch.fx."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


class Net(torch.nn.Module):
    """Linear layers, dropout, attention and a device constructor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.register_buffer("shift", torch.tensor([0.25]))

    def forward(self, x):
        y = self.second(F.gelu(self.first(x))) + self.shift + torch.arange(8, device=x.device)
        q = y.view(y.shape[0], 1, 2, 4)
        return F.scaled_dot_product_attention(q, q, q).flatten(1)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    net = Net().eval()
    return net, copy.deepcopy(net).to("quartz"), torch.randn(3, 8)


def test_fake_tensors_keep_the_device():
    with FakeTensorMode() as mode:
        x = torch.empty(4, 8, device="quartz", requires_grad=True)
        y = F.layer_norm(F.linear(x, torch.empty(16, 8, device="quartz")), (16,))
        assert y.device == torch.device("quartz:0") and y.shape == (4, 16)
        assert F.scaled_dot_product_attention(*[y.view(1, 2, 2, 16)] * 3).device.type == "quartz"
        y.sum().backward()
        assert x.grad.device.type == "quartz" and x.grad.shape == x.shape
    real = torch.ones(3, device="quartz")
    fake = mode.from_tensor(real)
    assert fake.device == real.device and (fake + 1).device == real.device


def test_fake_tensors_refuse_mixed_devices():
    with FakeTensorMode(), pytest.raises(RuntimeError, match=r"two different devices|same device"):
        torch.empty(3, device="quartz") + torch.empty(3)


def test_export(pair, tmp_path):
    net, quartz, x = pair
    program = torch.export.export(
        quartz, (x.to("quartz"),), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},), strict=False
    )
    for rows in (3, 5):
        inputs = torch.randn(rows, 8)
        torch.testing.assert_close(program.module()(inputs.to("quartz")).cpu(), net(inputs))
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(loaded(x.to("quartz")).cpu(), net(x))
    assert all(tensor.device.type == "quartz" for tensor in loaded.state_dict().values())
    decomposed = program.run_decompositions().module()
    torch.testing.assert_close(decomposed(x.to("quartz")).cpu(), net(x))


def test_export_strict_and_for_training(pair):
    net, quartz, x = pair
    program = torch.export.export(quartz, (x.to("quartz"),), strict=True)
    torch.testing.assert_close(program.module()(x.to("quartz")).cpu(), net(x))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(pair, mode):
    net, quartz, x = pair
    graph = make_fx(quartz, tracing_mode=mode, _allow_non_fake_inputs=True)(x.to("quartz"))
    torch.testing.assert_close(graph(x.to("quartz")).cpu(), net(x))
    devices = {node.kwargs["device"] for node in graph.graph.nodes if "device" in node.kwargs}
    assert devices == {torch.device("quartz:0")}


def test_make_fx_of_a_backward(pair):
    net, quartz, x = pair

    def gradient(module, x):
        return torch.autograd.grad(module(x).sum(), x)[0]

    q = x.to("quartz").requires_grad_()
    graph = make_fx(lambda x: gradient(quartz, x))(q)
    torch.testing.assert_close(graph(q).cpu(), gradient(net, x.clone().requires_grad_()))


def test_jit_trace_and_script(pair, tmp_path):
    net, quartz, x = pair
    traced = torch.jit.trace(quartz, x.to("quartz"))
    torch.testing.assert_close(traced(x.to("quartz")).cpu(), net(x))
    traced.save(str(tmp_path / "net.pt"))
    loaded = torch.jit.load(str(tmp_path / "net.pt"))
    torch.testing.assert_close(loaded(x.to("quartz")).cpu(), net(x))
    moved = torch.jit.load(str(tmp_path / "net.pt"), map_location="cpu")
    assert all(parameter.device.type == "cpu" for parameter in moved.parameters())

    @torch.jit.script
    def scripted(x: torch.Tensor, times: int):
        for _ in range(times):
            x = torch.relu(x * 2 - 1)
        return x

    for _ in range(4):  # the profiling executor optimises after the first runs
        torch.testing.assert_close(scripted(x.to("quartz"), 3).cpu(), scripted(x, 3))
    q = x.to("quartz").requires_grad_()
    for _ in range(4):
        scripted(q, 2).sum().backward()
    assert q.grad.device.type == "quartz"


def test_symbolic_trace(pair):
    net, quartz, x = pair
    linear = torch.nn.Sequential(quartz.first, torch.nn.ReLU(), quartz.second)
    graph = torch.fx.symbolic_trace(linear)
    torch.testing.assert_close(graph(x.to("quartz")).cpu(), net.second(net.first(x).relu()))
