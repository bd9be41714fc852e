"""Linear attention by the gated delta rule. Page: docs/ops/recurrent.md."""

import torch
from torch import Tensor

from torch_quartz.ops._call import refuse_gradients


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, ``S = exp(g) S``, ``S = S + k (beta (v - S^T k))^T``, ``o = S^T q``, token after token.

    A sequence at once, in pieces that hand the state on, or token by token gives the same bits. Query and key are taken
    as they are: normalise and scale them before. Head ``h`` of the values uses the key head ``h // (heads / key
    heads)``.

    Parameters
    ----------
    query, key : Tensor
        Shape ``(batch, tokens, key heads, key size)``; float32, float16 or bfloat16 (computed in float32), like all
        others.
    value : Tensor
        Shape ``(batch, tokens, heads, value size)``.
    g, beta : Tensor
        Shape ``(batch, tokens, heads)``: the logarithm of what a token leaves of the state, and how much it corrects.
    state : Tensor or None
        Shape ``(batch, heads, key size, value size)``: ``S`` before the first token, None for zeros. Not changed.

    Returns
    -------
    tuple of Tensor
        ``o``, float32 of shape ``(batch, tokens, heads, value size)``, and ``S`` after the last token, float32.

    Raises
    ------
    RuntimeError
        Shapes, dtypes or devices that do not fit together.
    NotImplementedError
        If a gradient is wanted: there is none.

    Examples
    --------
    >>> unit = torch.ones(1, 2, 1, 1, device="quartz")
    >>> g, beta = torch.zeros(1, 2, 1, device="quartz"), torch.full((1, 2, 1), 0.5, device="quartz")
    >>> output, state = torch_quartz.ops.gated_delta_rule(unit, unit, unit, g, beta)
    >>> output.flatten().cpu()
    tensor([0.5000, 0.7500])
    """
    refuse_gradients("gated_delta_rule", query, key, value, g, beta, state)
    return torch.ops.quartz.gated_delta_rule(query, key, value, g, beta, state)


@torch.library.register_fake("quartz::gated_delta_rule")
def _(query, key, value, g, beta, state=None):
    output = value.new_empty(value.shape, dtype=torch.float32)
    return output, value.new_empty(value.shape[0], value.shape[2], key.shape[3], value.shape[3], dtype=torch.float32)
