"""Products and expert layers with quantised weights. Page: docs/ops/linear_quantized.md."""

import torch
from torch import Tensor

from torch_quartz.ops.linear import _slope
from torch_quartz.ops.quantized_weight import QuantizedWeight


def linear_quantized(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    activation: str = "none",
    quantize_input: str = "none",
) -> Tensor:
    """Return ``activation(x @ weight.T + bias)`` for a weight of float8, NVFP4 or MXFP4 codes, rounded once.

    The weight is decoded inside the product, to what `QuantizedWeight.dequantize` gives in the dtype of `x` without the
    scales of whole matrices and rows; these are multiplied with the sums, in float32. So the bits are those of
    `linear` with the decoded weight, and a row has the same bits in any batch.

    Parameters
    ----------
    x : Tensor
        Any shape ``(..., k)``; float32, float16 or bfloat16.
    weight : QuantizedWeight
        ``(n, k)``.
    bias : Tensor or None
        Shape ``(n,)``, the dtype of `x`.
    activation : str
        As of `linear`.
    quantize_input : str
        ``"none"``; ``"token"``: every row of `x` is quantised to float8 with one scale, which is multiplied with the
        sums; ``"group"``: every 128 elements of a row, which are decoded again, to the dtype of `x`, before it.

    Returns
    -------
    Tensor
        Shape ``(..., n)``, the dtype of `x`, contiguous.

    Raises
    ------
    RuntimeError
        Shapes or dtypes that do not fit, tensors on different devices, a gradient through `quantize_input`.
    ValueError
        An unknown activation or `quantize_input`.

    Examples
    --------
    >>> codes, scales = torch_quartz.ops.quantize_fp8(torch.eye(2, device="quartz"), "row")
    >>> weight = torch_quartz.ops.QuantizedWeight(codes, scales)
    >>> torch_quartz.ops.linear_quantized(torch.tensor([[1.0, -2.0]], device="quartz"), weight).cpu()
    tensor([[ 1., -2.]])
    """
    return torch.ops.quartz.linear_quantized(
        x,
        weight.codes,
        weight.scales,
        weight.global_scale,
        bias,
        weight.format,
        weight.block,
        activation,
        quantize_input,
    )


@torch.library.register_fake("quartz::linear_quantized")
def _(x, codes, *arguments, **named):
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _setup(ctx, inputs, output):
    x, codes, scales, total, bias, *ctx.options = inputs
    if ctx.options[3] != "none" and x.requires_grad:
        raise RuntimeError(
            "quartz::linear_quantized: quantize_input must be 'none' where x requires a gradient, got "
            f"'{ctx.options[3]}'"
        )
    ctx.save_for_backward(x, codes, scales, total, bias)


def _backward(ctx, grad):
    x, codes, scales, total, bias = ctx.saved_tensors
    format, block, activation, _ = ctx.options
    if activation != "none":
        before = torch.ops.quartz.linear_quantized(x, codes, scales, total, bias, format, block, "none", "none")
        grad = (grad.float() * _slope(before.float(), activation)).to(x.dtype)
    rows = grad.reshape(-1, grad.shape[-1])
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        weight = QuantizedWeight(codes, scales, total, format, x.shape[-1], block).dequantize(x.dtype)
        grad_x = (rows @ weight).reshape(x.shape)
    if bias is not None and ctx.needs_input_grad[4]:
        grad_bias = rows.sum(0)
    return grad_x, None, None, None, grad_bias, *(None,) * len(ctx.options)


torch.library.register_autograd("quartz::linear_quantized", _backward, setup_context=_setup)
