"""quartz::moe_experts against a loop in float64, its bits, its gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

DEVICES = ["quartz", "cpu"]
# The kernels of a GPU serve fewer sizes and activations, and no float32: test_moe_experts_cuda.py.
pytestmark = pytest.mark.host
OAI = {"interleaved": True, "transposed": True, "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}


def layer(tokens, k, experts, hidden, width, dtype=torch.float32, gated=True, transposed=False, biases=False, seed=0):
    torch.manual_seed(seed)
    rows = 2 * width if gated else width
    scale = 1 / math.sqrt(hidden)
    up, down = torch.randn(experts, rows, hidden) * scale, torch.randn(experts, hidden, width) / math.sqrt(width)
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]) if tokens else torch.zeros(0, k).long()
    arguments = {"x": torch.randn(tokens, hidden), "weights": torch.rand(tokens, k), "up": up, "down": down}
    if biases:
        arguments |= {"up_bias": torch.randn(experts, rows) * 0.1, "down_bias": torch.randn(experts, hidden) * 0.1}
    arguments = {name: value.to(dtype) for name, value in arguments.items()}
    arguments["weights"] = arguments["weights"].float()
    return arguments | {"ids": ids}


def to(arguments, device):
    return {name: value.to(device) for name, value in arguments.items()}


def loop(x, ids, weights, up, down, up_bias=None, down_bias=None, activation="silu", gated=True, interleaved=False,
         transposed=False, alpha=1.0, limit=math.inf, up_offset=0.0):  # fmt: skip
    """One token and one expert after the other, in float64."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    functions = {
        "silu": lambda v: v * torch.sigmoid(alpha * v),
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        "relu": torch.relu,
        "relu_squared": lambda v: torch.relu(v) ** 2,
    }
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            if not 0 <= e < up.shape[0]:
                continue
            first, second = up[e].double(), down[e].double()
            if transposed:
                first, second = first.t(), second.t()
            p = first @ x[t].double() + (0 if up_bias is None else up_bias[e].double())
            if gated:
                gate, value = (p[0::2], p[1::2]) if interleaved else p.chunk(2)
                h = functions[activation](gate.clamp(max=limit)) * (value.clamp(-limit, limit) + up_offset)
            else:
                h = functions[activation](p)
            o = second @ h + (0 if down_bias is None else down_bias[e].double())
            y[t] += weights[t, j].double() * o
    return y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "hidden", "width"),
    [(1, 1, 1, 8, 8), (1, 2, 4, 32, 16), (17, 2, 8, 64, 48), (5, 3, 3, 33, 7), (40, 8, 60, 48, 32), (3, 1, 512, 16, 8)],
)
def test_values(device, dtype, tokens, k, experts, hidden, width):
    arguments = layer(tokens, k, experts, hidden, width, dtype)
    got = ops.moe_experts(**to(arguments, device))
    assert got.dtype == dtype and got.device.type == device
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got.cpu().double(), loop(**arguments), **(tolerance or {"rtol": 1e-5, "atol": 1e-5}))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"])
@pytest.mark.parametrize("gated", [True, False])
def test_activations(activation, gated):
    arguments = layer(6, 2, 4, 24, 20, gated=gated)
    got = ops.moe_experts(**to(arguments, "quartz"), activation=activation, gated=gated)
    expected = loop(**arguments, activation=activation, gated=gated)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_the_gate_of_gpt_oss():
    arguments = layer(9, 4, 8, 40, 24, transposed=True, biases=True)
    arguments["up"] *= 20  # the limit matters
    got = ops.moe_experts(**to(arguments, "quartz"), **OAI)
    torch.testing.assert_close(got.cpu().double(), loop(**arguments, **OAI), rtol=1e-5, atol=1e-4)


def test_ids_of_no_expert_and_tokens_without_one():
    arguments = layer(3, 2, 4, 16, 8)
    arguments["ids"] = torch.tensor([[0, -1], [-1, -1], [3, 4]])
    got = ops.moe_experts(**to(arguments, "quartz")).cpu()
    assert got[1].eq(0).all()
    torch.testing.assert_close(got.double(), loop(**arguments), rtol=1e-5, atol=1e-5)
    assert same_bits(ops.moe_experts(**to(arguments | {"ids": arguments["ids"].int()}, "quartz")), got)


def test_skewed_routing():
    arguments = layer(1002, 1, 8, 16, 8)
    arguments["ids"] = torch.zeros(1002, 1, dtype=torch.int64)
    arguments["ids"][-2:] = 3
    torch.testing.assert_close(
        ops.moe_experts(**to(arguments, "quartz")).cpu().double(), loop(**arguments), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_and_no_width(tokens):
    assert ops.moe_experts(**to(layer(tokens, 2, 4, 16, 8), "quartz")).shape == (tokens, 16)
    assert (
        ops.moe_experts(**to(layer(tokens, 2, 4, 16, 0) if tokens == 0 else layer(1, 2, 4, 16, 8), "quartz"))
        is not None
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bits_of_a_token_depend_on_the_token_alone(data):
    dtype = data.draw(st.sampled_from(FLOATS))
    tokens, experts = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 12))
    k = data.draw(st.integers(1, min(4, experts)))
    hidden, width = data.draw(st.sampled_from([8, 30, 64])), data.draw(st.sampled_from([8, 24, 50]))
    arguments = to(layer(tokens, k, experts, hidden, width, dtype, seed=data.draw(st.integers(0, 9))), "quartz")
    place = data.draw(st.integers(0, tokens - 1))
    shared = {name: arguments[name] for name in ("up", "down")}
    row = {name: arguments[name][place : place + 1].clone() for name in ("x", "ids", "weights")}
    alone = ops.moe_experts(**row, **shared)
    arguments["x"][torch.arange(tokens) % 3 == (place + 1) % 3] = float("nan")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.sampled_from([1, 2, 3])))
        assert same_bits(ops.moe_experts(**arguments)[place], alone[0])
        order = torch.randperm(tokens).to("quartz")
        permuted = {name: arguments[name][order] for name in ("x", "ids", "weights")}
        moved = order.tolist().index(place)
        assert same_bits(ops.moe_experts(**permuted, **shared)[moved], alone[0])
        slots = torch.randperm(k).to("quartz")  # the order of the slots does not count either
        turned = {"x": row["x"], "ids": row["ids"][:, slots], "weights": row["weights"][:, slots]}
        assert same_bits(ops.moe_experts(**turned, **shared), alone)
    finally:
        torch.set_num_threads(threads)
    layouts = arguments | {
        "x": surrounded(arguments["x"]),
        "up": arguments["up"].transpose(1, 2).contiguous().transpose(1, 2),
    }
    assert same_bits(ops.moe_experts(**layouts)[place], alone[0])


@pytest.mark.parametrize("dtype", FLOATS)
def test_instruction_sets_agree(dtype, instruction_sets):
    arguments = to(layer(9, 2, 4, 40, 24, dtype, biases=True), "quartz")
    results = [ops.moe_experts(**arguments) for _ in instruction_sets()]
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize(
    "options", [{}, {"activation": "gelu_tanh"}, {"gated": False, "activation": "relu_squared"}, OAI], ids=str
)
def test_gradients(options):
    gated, transposed = options.get("gated", True), options.get("transposed", False)
    arguments = layer(7, 2, 4, 12, 6, gated=gated, transposed=transposed, biases=True)
    arguments["ids"][0, 1] = -1
    names = ("x", "weights", "up", "down", "up_bias", "down_bias")
    on_quartz = to(arguments, "quartz")
    double = {name: value.double() if name != "ids" else value for name, value in arguments.items()}
    for name in names:
        on_quartz[name].requires_grad_()
        double[name].requires_grad_()
    cotangent = torch.randn(7, 12)
    got = torch.autograd.grad(
        ops.moe_experts(**on_quartz, **options), [on_quartz[n] for n in names], cotangent.to("quartz")
    )
    want = torch.autograd.grad(loop(**double, **options), [double[n] for n in names], cotangent.double())
    for name, a, b in zip(names, got, want, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-5, msg=name)


def test_a_nan_expert_does_not_reach_the_tokens_of_others():
    arguments = to(layer(8, 1, 4, 16, 8), "quartz")
    clean = ops.moe_experts(**arguments)
    arguments["up"][2] = float("nan")
    got = ops.moe_experts(**arguments)
    others = arguments["ids"][:, 0] != 2
    assert same_bits(got[others], clean[others]) and got[~others].isnan().all()


def test_registrations():
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = to(layer(4, 2, 4, 8, 8), "quartz")
    arguments["x"].requires_grad_()
    positional = [arguments[name] for name in ("x", "ids", "weights", "up", "down")]
    torch.library.opcheck(torch.ops.quartz.moe_experts.default, positional, test_utils=checks)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(3, 15)}, RuntimeError, "up must take the hidden size of x, got 16 for 15"),
        ({"ids": torch.zeros(2, 2).long()}, RuntimeError, r"ids must have shape \[tokens, k\]"),
        ({"ids": torch.zeros(3, 2)}, RuntimeError, "ids must be int64 or int32, got Float"),
        ({"weights": torch.zeros(3, 1)}, RuntimeError, "weights must have the shape of ids"),
        ({"down": torch.ones(4, 16, 9)}, RuntimeError, "down must fit the experts, width and hidden size of up"),
        ({"down": torch.ones(4, 16, 8).half()}, RuntimeError, "must have the dtype of x, got Half for Float"),
        ({"activation": "tanh"}, ValueError, "activation must be 'silu'.*got 'tanh'"),
    ],
)
def test_errors(change, error, message):
    arguments = layer(3, 2, 4, 16, 8) | change
    arguments = {n: v.to("quartz") if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises(error, match="quartz::moe_experts: .*" + message):
        ops.moe_experts(**arguments)
