"""The experts of a mixture-of-experts layer on quantised weights. Page: docs/ops/linear_quantized.md."""

import torch
from torch import Tensor

from torch_quartz.ops.moe_experts import _one_expert
from torch_quartz.ops.quantized_weight import QuantizedWeight


def moe_experts_quantized(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: QuantizedWeight,
    down: QuantizedWeight,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """Return what `moe_experts` returns, for experts of float8, NVFP4 or MXFP4 codes.

    Both products are those of `linear_quantized`; the other steps are those of `moe_experts`.

    Parameters
    ----------
    x, ids, weights : Tensor
        As of `moe_experts`.
    up, down : QuantizedWeight
        Stacks ``(experts, 2 * width, hidden)`` and ``(experts, hidden, width)`` of one format and block. Not `gated`:
        ``(experts, width, hidden)``.
    up_bias, down_bias, activation, gated, interleaved, alpha, limit, up_offset
        As of `moe_experts`. gpt-oss: `interleaved`, alpha 1.702, limit 7.0, up_offset 1.0.

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
        An unknown `activation`, or weights of two formats.

    Examples
    --------
    >>> def quantized(*shape):
    ...     codes, scales = torch_quartz.ops.quantize_mxfp4(torch.ones(shape, device="quartz"))
    ...     return torch_quartz.ops.QuantizedWeight(codes, scales, format="mxfp4")
    >>> x = torch.ones(1, 64, dtype=torch.bfloat16, device="quartz")
    >>> ids, weights = torch.tensor([[2, -1]], device="quartz"), torch.tensor([[0.5, 0.5]], device="quartz")
    >>> torch_quartz.ops.moe_experts_quantized(
    ...     x, ids, weights, quantized(3, 128, 64), quantized(3, 64, 64), activation="relu")[0, :2].tolist()
    [131072.0, 131072.0]
    """
    if (up.format, up.block) != (down.format, down.block):
        raise ValueError(
            "moe_experts_quantized: up and down must have one format and block, got "
            f"{up.format} {up.block} and {down.format} {down.block}"
        )
    return torch.ops.quartz.moe_experts_quantized(
        x,
        ids,
        weights,
        up.codes,
        up.scales,
        down.codes,
        down.scales,
        up.global_scale,
        down.global_scale,
        up_bias,
        down_bias,
        up.format,
        up.block,
        activation,
        gated,
        interleaved,
        alpha,
        limit,
        up_offset,
    )


@torch.library.register_fake("quartz::moe_experts_quantized")
def _(x, ids, *arguments, **named):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# Opaque to compilers, as that of moe_experts: which experts have tokens is known at run time only.
torch.library.define(
    "quartz::moe_experts_quantized_backward",
    "(Tensor grad, Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor up_scales, Tensor down, Tensor down_scales, "
    "Tensor? up_global_scale, Tensor? down_global_scale, Tensor? up_bias, Tensor? down_bias, str format, int block, "
    "str activation, bool gated, bool interleaved, float alpha, float? limit, float up_offset) -> (Tensor, Tensor)",
)


@torch.library.impl("quartz::moe_experts_quantized_backward", "CompositeExplicitAutograd")
def _moe_experts_quantized_backward(
    grad, x, ids, weights, up, up_scales, down, down_scales, up_total, down_total, up_bias, down_bias, *options
):
    # Expert by expert, recomputed on decoded weights; the weights themselves get no gradient.
    format, block, activation, gated, interleaved, *numbers = options
    width = down.shape[-1] * (1 if format == "fp8" else 2)
    width = min(width, up.shape[1] // (2 if gated else 1))
    first = QuantizedWeight(up, up_scales, up_total, format, x.shape[-1], block)
    second = QuantizedWeight(down, down_scales, down_total, format, width, block)
    grad_x, grad_weights = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(weights, dtype=torch.float32)
    used = torch.unique(ids)
    for expert in used[(used >= 0) & (used < up.shape[0])].tolist():
        tokens, slots = torch.where(ids == expert)
        biases = [None if b is None else b[expert] for b in (up_bias, down_bias)]
        with torch.enable_grad():
            rows = x[tokens].detach().requires_grad_()
            matrices = first[expert].dequantize(x.dtype), second[expert].dequantize(x.dtype)
            out = _one_expert(rows, *matrices, *biases, activation, gated, interleaved, *numbers)
            upstream = grad[tokens].float()
            scaled = (upstream * weights[tokens, slots].float().unsqueeze(-1)).to(out.dtype)
            (d_rows,) = torch.autograd.grad(out, (rows,), scaled)
        grad_x.index_put_((tokens,), d_rows.float(), accumulate=True)
        grad_weights[tokens, slots] = (upstream * out.detach().float()).sum(-1)
    return grad_x.to(x.dtype), grad_weights.to(weights.dtype)


@torch.library.register_fake("quartz::moe_experts_quantized_backward")
def _(grad, x, ids, weights, *arguments):
    return torch.empty_like(x), torch.empty_like(weights)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:11])
    ctx.options = inputs[11:]
    if any(bias is not None and bias.requires_grad for bias in inputs[9:11]):
        raise RuntimeError(
            "quartz::moe_experts_quantized: up_bias and down_bias must not require a gradient, got one that does"
        )


def _backward(ctx, grad):
    grad_x, grad_weights = torch.ops.quartz.moe_experts_quantized_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (grad_x, None, grad_weights, *(None,) * (8 + len(ctx.options)))


torch.library.register_autograd("quartz::moe_experts_quantized", _backward, setup_context=_setup)
