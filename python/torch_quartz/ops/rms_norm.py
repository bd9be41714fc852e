"""RMS norm, with or without a residual added first. Page: docs/ops/rms_norm.md."""

import torch
from torch import Tensor

from torch_quartz.ops._call import direct

_rms_norm = direct(torch.ops.quartz.rms_norm.default)
_add_rms_norm = direct(torch.ops.quartz.add_rms_norm.default)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0, round_first: bool = False
) -> Tensor:
    """Normalise the last dimension: ``x / sqrt(mean(x**2) + eps) * (weight_offset + weight)``.

    Computed in float32 and rounded once. The order of every sum is a function of the length of the last dimension
    alone, so a row has the same bits in any batch.

    Parameters
    ----------
    x : Tensor
        Any shape ``(..., n)``; float32, float16 or bfloat16.
    weight : Tensor or None
        Shape ``(n,)``; float32, float16 or bfloat16. None multiplies by one.
    eps : float
        Added to the mean of the squares.
    weight_offset : float
        1 for models that store ``w - 1`` (Gemma).
    round_first : bool
        Round to the dtype of `x` before the product with the weight, as the modules of Llama's family do.

    Returns
    -------
    Tensor
        The shape and dtype of `x`, contiguous.

    Raises
    ------
    RuntimeError
        Another dtype, a weight of another length, tensors on different devices.

    Examples
    --------
    >>> torch_quartz.ops.rms_norm(torch.tensor([[3.0, 4.0]], device="quartz"), eps=0.0).cpu()
    tensor([[0.8485, 1.1314]])
    """
    return _rms_norm(x, weight, eps, weight_offset, round_first)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the `rms_norm` of ``x + residual``, and that sum (rounded to the dtype of `x` before it is normalised).

    Parameters
    ----------
    x, residual : Tensor
        The same shape and dtype.
    weight, eps, weight_offset, round_first
        As for `rms_norm`.

    Returns
    -------
    tuple of Tensor
        The normalised sum and the sum.

    Raises
    ------
    RuntimeError
        As `rms_norm`; shapes or dtypes of `x` and `residual` that differ.

    Examples
    --------
    >>> x = torch.ones(1, 2, device="quartz")
    >>> y, s = torch_quartz.ops.add_rms_norm(x, x, eps=0.0)
    >>> s.cpu()
    tensor([[2., 2.]])
    """
    return _add_rms_norm(x, residual, weight, eps, weight_offset, round_first)


@torch.library.register_fake("quartz::rms_norm")
def _(x, weight, eps, weight_offset=0.0, round_first=False):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("quartz::add_rms_norm")
def _(x, residual, weight, eps, weight_offset=0.0, round_first=False):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))


def _gradients(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, needed: tuple[bool, bool]):
    # y = x r (o + w), r = (mean(x^2) + eps)^(-1/2):  dx = r (g - x r^2 mean(g x)) with g = dy (o + w);  dw = sum dy x r
    wide, grad = x.float(), grad.float()
    inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    scaled = grad if weight is None else grad * (weight.float() + offset)
    grad_x = inverse * (scaled - wide * inverse.square() * (scaled * wide).mean(-1, keepdim=True))
    grad_weight = None
    if weight is not None and needed[1]:
        grad_weight = (
            (grad * wide * inverse).flatten(0, -2).sum(0).to(weight.dtype)
            if x.dim() > 1
            else ((grad * wide * inverse).to(weight.dtype))
        )
    return grad_x.to(x.dtype), grad_weight


def _setup(ctx, inputs, output):
    x, weight, ctx.eps, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad):
    x, weight = ctx.saved_tensors
    grad_x, grad_weight = _gradients(grad, x, weight, ctx.eps, ctx.weight_offset, ctx.needs_input_grad[:2])
    return grad_x, grad_weight, None, None, None


def _setup_add(ctx, inputs, output):
    _, _, weight, ctx.eps, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(output[1], weight)


def _backward_add(ctx, grad, grad_sum):
    total, weight = ctx.saved_tensors
    needed = (True, ctx.needs_input_grad[2])
    grad_x, grad_weight = _gradients(grad, total, weight, ctx.eps, ctx.weight_offset, needed)
    if grad_sum is not None:
        grad_x = grad_x + grad_sum
    return grad_x, grad_x, grad_weight, None, None, None


torch.library.register_autograd("quartz::rms_norm", _backward, setup_context=_setup)
torch.library.register_autograd("quartz::add_rms_norm", _backward_add, setup_context=_setup_add)
