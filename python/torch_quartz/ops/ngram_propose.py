"""Drafts from what a request already contains. Page: docs/ops/ngram_propose.md."""

import torch
from torch import Tensor


def ngram_propose(
    tokens: Tensor,
    drafts: int,
    shortest: int = 1,
    longest: int = 4,
    lengths: Tensor | None = None,
    *,
    earliest: bool = False,
) -> tuple[Tensor, Tensor]:
    """Propose what followed the longest suffix of a row where it occurred before.

    Parameters
    ----------
    tokens : Tensor
        Shape ``(rows, width)``, integers: prompt and output of each request.
    drafts : int
        At most so many tokens are proposed.
    shortest, longest : int
        Lengths of the suffix that are looked for; the longest that occurs again counts.
    lengths : Tensor, optional
        Shape ``(rows,)``: how many tokens of a row count; all if not given.
    earliest : bool
        Of occurrences of the same length take the first, not the latest.

    Returns
    -------
    tuple of Tensor
        The proposed tokens ``(rows, drafts)``, -1 behind the last, and how many there are ``(rows,)``; int64.

    Raises
    ------
    RuntimeError
        Other dtypes or shapes, numbers out of range, tensors on different devices.

    Examples
    --------
    >>> tokens = torch.tensor([[1, 2, 3, 9, 1, 2, 4, 1, 2]], device="quartz")
    >>> proposed, counts = torch_quartz.ops.ngram_propose(tokens, 3, longest=2)
    >>> proposed.tolist(), counts.tolist()
    ([[4, 1, 2]], [3])
    >>> torch_quartz.ops.ngram_propose(tokens, 3, longest=2, earliest=True)[0].tolist()
    [[3, 9, 1]]
    """
    return torch.ops.quartz.ngram_propose(tokens, drafts, shortest, longest, lengths, earliest)


@torch.library.register_fake("quartz::ngram_propose")
def _(tokens, drafts, shortest=1, longest=4, lengths=None, earliest=False):
    proposed = tokens.new_empty((tokens.shape[0], drafts), dtype=torch.int64)
    return proposed, tokens.new_empty((tokens.shape[0],), dtype=torch.int64)
