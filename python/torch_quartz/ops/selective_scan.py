"""The recurrence of selective state space models. Page: docs/ops/recurrent.md."""

import torch
from torch import Tensor

from torch_quartz.ops._call import refuse_gradients


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba's scan, ``h = exp(d A) h + d B x``, ``y = (C h + D x) silu(z)``, in bits that no cut of the tokens changes.

    ``d`` is ``dt + dt_bias``, or its softplus. The tokens are taken one after another, so a sequence at once, in pieces
    that hand the state on, or token by token gives the same bits; each channel of each sequence has its own.

    Parameters
    ----------
    x, dt : Tensor
        Shape ``(batch, channels, tokens)``; float32, float16 or bfloat16 (computed in float32), like all others.
    A : Tensor
        Shape ``(channels, states)``.
    B, C : Tensor
        Shape ``(batch, tokens, states)``.
    D, dt_bias : Tensor or None
        Shape ``(channels,)``.
    z : Tensor or None
        Shape ``(batch, channels, tokens)``.
    dt_softplus : bool
    state : Tensor or None
        Shape ``(batch, channels, states)``: ``h`` before the first token, None for zeros. Not changed.

    Returns
    -------
    tuple of Tensor
        ``y``, float32 of shape ``(batch, channels, tokens)``, and ``h`` after the last token, float32.

    Raises
    ------
    RuntimeError
        Shapes, dtypes or devices that do not fit together.
    NotImplementedError
        If a gradient is wanted: there is none.

    Examples
    --------
    >>> ones = torch.ones(1, 1, 3, device="quartz")
    >>> gate = torch.ones(1, 3, 1, device="quartz")
    >>> y, state = torch_quartz.ops.selective_scan(ones, ones, torch.zeros(1, 1, device="quartz"), gate, gate)
    >>> y.flatten().cpu(), state.item()
    (tensor([1., 2., 3.]), 3.0)
    """
    refuse_gradients("selective_scan", x, dt, A, B, C, D, z, dt_bias, state)
    return torch.ops.quartz.selective_scan(x, dt, A, B, C, D, z, dt_bias, dt_softplus, state)


@torch.library.register_fake("quartz::selective_scan")
def _(x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state=None):
    y = x.new_empty(x.shape, dtype=torch.float32)
    return y, x.new_empty(x.shape[0], x.shape[1], A.shape[1], dtype=torch.float32)
