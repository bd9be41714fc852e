"""Rotary position embedding of queries and keys. Page: docs/ops/rotary.md."""

import torch
from torch import Tensor

from torch_quartz.ops._call import direct

_rotary = direct(torch.ops.quartz.rotary.default)
_rotary_qk = direct(torch.ops.quartz.rotary_qk.default)


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    style: str = "half",
    pair_table: bool = False,
    heads_dim: int = -3,
    inverse: bool = False,
) -> Tensor:
    """Rotate pairs of elements of each head by the angles of its position: ``a cos - b sin``, ``b cos + a sin``.

    The first ``cos.shape[-1]`` elements of a head are rotated (twice as many with `pair_table`), the rest is copied.
    Where `cos` has the dtype of `x`, every product and sum is rounded to it, as PyTorch's operators would one by one,
    so the result has the bits of the usual formula; with float32 tables one rounding is made at the end.

    Parameters
    ----------
    x : Tensor
        ``(batch, heads, positions, n)`` or ``(heads, positions, n)``, or heads and positions exchanged, see
        `heads_dim`; float32, float16 or bfloat16; any strides.
    cos, sin : Tensor
        ``(positions, r)``, ``(1, positions, r)`` or ``(batch, positions, r)``, in the dtype of `x` or float32.
    style : {"half", "interleaved", "deinterleaved"}
        Which elements are a pair: ``i`` and ``i + r / 2``; ``2 i`` and ``2 i + 1``; the latter in `x` and the former in
        the result (DeepSeek). The tables lie as the pairs of the result do.
    pair_table : bool
        `cos` and `sin` have one element a pair instead of one for each of its two.
    heads_dim : int
        -3 or -2: the dimension of the heads; the positions are the other one.
    inverse : bool
        Undo the rotation (the transposed map, which is its gradient too).

    Returns
    -------
    Tensor
        Shape, dtype and order of strides of `x`.

    Raises
    ------
    RuntimeError
        Shapes that do not fit, other dtypes, tensors on different devices.
    ValueError
        An unknown style.

    Examples
    --------
    >>> x = torch.tensor([[[1.0, 0.0]]], device="quartz")
    >>> angle = torch.full((1, 1), 3.14159 / 2, device="quartz")
    >>> torch_quartz.ops.rotary(x, angle.cos(), angle.sin(), pair_table=True).round().cpu()
    tensor([[[0., 1.]]])
    """
    return _rotary(x, cos, sin, style=style, pair_table=pair_table, heads_dim=heads_dim, inverse=inverse)


def rotary_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    style: str = "half",
    pair_table: bool = False,
    heads_dim: int = -3,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Apply `rotary` to queries and keys in one call.

    Parameters
    ----------
    q, k : Tensor
        As `x` of `rotary`; numbers of heads may differ.
    cos, sin, style, pair_table, heads_dim, inverse
        As for `rotary`.

    Returns
    -------
    tuple of Tensor
        The rotated `q` and `k`.

    Raises
    ------
    RuntimeError, ValueError
        As `rotary`.

    Examples
    --------
    >>> q, k = torch.ones(1, 4, 2, 8, device="quartz"), torch.ones(1, 1, 2, 8, device="quartz")
    >>> cos, sin = torch.ones(2, 8, device="quartz"), torch.zeros(2, 8, device="quartz")
    >>> torch_quartz.ops.rotary_qk(q, k, cos, sin)[1].shape
    torch.Size([1, 1, 2, 8])
    """
    return _rotary_qk(q, k, cos, sin, style=style, pair_table=pair_table, heads_dim=heads_dim, inverse=inverse)


def _empty(x: Tensor) -> Tensor:
    like = x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()
    y = torch.empty_like(like)
    return y if y.shape[-1] == 1 or y.stride(-1) == 1 else torch.empty_like(like, memory_format=torch.contiguous_format)


@torch.library.register_fake("quartz::rotary")
def _(x, cos, sin, style="half", pair_table=False, heads_dim=-3, inverse=False):
    return _empty(x)


@torch.library.register_fake("quartz::rotary_qk")
def _(q, k, cos, sin, style="half", pair_table=False, heads_dim=-3, inverse=False):
    return _empty(q), _empty(k)


def _setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs[-2:])
    ctx.options = dict(keyword_only_inputs)


def _turned(ctx) -> dict:
    if any(ctx.needs_input_grad[-2:]):
        raise RuntimeError(
            "quartz::rotary: cos and sin must not require gradients; it has gradients of q, k and x only"
        )
    return {**ctx.options, "inverse": not ctx.options.get("inverse", False)}


def _backward(ctx, grad):
    cos, sin = ctx.saved_tensors
    return torch.ops.quartz.rotary(grad, cos, sin, **_turned(ctx)), None, None


def _backward_qk(ctx, grad_q, grad_k):
    cos, sin = ctx.saved_tensors
    return *torch.ops.quartz.rotary_qk(grad_q, grad_k, cos, sin, **_turned(ctx)), None, None


torch.library.register_autograd("quartz::rotary", _backward, setup_context=_setup)
torch.library.register_autograd("quartz::rotary_qk", _backward_qk, setup_context=_setup)
