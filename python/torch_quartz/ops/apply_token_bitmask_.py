"""Grammar bitmasks on logits, in place. Page: docs/ops/apply_token_bitmask_.md."""

import torch
from torch import Tensor


def apply_token_bitmask_(logits: Tensor, bitmask: Tensor, row_indices: Tensor | None = None) -> Tensor:
    """Set the logits of tokens whose bit is 0 to ``-inf``, in place; all others keep their bits.

    Parameters
    ----------
    logits : Tensor
        Shape ``(rows, vocabulary)``, contiguous rows; float32, float16 or bfloat16.
    bitmask : Tensor
        Shape ``(masks, words)``, int32, at least ``ceil(vocabulary / 32)`` words: bit ``id % 32`` of word ``id // 32``.
    row_indices : Tensor, optional
        Shape ``(masks,)``: the row of `logits` that each row of `bitmask` belongs to; what is no row (-1) is passed
        over. Its own number if not given.

    Returns
    -------
    Tensor
        `logits`.

    Raises
    ------
    RuntimeError
        Other dtypes or shapes, tensors on different devices.

    Examples
    --------
    >>> logits = torch.zeros(2, 3, device="quartz")
    >>> mask = torch.tensor([[0b101]], dtype=torch.int32, device="quartz")
    >>> torch_quartz.ops.apply_token_bitmask_(logits, mask, torch.tensor([1], device="quartz")).tolist()
    [[0.0, 0.0, 0.0], [0.0, -inf, 0.0]]
    """
    torch.ops.quartz.apply_token_bitmask_(logits, bitmask, row_indices)
    return logits


@torch.library.register_fake("quartz::apply_token_bitmask_")
def _(logits, bitmask, row_indices=None):
    return None
