"""Layer norm of the last dimension. Page: docs/ops/layer_norm.md."""

import torch
from torch import Tensor

from torch_quartz.ops._call import direct

_layer_norm = direct(torch.ops.quartz.layer_norm.default)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalise the last dimension: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Computed in float32 and rounded once. The order of every sum is a function of the length of the last dimension
    alone, so a row has the same bits in any batch. ``torch.nn.functional.layer_norm`` on quartz runs the same kernel.

    Parameters
    ----------
    x : Tensor
        Any shape ``(..., n)``; float32, float16 or bfloat16.
    weight, bias : Tensor or None
        Shape ``(n,)``, both of one dtype.
    eps : float
        Added to the variance.

    Returns
    -------
    Tensor
        The shape and dtype of `x`, contiguous.

    Raises
    ------
    RuntimeError
        Another dtype, a weight or bias of another length, tensors on different devices.

    Examples
    --------
    >>> torch_quartz.ops.layer_norm(torch.tensor([[1.0, 3.0]], device="quartz"), eps=0.0).cpu()
    tensor([[-1.,  1.]])
    """
    return _layer_norm(x, weight, bias, eps)


@torch.library.register_fake("quartz::layer_norm")
def _(x, weight, bias, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, grad):
    # y = n w + b, n = (x - m) r:  dx = r (g - mean(g) - n mean(g n)) with g = dy w;  dw = sum dy n;  db = sum dy
    x, weight = ctx.saved_tensors
    wide, grad = x.float(), grad.float()
    centred = wide - wide.mean(-1, keepdim=True)
    inverse = (centred.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    normal = centred * inverse
    scaled = grad if weight is None else grad * weight.float()
    mean, along = scaled.mean(-1, keepdim=True), (scaled * normal).mean(-1, keepdim=True)
    grad_x = (inverse * (scaled - mean - normal * along)).to(x.dtype)
    grad_weight = grad_bias = None
    if ctx.needs_input_grad[1]:
        grad_weight = (grad * normal).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    if ctx.needs_input_grad[2]:
        grad_bias = grad.reshape(-1, x.shape[-1]).sum(0).to(ctx.bias_dtype)
    return grad_x, grad_weight, grad_bias, None


torch.library.register_autograd("quartz::layer_norm", _backward, setup_context=_setup)
