"""quartz::moe_topk against a plain Python loop in float64, Transformers' own routers, and its bits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

DEVICES = ["quartz", "cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SCORINGS = ["softmax", "sigmoid", "sqrt_softplus", "softmax_selected"]


def loop(logits, k, scoring="softmax", bias=None, groups=1, kept_groups=1, group_score="sum_of_two",
         renormalise=True, epsilon=0.0, scale=1.0):  # fmt: skip
    """Return weights and ids, one token and one expert after the other."""
    weights, chosen = [], []
    for row in logits.double().tolist():
        if scoring == "softmax":
            total = math.fsum(math.exp(x - max(row)) for x in row)
            scores = [math.exp(x - max(row)) / total for x in row]
        elif scoring == "sigmoid":
            scores = [1 / (1 + math.exp(-x)) for x in row]
        elif scoring == "sqrt_softplus":
            scores = [math.sqrt(max(x, 0) + math.log1p(math.exp(-abs(x)))) for x in row]
        else:
            scores = row
        choices = [s + (0 if bias is None else bias[e].item()) for e, s in enumerate(scores)]
        size = len(row) // groups

        def group_value(g, choices=choices, size=size):
            values = sorted(choices[g * size : (g + 1) * size], reverse=True)
            return values[0] if group_score == "max" else sum(values[:2])

        kept = sorted(range(groups), key=lambda g: (-group_value(g), g))[:kept_groups]
        ids = sorted((e for g in kept for e in range(g * size, (g + 1) * size)), key=lambda e: (-choices[e], e))[:k]
        picked = [scores[e] for e in ids]
        if scoring == "softmax_selected":
            picked = [math.exp(p - max(picked)) for p in picked]
        if renormalise or scoring == "softmax_selected":
            total = math.fsum(picked) + epsilon
            picked = [p / total for p in picked]
        weights.append([p * scale for p in picked])
        chosen.append(ids)
    return torch.tensor(weights, dtype=torch.float64), torch.tensor(chosen)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("experts", "k"), [(1, 1), (3, 2), (8, 8), (60, 4), (128, 8), (256, 8), (384, 6), (512, 10), (1000, 64)]
)
def test_values(device, scoring, dtype, experts, k):
    torch.manual_seed(experts)
    logits = (torch.randn(7, experts) * 2).to(dtype)
    expected, ids = loop(logits, k, scoring, scale=2.5, epsilon=1e-20)
    weights, got = ops.moe_topk(logits.to(device), k, scoring=scoring, scale=2.5, epsilon=1e-20)
    assert weights.dtype == torch.float32 and got.dtype == torch.int64
    # in 16 bits and for saturated scores several experts tie; in float64 they may not
    if dtype == torch.float32 and scoring != "softmax":
        assert torch.equal(got.cpu(), ids)
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group_score", ["max", "sum_of_two"])
@pytest.mark.parametrize(
    ("experts", "groups", "kept", "k"), [(16, 4, 2, 3), (256, 8, 4, 8), (160, 8, 3, 6), (8, 8, 3, 3), (6, 2, 1, 3)]
)
def test_groups_and_correction_bias(device, group_score, experts, groups, kept, k):
    torch.manual_seed(1)
    logits, bias = torch.randn(9, experts), torch.randn(experts) * 0.3
    options = {"scoring": "sigmoid", "groups": groups, "kept_groups": kept, "group_score": group_score}
    expected, ids = loop(logits, k, bias=bias, **options)
    weights, got = ops.moe_topk(logits.to(device), k, bias=bias.to(device), **options)
    assert torch.equal(got.cpu(), ids)
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_ties_go_to_the_lower_id(device):
    weights, ids = ops.moe_topk(torch.zeros(2, 300, device=device), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2 and weights.tolist() == [[pytest.approx(0.2)] * 5] * 2
    _, ids = ops.moe_topk(torch.zeros(1, 12, device=device), 2, scoring="sigmoid", groups=4, kept_groups=1)
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_row_has_valid_ids_and_leaves_the_others(device, scoring, bad):
    torch.manual_seed(0)
    logits = torch.randn(5, 40, device=device)
    clean, clean_ids = ops.moe_topk(logits, 6, scoring=scoring)
    logits[2] = bad
    logits[3, 7] = bad
    weights, ids = ops.moe_topk(logits, 6, scoring=scoring)
    for row in ids.tolist():
        assert len(set(row)) == 6 and all(0 <= e < 40 for e in row)
    for row in (0, 1, 4):
        assert same_bits(weights[row], clean[row]) and torch.equal(ids[row], clean_ids[row])


@pytest.mark.parametrize("device", DEVICES)
def test_given_ids(device):
    logits = torch.randn(3, 8, device=device)
    ids = torch.tensor([[0, 5], [-1, 7], [3, 99]], device=device)
    weights, got = ops.moe_topk(logits, 2, scoring="sigmoid", ids=ids, renormalise=False)
    assert got.tolist() == [[0, 5], [-1, 7], [3, -1]]
    expected = logits.sigmoid().cpu()
    torch.testing.assert_close(
        weights.cpu(), torch.tensor([[expected[0, 0], expected[0, 5]], [0, expected[1, 7]], [expected[2, 3], 0]])
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bits_of_a_token_depend_on_the_token_alone(data):
    experts = data.draw(st.integers(1, 200))
    k = data.draw(st.integers(1, min(experts, 64)))
    scoring, dtype = data.draw(st.sampled_from(SCORINGS)), data.draw(st.sampled_from(FLOATS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    token = torch.randn(1, experts, generator=generator).to(dtype)
    alone = ops.moe_topk(token.to("quartz"), k, scoring=scoring)
    tokens = data.draw(st.integers(1, 70))
    place = data.draw(st.integers(0, tokens - 1))
    batch = torch.randn(tokens, experts, generator=generator).to(dtype)
    batch[::2] = float("nan")
    batch[place] = token
    for layout in (batch.to("quartz"), surrounded(batch.to("quartz")), batch.to("quartz").t().contiguous().t()):
        weights, ids = ops.moe_topk(layout, k, scoring=scoring)
        assert same_bits(weights[place], alone[0][0]) and torch.equal(ids[place], alone[1][0])


@pytest.mark.parametrize("scoring", SCORINGS)
def test_instruction_sets_agree(scoring, instruction_sets):
    logits = torch.randn(50, 130, device="quartz")
    results = [ops.moe_topk(logits, 8, scoring=scoring) for _ in instruction_sets()]
    assert all(same_bits(w, results[0][0]) and torch.equal(i, results[0][1]) for w, i in results)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("renormalise", [True, False])
def test_gradients(scoring, renormalise):
    torch.manual_seed(0)
    logits = torch.randn(4, 9, device="quartz", requires_grad=True)
    weights, ids = ops.moe_topk(logits, 3, scoring=scoring, renormalise=renormalise, scale=1.5)
    assert not ids.requires_grad
    cotangent = torch.randn_like(weights)
    (got,) = torch.autograd.grad(weights, logits, cotangent)
    double = logits.detach().cpu().double().requires_grad_()
    if scoring == "softmax_selected":
        again = double.gather(1, ids.cpu()).softmax(-1)
    else:
        functions = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}
        scores = functions.get(scoring, lambda x: torch.nn.functional.softplus(x).sqrt())(double)
        again = scores.gather(1, ids.cpu())
        if renormalise:
            again = again / again.sum(-1, keepdim=True)
    (expected,) = torch.autograd.grad(again * 1.5, double, cotangent.cpu().double())
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-4, atol=1e-6)


def test_no_tokens():
    weights, ids = ops.moe_topk(torch.ones(0, 8, device="quartz"), 2)
    assert weights.shape == ids.shape == (0, 2)


def test_registrations():
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    logits = torch.randn(3, 8, device="quartz", requires_grad=True)
    torch.library.opcheck(torch.ops.quartz.moe_topk.default, (logits, 2), test_utils=checks)


@pytest.mark.parametrize(
    ("logits", "options", "error", "message"),
    [
        (torch.ones(2, 4), {"k": 5}, RuntimeError, "k must be at most the number of experts.*got 5 for 4"),
        (torch.ones(2, 4), {"k": 0}, RuntimeError, "k must be from 1 to 64, got 0"),
        (torch.ones(4), {"k": 1}, RuntimeError, r"logits must have shape \[tokens, experts\]"),
        (torch.ones(2, 4, dtype=torch.float64), {"k": 1}, RuntimeError, "logits must be float32, float16"),
        (torch.ones(2, 4), {"k": 1, "groups": 3}, RuntimeError, "groups must divide.*got 3 for 4"),
        (torch.ones(2, 4), {"k": 1, "scoring": "argmax"}, ValueError, "scoring must be 'softmax'.*got 'argmax'"),
        (torch.ones(2, 4), {"k": 1, "bias": torch.ones(3)}, RuntimeError, "bias must have one element"),
    ],
)  # fmt: skip
def test_errors(logits, options, error, message):
    options = {
        name: value.to("quartz") if isinstance(value, torch.Tensor) else value for name, value in options.items()
    }
    with pytest.raises(error, match="quartz::moe_topk: " + message):
        ops.moe_topk(logits.to("quartz"), **options)
