"""The experts of a mixture-of-experts layer. Page: docs/ops/moe_experts.md."""

import torch
from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")


def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs for each token.

    ``p = x up[e]^T + up_bias[e]``, ``h = act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)`` with gate and
    up the two halves of ``p``, ``o = h down[e]^T + down_bias[e]``, ``y = sum over e of weight * o``. ``p`` stays in
    float32; ``h`` and ``o`` are rounded once to the dtype of `x`; the sum is in float32, in ascending order of expert
    id (of slot for the same expert), and rounded once.

    Parameters
    ----------
    x : Tensor
        ``(tokens, hidden)``; float32, float16 or bfloat16.
    ids : Tensor
        int64 or int32 ``(tokens, k)``, k up to 64. Ids below 0 or beyond the last expert are skipped: not on this rank.
    weights : Tensor
        Floating point ``(tokens, k)``.
    up, down : Tensor
        ``(experts, 2 * width, hidden)``, gates first, and ``(experts, hidden, width)``; the dtype of `x`. Not `gated`:
        ``(experts, width, hidden)``.
    up_bias, down_bias : Tensor or None
        ``(experts, 2 * width)`` and ``(experts, hidden)``.
    activation : str
        ``"silu"`` (with `alpha`: ``v / (1 + exp(-alpha v))``), ``"gelu"``, ``"gelu_tanh"``, ``"relu"`` or
        ``"relu_squared"``.
    gated : bool
        Whether `up` holds gates too.
    interleaved : bool
        Rows of `up` alternate: gate 0, up 0, gate 1, ... (gpt-oss).
    transposed : bool
        `up` is ``(experts, hidden, 2 * width)`` and `down` is ``(experts, width, hidden)`` (gpt-oss).
    alpha, limit, up_offset : float
        As in the formula; None is no limit. gpt-oss: 1.702, 7.0, 1.0.

    Returns
    -------
    Tensor
        ``(tokens, hidden)``, the dtype of `x`. A token without any expert gets zeros.

    Raises
    ------
    RuntimeError
        Shapes or dtypes that do not fit.
    NotImplementedError
        On a GPU: float32, sizes that are no multiples of 64 and other cases the message lists.
    ValueError
        An unknown `activation`.

    Examples
    --------
    >>> x = torch.ones(1, 64, dtype=torch.bfloat16, device="quartz")
    >>> up, down = x.new_ones(3, 128, 64), x.new_ones(3, 64, 64)
    >>> ids, weights = torch.tensor([[2, -1]], device="quartz"), torch.tensor([[0.5, 0.5]], device="quartz")
    >>> torch_quartz.ops.moe_experts(x, ids, weights, up, down, activation="relu")[0, :2].tolist()  # 64 (64 64) / 2
    [131072.0, 131072.0]
    """
    return torch.ops.quartz.moe_experts(
        x,
        ids,
        weights,
        up,
        down,
        up_bias,
        down_bias,
        activation,
        gated,
        interleaved,
        transposed,
        alpha,
        limit,
        up_offset,
    )


@torch.library.register_fake("quartz::moe_experts")
def _(x, ids, weights, up, down, *options, **named):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def activate(v: Tensor, activation: str, alpha: float = 1.0) -> Tensor:
    """Return the activation of `moe_experts` by its name, from PyTorch's operators (differentiable).

    Parameters
    ----------
    v : Tensor
        Any shape.
    activation : str
        One of ``ACTIVATIONS``.
    alpha : float
        Of ``"silu"``.
    """
    if activation == "silu":
        return v * torch.sigmoid(alpha * v)
    if activation in ("gelu", "gelu_tanh"):
        return torch.nn.functional.gelu(v, approximate="tanh" if activation == "gelu_tanh" else "none")
    positive = v.relu()
    return positive.square() if activation == "relu_squared" else positive


def _one_expert(rows, up, down, up_bias, down_bias, activation, gated, interleaved, alpha, limit, up_offset):
    """One expert's outputs, differentiably; the weights as (out, in)."""
    projected = torch.nn.functional.linear(rows, up, up_bias).float()
    if gated:
        gate, value = (projected[:, 0::2], projected[:, 1::2]) if interleaved else projected.chunk(2, -1)
        if limit is not None:
            gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
        hidden = activate(gate, activation, alpha) * (value + up_offset)
    else:
        hidden = activate(projected, activation, alpha)
    return torch.nn.functional.linear(hidden.to(rows.dtype), down, down_bias)


# An operator of its own, so that compilers need not look into it: which experts have tokens is known at run time only.
torch.library.define(
    "quartz::moe_experts_backward",
    "(Tensor grad, Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, "
    "str activation, bool gated, bool interleaved, bool transposed, float alpha, float? limit, float up_offset) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.impl("quartz::moe_experts_backward", "CompositeExplicitAutograd")
def _moe_experts_backward(
    grad, x, ids, weights, up, down, up_bias, down_bias, activation, gated, interleaved, transposed, *numbers
):
    # Expert by expert, each recomputed: the intermediates of all pairs need not be kept from the forward.
    grads = [x.new_zeros(()) if t is None else torch.zeros_like(t) for t in (x, weights, up, down, up_bias, down_bias)]
    grad_x, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias = grads
    grad_x, grad_weights = grad_x.float(), grad_weights.float()
    used = torch.unique(ids)
    for expert in used[(used >= 0) & (used < up.shape[0])].tolist():
        tokens, slots = torch.where(ids == expert)
        with torch.enable_grad():
            matrices = [m[expert].t() if transposed else m[expert] for m in (up, down)]
            biases = [None if b is None else b[expert] for b in (up_bias, down_bias)]
            leaves = [t if t is None else t.detach().requires_grad_() for t in (x[tokens], *matrices, *biases)]
            out = _one_expert(*leaves, activation, gated, interleaved, *numbers)
            upstream = grad[tokens].float()
            scaled = (upstream * weights[tokens, slots].float().unsqueeze(-1)).to(out.dtype)
            given = [leaf for leaf in leaves if leaf is not None]
            results = iter(torch.autograd.grad(out, given, scaled))
        rows, d_up, d_down, d_up_bias, d_down_bias = (None if leaf is None else next(results) for leaf in leaves)
        grad_x.index_put_((tokens,), rows.float(), accumulate=True)
        grad_weights[tokens, slots] = (upstream * out.detach().float()).sum(-1)
        grad_up[expert] = d_up.t() if transposed else d_up
        grad_down[expert] = d_down.t() if transposed else d_down
        if up_bias is not None:
            grad_up_bias[expert] = d_up_bias
        if down_bias is not None:
            grad_down_bias[expert] = d_down_bias
    return grad_x.to(x.dtype), grad_weights.to(weights.dtype), grad_up, grad_down, grad_up_bias, grad_down_bias


@torch.library.register_fake("quartz::moe_experts_backward")
def _(grad, x, ids, weights, up, down, up_bias, down_bias, *options):
    return tuple(
        x.new_empty(()) if t is None else torch.empty_like(t) for t in (x, weights, up, down, up_bias, down_bias)
    )


def _setup(ctx, inputs, output):
    x, ids, weights, up, down, up_bias, down_bias, *ctx.options = inputs
    ctx.save_for_backward(x, ids, weights, up, down, up_bias, down_bias)


def _backward(ctx, grad):
    saved = ctx.saved_tensors
    grad_x, grad_weights, grad_up, grad_down, *biases = torch.ops.quartz.moe_experts_backward(
        grad, *saved, *ctx.options
    )
    biases = [None if given is None else gradient for given, gradient in zip(saved[5:], biases, strict=True)]
    return (grad_x, None, grad_weights, grad_up, grad_down, *biases, *(None,) * len(ctx.options))


torch.library.register_autograd("quartz::moe_experts", _backward, setup_context=_setup)
