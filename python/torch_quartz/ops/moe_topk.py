"""Routing of a mixture-of-experts layer. Page: docs/ops/moe_topk.md."""

import torch
from torch import Tensor


def moe_topk(
    logits: Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    group_score: str = "sum_of_two",
    renormalise: bool = True,
    epsilon: float = 0.0,
    scale: float = 1.0,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the `k` experts of each token and their weights.

    ``choice = score(logits) + bias``; the `k` largest choices are taken in descending order, of equal ones the lower
    id; ``weights = score[ids] / (sum(score[ids]) + epsilon) * scale``. A NaN choice counts as minus infinity, so the
    ids are always `k` different experts; the weights of a row with a NaN logit may be NaN.

    Parameters
    ----------
    logits : Tensor
        ``(tokens, experts)``; float32, float16 or bfloat16, at most 1024 experts.
    k : int
        Experts of a token, at most 64.
    scoring : str
        ``"softmax"``, ``"sigmoid"``, ``"sqrt_softplus"``, or ``"softmax_selected"``: the softmax of the selected
        logits (gpt-oss).
    bias : Tensor or None
        float32, ``(experts,)``: added for the choice, not to the weights (DeepSeek-V3's score correction).
    groups, kept_groups : int
        Experts come in equal groups, of which only the best `kept_groups` are chosen from.
    group_score : str
        A group's score: ``"max"`` of its choices (DeepSeek-V2) or the ``"sum_of_two"`` largest (DeepSeek-V3).
    renormalise : bool
        Divide by the sum of the selected scores.
    epsilon, scale : float
        As in the formula.
    ids : Tensor or None
        int64 ``(tokens, k)``: experts already chosen (hash routing); ids of no expert become -1 with weight 0.

    Returns
    -------
    tuple of Tensor
        Weights, float32 ``(tokens, k)``, and ids, int64 ``(tokens, k)``.

    Raises
    ------
    RuntimeError
        Shapes, dtypes or counts that do not fit.
    ValueError
        An unknown `scoring` or `group_score`.

    Examples
    --------
    >>> weights, ids = torch_quartz.ops.moe_topk(torch.tensor([[0.0, 2.0, 2.0, 1.0]], device="quartz"), 2)
    >>> ids.tolist(), weights.tolist()
    ([[1, 2]], [[0.5, 0.5]])
    """
    return torch.ops.quartz.moe_topk(
        logits, k, scoring, bias, groups, kept_groups, group_score, renormalise, epsilon, scale, ids
    )


@torch.library.register_fake("quartz::moe_topk")
def _(
    logits,
    k,
    scoring="softmax",
    bias=None,
    groups=1,
    kept_groups=1,
    group_score="sum_of_two",
    renormalise=True,
    epsilon=0.0,
    scale=1.0,
    ids=None,
):
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _scores(logits: Tensor, scoring: str) -> Tensor:
    logits = logits.float()
    if scoring == "softmax":
        return logits.softmax(-1)
    if scoring == "sigmoid":
        return logits.sigmoid()
    return torch.nn.functional.softplus(logits).sqrt()


def _setup(ctx, inputs, output):
    logits, _, ctx.scoring, _, _, _, _, ctx.renormalise, ctx.epsilon, ctx.scale, _ = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    # The weights once more, differentiably; which experts were chosen has no gradient.
    nothing = (None,) * 10
    if grad is None:
        return (None, *nothing)
    logits, ids = ctx.saved_tensors
    absent = ids < 0
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        if ctx.scoring == "softmax_selected":
            chosen = leaf.float().gather(-1, ids.clamp_min(0)).masked_fill(absent, float("-inf"))
            weights = chosen.softmax(-1) * ctx.scale
        else:
            weights = _scores(leaf, ctx.scoring).gather(-1, ids.clamp_min(0)).masked_fill(absent, 0.0)
            if ctx.renormalise:
                weights = weights / (weights.sum(-1, keepdim=True) + ctx.epsilon)
            weights = weights * ctx.scale
        (gradient,) = torch.autograd.grad(weights, leaf, grad)
    return (gradient, *nothing)


torch.library.register_autograd("quartz::moe_topk", _backward, setup_context=_setup)
