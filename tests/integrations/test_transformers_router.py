"""Routers of mixtures of experts run `moe_topk` where they compute what it computes."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_quartz.integrations.transformers_router import make_router
from torch_quartz.testing import same_bits

EXPERTS, HIDDEN, K = 16, 48, 4


def config(**changes):
    plain = {
        "num_experts_per_tok": K,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "router_jitter_noise": 0.0,
    }
    return SimpleNamespace(**{**plain, **changes})


def router(family, kind, **changes):
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=["x"])
    made = getattr(module, kind)(config(**changes))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 4)
    return made.eval()


KINDS = {
    "softmax of all, renormalised": ("qwen3_moe", "Qwen3MoeTopKRouter", {}),
    "softmax of all": ("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": False}),
    "weights in float32": ("mixtral", "MixtralTopKRouter", {}),
    "softmax of the chosen, bias": ("gpt_oss", "GptOssTopKRouter", {}),
    "sigmoid, groups, correction": ("deepseek_v3", "DeepseekV3TopkRouter", {}),
    "sigmoid, groups, not renormalised": ("deepseek_v3", "DeepseekV3TopkRouter", {"norm_topk_prob": False}),
    "one group": ("glm4_moe", "Glm4MoeTopkRouter", {"n_group": 1, "topk_group": 1}),
}


def original_of(module):
    forward = type(module).forward
    return getattr(forward, "__wrapped__", forward)  # replaced already if a model of the family was built


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_experts_with_the_same_weights(kind, dtype):
    family, name, changes = KINDS[kind]
    module = router(family, name, **changes).to(dtype)
    x = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(4)).to(dtype)
    original = original_of(module)
    logits, weights, ids = original(module, x)
    moved, replacement = copy.deepcopy(module).to("quartz"), make_router(original)
    torch.quartz.reset_op_counts()
    got = replacement(moved, x.to("quartz"))
    assert torch.quartz.op_counts()["quartz::moe_topk"].own == 1
    assert [part.dtype for part in got] == [logits.dtype, weights.dtype, ids.dtype]
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
    torch.testing.assert_close(got[0].cpu(), logits, rtol=rounding[logits.dtype], atol=1e-4)
    order, expected = got[2].cpu().sort(-1), ids.sort(-1)
    same = (order.values == expected.values).all(-1)
    # Others only where the last expert's logit equals the next one's: 16-bit logits tie, and sums differ in a last bit.
    assert same.float().mean() > (0.99 if logits.dtype == torch.float32 else 0.8)
    a, b = got[1].cpu().gather(1, order.indices)[same], weights.gather(1, expected.indices)[same]
    torch.testing.assert_close(a, b, rtol=max(rounding[weights.dtype], 1e-5), atol=1e-5)
    with torch.no_grad():
        assert all(same_bits(p, q) for p, q in zip(replacement(moved, x.to("quartz")), got, strict=True))


def test_gradients():
    module = router("deepseek_v3", "DeepseekV3TopkRouter")
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(5))
    original, moved = original_of(module), copy.deepcopy(module).to("quartz")
    gradients = []
    for forward, owner, device in ((original, module, "cpu"), (make_router(original), moved, "quartz")):
        leaf = x.clone().to(device).requires_grad_()
        _, weights, ids = forward(owner, leaf)
        (weights * (ids + 1)).sum().backward()  # whatever the order of a token's experts
        gradients.append((leaf.grad.cpu(), owner.weight.grad.cpu()))
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class Plain(nn.Module):
    """A router that can be varied."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(6)) / 4)

    def change(self, scores):
        return scores

    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        weights, ids = torch.topk(self.change(logits.float().softmax(-1)), K, dim=-1)
        return logits, weights, ids


class Squared(Plain):
    def change(self, scores):
        return scores.square()


class Smallest(Plain):
    def change(self, scores):
        return -scores


class Dict(Plain):
    def forward(self, hidden_states):
        return dict(zip(("logits", "weights", "ids"), super().forward(hidden_states), strict=True))


class Failing(Plain):
    def change(self, scores):
        if scores.device.type == "cpu":
            raise RuntimeError("not on the CPU")
        return scores.cumsum(-1)


@pytest.mark.parametrize("kind", [Squared, Smallest, Dict, Failing])
def test_what_computes_something_else_stays(kind):
    module, x = kind().to("quartz"), torch.randn(5, HIDDEN, device="quartz")
    expected = kind.forward(module, x)
    replacement = make_router(kind.forward)
    got = replacement(module, x)
    assert replacement.forms.values() == [None]
    if kind is Dict:
        got, expected = got.values(), expected.values()
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def test_other_inputs_go_to_the_original():
    replacement = make_router(Plain.forward)
    on_cpu, x = Plain(), torch.randn(5, HIDDEN)
    assert all(same_bits(a, b) for a, b in zip(replacement(on_cpu, x), on_cpu(x), strict=True))
    assert replacement.forms.values() == []
    moved = Plain().to("quartz")
    deep = torch.randn(2, 5, HIDDEN, device="quartz")  # this original does not flatten
    assert replacement(moved, deep)[0].shape == (2, 5, EXPERTS)
    wide = Plain().to("quartz", torch.float64)
    assert replacement(wide, deep[0].double())[1].dtype == torch.float32
