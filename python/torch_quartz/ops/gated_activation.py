"""The gated activations of MLPs. Page: docs/ops/gated_activation.md."""

import math

import torch
from torch import Tensor

from torch_quartz.ops._call import direct

_gated_activation = direct(torch.ops.quartz.gated_activation.default)


def gated_activation(
    gate: Tensor,
    up: Tensor | None = None,
    activation: str = "silu",
    *,
    interleaved: bool = False,
    round_first: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """Compute ``activation(gate) * up``.

    In float32, rounded once.

    Parameters
    ----------
    gate : Tensor
        ``(..., n)``; float32, float16 or bfloat16. Without `up`, ``(..., 2 n)``: gate and up in one tensor.
    up : Tensor or None
        Shape and dtype of `gate`.
    activation : {"silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"}
        The last one is that of gpt-oss: with ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)`` the result
        is ``(u + 1) * g * sigmoid(alpha * g)``.
    interleaved : bool
        Without `up`: gate and up alternate, instead of the first half being the gate.
    round_first : bool
        Round the activation to the dtype before the product, as a module that computes step by step does.
    alpha, limit : float
        Of ``"clamped_swiglu"``.

    Returns
    -------
    Tensor
        ``(..., n)``, dtype of `gate`, contiguous.

    Raises
    ------
    RuntimeError
        Another dtype, shapes that differ, an odd packed dimension, tensors on different devices.
    ValueError
        An unknown activation.

    Examples
    --------
    >>> gate, up = torch.tensor([1.0, -1.0], device="quartz"), torch.tensor([2.0, 3.0], device="quartz")
    >>> torch_quartz.ops.gated_activation(gate, up, "relu").cpu()
    tensor([2., 0.])
    """
    return _gated_activation(
        gate, up, activation, interleaved=interleaved, round_first=round_first, alpha=alpha, limit=limit
    )


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of the two halves of the last dimension.

    Parameters
    ----------
    x : Tensor
        ``(..., 2 n)``; float32, float16 or bfloat16.

    Returns
    -------
    Tensor
        ``(..., n)``.

    Raises
    ------
    RuntimeError
        As `gated_activation`.

    Examples
    --------
    >>> torch_quartz.ops.silu_and_mul(torch.tensor([0.0, 5.0], device="quartz")).cpu()
    tensor([0.])
    """
    return _gated_activation(x)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute ``gelu(gate) * up`` of the two halves of the last dimension.

    Parameters
    ----------
    x : Tensor
        ``(..., 2 n)``; float32, float16 or bfloat16.
    approximate : {"none", "tanh"}
        The exact function or its approximation, as in ``torch.nn.functional.gelu``.

    Returns
    -------
    Tensor
        ``(..., n)``.

    Raises
    ------
    RuntimeError
        As `gated_activation`.
    ValueError
        Another `approximate`.

    Examples
    --------
    >>> torch_quartz.ops.gelu_and_mul(torch.tensor([0.0, 5.0], device="quartz"), "tanh").cpu()
    tensor([0.])
    """
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    if approximate not in names:
        raise ValueError(f"quartz::gelu_and_mul: approximate must be 'none' or 'tanh', got {approximate!r}")
    return _gated_activation(x, None, names[approximate])


@torch.library.register_fake("quartz::gated_activation")
def _(gate, up=None, activation="silu", interleaved=False, round_first=False, alpha=1.702, limit=7.0):
    shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
    return gate.new_empty(shape)


def _parts(gate: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate.float(), up.float()
    if interleaved:
        return gate[..., ::2].float(), gate[..., 1::2].float()
    first, second = gate.float().chunk(2, -1)
    return first, second


def _derivative(activation: str, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activation and its derivative."""
    if activation == "silu":
        s = torch.sigmoid(g)
        return g * s, s * (1 + g * (1 - s))
    if activation == "gelu":
        cdf = 0.5 * (1 + torch.erf(g * math.sqrt(0.5)))
        return g * cdf, cdf + g * torch.exp(-0.5 * g * g) * math.sqrt(0.5 / math.pi)
    if activation == "gelu_tanh":
        t = torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * g * g)
        return 0.5 * g * (1 + t), 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * inner
    r = torch.relu(g)
    return (r, (g > 0).float()) if activation == "relu" else (r * r, 2 * r)


def _setup(ctx, inputs, keyword_only_inputs, output):
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)
    given = keyword_only_inputs.get  # those at their default are left out
    ctx.interleaved, ctx.alpha, ctx.limit = given("interleaved", False), given("alpha", 1.702), given("limit", 7.0)


def _backward(ctx, grad):
    gate, up = ctx.saved_tensors
    g, u = _parts(gate, up, ctx.interleaved)
    grad = grad.float()
    if ctx.activation == "clamped_swiglu":
        inside_g, inside_u = g <= ctx.limit, (u >= -ctx.limit) & (u <= ctx.limit)
        g, u = g.clamp(max=ctx.limit), u.clamp(-ctx.limit, ctx.limit)
        s = torch.sigmoid(ctx.alpha * g)
        grad_g = grad * (u + 1) * s * (1 + ctx.alpha * g * (1 - s)) * inside_g
        grad_u = grad * g * s * inside_u
    else:
        value, slope = _derivative(ctx.activation, g)
        grad_g, grad_u = grad * u * slope, grad * value
    if up is not None:
        return grad_g.to(gate.dtype), grad_u.to(up.dtype), None
    joined = torch.stack((grad_g, grad_u), -1).flatten(-2) if ctx.interleaved else torch.cat((grad_g, grad_u), -1)
    return joined.to(gate.dtype), None, None


torch.library.register_autograd("quartz::gated_activation", _backward, setup_context=_setup)
