"""quartz::gated_activation against float64, its rounding, its gradient and its bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

DEVICES = ["quartz", "cpu"] + (["cuda"] if torch.cuda.is_available() else [])
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def reference(gate, up, activation, alpha=1.702, limit=7.0):
    if activation != "clamped_swiglu":
        return ACTIVATIONS[activation](gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "clamped_swiglu"])
@pytest.mark.parametrize("shape", [(1,), (5, 17), (2, 3, 64), (3, 5000), (0, 4), (4, 0)])
def test_values_of_every_form(device, dtype, activation, shape):
    torch.manual_seed(0)
    gate, up = (torch.randn(shape) * 4).to(dtype), torch.randn(shape).to(dtype) * 4
    want = reference(gate.double(), up.double(), activation).to(dtype)
    g, u = gate.to(device), up.to(device)
    got = ops.gated_activation(g, u, activation)
    assert got.device.type == device and got.dtype == dtype and got.shape == gate.shape
    tolerance = {torch.float32: 2e-6, torch.float16: 1.1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=2e-6)
    assert same_bits(ops.gated_activation(torch.cat((g, u), -1), None, activation), got)
    assert same_bits(ops.gated_activation(torch.stack((g, u), -1).flatten(-2), None, activation, interleaved=True), got)


def test_friends():
    x = torch.randn(3, 20, device="quartz")
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(ops.silu_and_mul(x), F.silu(gate) * up)
    torch.testing.assert_close(ops.gelu_and_mul(x), F.gelu(gate) * up)
    torch.testing.assert_close(ops.gelu_and_mul(x, "tanh"), F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_round_first_rounds_the_activation(dtype, activation):
    gate, up = (torch.randn(50, 64) * 3).to(dtype), torch.randn(50, 64).to(dtype)
    want = ACTIVATIONS[activation](gate.float()).to(dtype) * up
    got = ops.gated_activation(gate.to("quartz"), up.to("quartz"), activation, round_first=True)
    counts = want.abs() > 1e-2  # PyTorch's own gelu loses digits where it is small
    assert (got.cpu() != want)[counts].float().mean().item() < 1e-2  # where float32 itself lies at a tie
    torch.testing.assert_close(got.cpu(), want, rtol=8e-3 if dtype == torch.bfloat16 else 1e-3, atol=1e-5)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "clamped_swiglu"])
def test_special_values(activation):
    gate = torch.tensor([float("nan"), 1.0, 2.0, 100.0, -100.0, 1e30, -1e30, 0.0])
    up = torch.tensor([1.0, float("nan"), 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    got = ops.gated_activation(gate.to("quartz"), up.to("quartz"), activation).cpu()
    torch.testing.assert_close(got, reference(gate, up, activation), equal_nan=True)
    assert got.isnan().tolist()[:3] == [True, True, False]


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "clamped_swiglu"])
@pytest.mark.parametrize("form", ["two", "packed", "interleaved"])
def test_gradients(activation, form):
    gate, up = (torch.randn(4, 6, dtype=torch.float64) * 5 for _ in range(2))
    weights = torch.randn(4, 6)
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    want = torch.autograd.grad((reference(gate, up, activation) * weights).sum(), leaves)
    g, u = gate.detach().float().to("quartz"), up.detach().float().to("quartz")
    if form == "two":
        inputs = [g.requires_grad_(), u.requires_grad_()]
        got = torch.autograd.grad((ops.gated_activation(g, u, activation) * weights.to("quartz")).sum(), inputs)
    else:
        x = torch.cat((g, u), -1) if form == "packed" else torch.stack((g, u), -1).flatten(-2)
        x.requires_grad_()
        y = ops.gated_activation(x, None, activation, interleaved=form == "interleaved")
        (grad,) = torch.autograd.grad((y * weights.to("quartz")).sum(), x)
        got = grad.chunk(2, -1) if form == "packed" else (grad[..., ::2], grad[..., 1::2])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bits_depend_on_the_element_alone(data):
    dtype = data.draw(st.sampled_from(FLOATS))
    activation = data.draw(st.sampled_from([*ACTIVATIONS, "clamped_swiglu"]))
    rows, width = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 100))
    gate, up = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    place = data.draw(st.integers(0, rows - 1))
    alone = ops.gated_activation(gate[place].to("quartz"), up[place].to("quartz"), activation)
    gate[torch.arange(rows) != place] = float("nan")
    for g in (gate.to("quartz"), surrounded(gate.to("quartz")), gate.to("quartz").t().contiguous().t()):
        assert same_bits(ops.gated_activation(g, surrounded(up.to("quartz")), activation)[place], alone)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "clamped_swiglu"])
def test_instruction_sets_agree(activation, instruction_sets):
    for dtype in FLOATS:
        x = (torch.randn(9, 406) * 3).to("quartz", dtype)
        results = [ops.gated_activation(x, None, activation, round_first=True) for _ in instruction_sets()]
        assert all(same_bits(result, results[0]) for result in results)


def test_registrations():
    x = torch.randn(2, 8, device="quartz", requires_grad=True)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.quartz.gated_activation.default, (x, None, "gelu"), test_utils=checks)
    torch.library.opcheck(torch.ops.quartz.gated_activation.default, (x, x.detach()), test_utils=checks)
    torch.library.opcheck(torch.ops.quartz.silu_and_mul.default, (x,), test_utils=checks)


def test_errors():
    x = torch.ones(2, 3, device="quartz")
    with pytest.raises(RuntimeError, match="the last dimension of gate must be even where it holds both halves, got 3"):
        ops.silu_and_mul(x)
    with pytest.raises(RuntimeError, match="up must have the shape of gate"):
        ops.gated_activation(x, x[:1])
    with pytest.raises(RuntimeError, match="up must have the dtype of gate, got Half"):
        ops.gated_activation(x, x.half())
    with pytest.raises(RuntimeError, match="gate must be float32, float16 or bfloat16, got Int"):
        ops.gated_activation(x.int(), x.int())
    with pytest.raises(RuntimeError, match="up must be None where interleaved is true"):
        ops.gated_activation(x, x, interleaved=True)
    with pytest.raises(ValueError, match=r"activation must be one of silu, gelu, .* got tanh"):
        ops.gated_activation(x, x, "tanh")
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh', got 'exact'"):
        ops.gelu_and_mul(x, "exact")
