"""Transformers: routers of mixtures of experts choose experts and weights with `moe_topk` on quartz.

A router is ``(logits, weights, ids)`` of a product with its weight. As with the other fused parts
(transformers_fused.py), the class's original runs on random numbers of the CPU, in float32 and bfloat16, and the form
of `moe_topk` that chooses the same experts with the same weights is used: one call instead of three to twenty. A router
of another kind keeps its original.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_quartz.integrations.transformers_probe import Forms, noise, quietly, remembered, stand_in

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
_MOST_EXPERTS, _MOST_CHOSEN = 1024, 64  # what `moe_topk` takes
_ROWS = 128  # of a probe


class Router(NamedTuple):
    """What a router computes.

    Attributes
    ----------
    k : int
        Experts of a token.
    in_float : bool
        The product is one of float32 tensors, whatever the dtypes.
    flattens : bool
        Whether the original takes tokens of several dimensions.
    float_weights : bool
        The weights are float32, not of the dtype of the logits.
    bias : str or None
        The name of the buffer that is added for the choice.
    options : dict
        Of `moe_topk`.
    """

    k: int
    in_float: bool
    flattens: bool
    float_weights: bool
    bias: str | None
    options: dict[str, Any]


def _weight(experts: int, hidden: int) -> Tensor:
    return noise(experts, hidden) / hidden**0.5


def _stand_in(module: nn.Module, dtype: torch.dtype, experts: int, hidden: int, bias: str | None) -> nn.Module:
    parameters = {"weight": _weight(experts, hidden).to(dtype)}
    if "bias" in module._parameters:
        parameters["bias"] = noise(experts, scale=0.5).to(dtype)
    other = stand_in(module, parameters, dict(module._modules))
    if bias is not None:
        other.register_buffer(bias, noise(experts, scale=0.2))
    return other


def find_router(module: nn.Module, original: Callable) -> Router | None:
    """Return what a router computes, None if `moe_topk` has no form for it.

    Parameters
    ----------
    module : torch.nn.Module
        Of the class that `original` is the forward function of.
    original : callable
        That function.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not set(module._parameters) <= {"weight", "bias"}:
        return None
    experts, hidden = weight.shape
    if experts > _MOST_EXPERTS or len(module._buffers) > 1:
        return None
    bias = next(iter(module._buffers), None)
    if bias is not None and (module._buffers[bias] is None or module._buffers[bias].shape != (experts,)):
        return None
    x = noise(experts + _ROWS, hidden)[experts:] * torch.logspace(-2, 1, _ROWS)[:, None]  # other numbers than _weight's
    if hidden >= experts:  # logits so small that their scores add up to 0
        x[-1] = -1000.0 * torch.linalg.pinv(_weight(experts, hidden)).sum(1)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        probe = _stand_in(module, dtype, experts, hidden, bias)
        result = quietly(lambda probe=probe, dtype=dtype: original(probe, x.to(dtype)))
        if not _is_result(result, experts):
            return None
        results[dtype] = (probe, *result)
    probe, logits, weights, ids = results[torch.float32]
    if not torch.allclose(logits, _logits(probe, x, False), rtol=1e-4, atol=1e-3):
        return None
    flat = quietly(lambda: original(probe, x.view(2, -1, hidden)))
    flattens = _is_result(flat, experts) and torch.equal(flat[0], logits) and torch.equal(flat[1], weights)
    half_probe, half_logits, half_weights, _ = results[torch.bfloat16]
    in_float = half_logits.dtype == torch.float32
    if in_float and not torch.allclose(half_logits, _logits(half_probe, x.bfloat16(), True), rtol=1e-5, atol=1e-5):
        return None
    float_weights = half_weights.dtype == torch.float32
    if not float_weights and half_weights.dtype != half_logits.dtype:
        return None
    for options in _candidates(module, experts):
        router = Router(ids.shape[1], in_float, flattens, float_weights, bias, options)
        if all(_matches(router, *results[dtype]) for dtype in results):
            return router
    return None


def _logits(module: nn.Module, x: Tensor, in_float: bool) -> Tensor:
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    if in_float:
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    return F.linear(x, weight, bias)


def _is_result(result: Any, experts: int) -> bool:
    return (
        isinstance(result, tuple)
        and len(result) == 3
        and all(isinstance(part, Tensor) and part.dim() == 2 and len(part) == _ROWS for part in result)
        and result[0].shape[1] == experts
        and result[1].shape == result[2].shape
        and result[2].shape[1] <= _MOST_CHOSEN
        and result[2].dtype == torch.int64
    )


def _candidates(module: nn.Module, experts: int) -> list[dict[str, Any]]:
    numbers = [value for value in vars(module).values() if type(value) in (int, float)]
    counts = sorted({value for value in numbers if type(value) is int and 1 <= value <= experts})
    groupings: list[dict[str, Any]] = [{}]
    groupings += [
        {"groups": groups, "kept_groups": kept, "group_score": score}
        for groups, kept in itertools.product(counts, counts)
        if groups > 1 and kept < groups and experts % groups == 0
        for score in ("sum_of_two", "max")
    ]
    scales = [1.0, *sorted({float(value) for value in numbers if value > 0} - {1.0})]
    found = []
    for grouping, scoring, renormalise, epsilon, scale in itertools.product(
        groupings, ("softmax", "sigmoid", "softmax_selected", "sqrt_softplus"), (True, False), (0.0, 1e-20), scales
    ):
        if renormalise and scoring == "softmax_selected":
            continue  # its weights add up to 1 already
        if epsilon and not renormalise:
            continue
        common = {"scoring": scoring, "renormalise": renormalise, "epsilon": epsilon, "scale": scale}
        found.append({**common, **grouping})
    return found


def _matches(router: Router, probe: nn.Module, logits: Tensor, weights: Tensor, ids: Tensor) -> bool:
    from torch_quartz.ops import moe_topk

    bias = None if router.bias is None else probe._buffers[router.bias]
    result = quietly(lambda: moe_topk(logits, router.k, bias=bias, **router.options))
    if result is None:
        return False
    # The order of a token's experts has no meaning. Where the last is as large as the next, either may be taken.
    order, expected = result[1].sort(-1), ids.sort(-1)
    same = (order.values == expected.values).all(-1, keepdim=True)
    if router.k < logits.shape[1]:
        ranked = logits.float().sort(-1, descending=True).values
        last, following = ranked[:, router.k - 1], ranked[:, router.k]
        if not (same[:, 0] | (last - following <= 1e-5 * last.abs())).all():
            return False
    if same.float().mean() < 0.5:
        return False
    pairs = ((result[0], order), (weights.float(), expected))
    got, given = (torch.where(same, w.gather(1, chosen.indices), w.sort(-1).values) for w, chosen in pairs)
    tolerance = 2e-6 if weights.dtype == torch.float32 else 2.0**-7
    return torch.allclose(got, given, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True)


def make_router(original: Callable) -> Callable:
    """Return the forward function that runs `moe_topk` on quartz where it computes what the original does.

    Parameters
    ----------
    original : callable
        The forward function of a router class of Transformers, of ``(self, hidden_states)``.
    """
    forms, find = Forms(), remembered(find_router, original)

    @functools.wraps(original)
    def forward(self: nn.Module, hidden_states: Tensor) -> Any:
        if hidden_states.device.type != "quartz" or torch.compiler.is_compiling():
            return original(self, hidden_states)
        weight = self._parameters.get("weight")
        if weight is None or weight.dtype not in _FLOATS or hidden_states.dtype not in _FLOATS:
            return original(self, hidden_states)
        router = forms.get(self, self.training, find)
        if router is None or not (router.flattens or hidden_states.dim() == 2):
            return original(self, hidden_states)
        logits = _logits(self, hidden_states.reshape(-1, weight.shape[1]), router.in_float)
        return logits, *_choose(router, self, logits)

    forward.forms = forms
    return forward


def _choose(router: Router, module: nn.Module, logits: Tensor) -> tuple[Tensor, Tensor]:
    from torch_quartz.ops import moe_topk

    bias = None if router.bias is None else module._buffers[router.bias].float()
    weights, ids = moe_topk(logits, router.k, bias=bias, **router.options)
    return weights if router.float_weights else weights.to(logits.dtype), ids
