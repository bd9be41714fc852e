"""A product with a weight, a bias and an activation in one kernel. Page: docs/ops/matmul.md."""

import math

import torch
from torch import Tensor


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", *, frozen_weight: bool = False
) -> Tensor:
    """Return ``activation(x @ weight.T + bias)``, rounded once.

    The sum over the last dimension has an order that depends on its length alone, so a row has the same bits in any
    batch, and with ``activation="none"`` those of ``torch.nn.functional.linear`` on quartz. The bias and the activation
    are applied in float32 before the rounding.

    Parameters
    ----------
    x : Tensor
        Any shape ``(..., k)``; float32, float16 or bfloat16.
    weight : Tensor
        Shape ``(n, k)``, any strides, the dtype of `x`.
    bias : Tensor or None
        Shape ``(n,)``, the dtype of `x`.
    activation : str
        ``"none"``, ``"relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"gelu_quick"`` (``v * sigmoid(1.702 v)``).
    frozen_weight : bool
        A promise that no kernel in flight writes `weight`: not the one launched just before this call, on this stream
        or another. A GPU then reads it before the kernels before it have ended, which saves one to two microseconds
        for few rows; a broken promise gives wrong numbers. Without it the weight is only fetched into the L2 cache
        ahead of time, which is always right. It changes nothing else, and nothing on the host.

    Returns
    -------
    Tensor
        Shape ``(..., n)``, the dtype of `x`, contiguous.

    Raises
    ------
    RuntimeError
        Shapes or dtypes that do not fit, tensors on different devices.
    ValueError
        An unknown activation.

    Examples
    --------
    >>> x, weight = torch.tensor([[1.0, -2.0]], device="quartz"), torch.eye(2, device="quartz")
    >>> torch_quartz.ops.linear(x, weight, activation="relu").cpu()
    tensor([[1., 0.]])
    """
    return torch.ops.quartz.linear(x, weight, bias, activation, frozen_weight)


@torch.library.register_fake("quartz::linear")
def _(x, weight, bias=None, activation="none", frozen_weight=False):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _slope(v: Tensor, activation: str) -> Tensor:
    # The derivative of the activation at v (float32), of differentiable operators.
    if activation == "relu":
        return (v > 0).to(v.dtype)
    if activation == "gelu":
        density = (v.square() * -0.5).exp() / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(v / math.sqrt(2))) + v * density
    # v sigmoid(u(v)):  s + v s (1 - s) u'
    scale = 2 * math.sqrt(2 / math.pi)
    u, slope = {
        "silu": lambda: (v, 1.0),
        "gelu_quick": lambda: (1.702 * v, 1.702),
        "gelu_tanh": lambda: (scale * (v + 0.044715 * v**3), scale * (1 + 3 * 0.044715 * v.square())),
    }[activation]()
    s = torch.sigmoid(u)
    return s + v * s * (1 - s) * slope


def _setup(ctx, inputs, output):
    x, weight, bias, ctx.activation, _ = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx, grad):
    x, weight, bias = ctx.saved_tensors
    if ctx.activation != "none":
        before = torch.ops.quartz.linear(x, weight, bias, "none")
        grad = (grad.float() * _slope(before.float(), ctx.activation)).to(x.dtype)
    grad_x = grad_weight = grad_bias = None
    rows = grad.reshape(-1, grad.shape[-1])
    if ctx.needs_input_grad[0]:
        grad_x = (rows @ weight).reshape(x.shape)
    if ctx.needs_input_grad[1]:
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
    if bias is not None and ctx.needs_input_grad[2]:
        grad_bias = rows.sum(0)
    return grad_x, grad_weight, grad_bias, None, None


torch.library.register_autograd("quartz::linear", _backward, setup_context=_setup)
