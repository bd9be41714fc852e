"""Exact-coupled verification of drafts. Page: docs/ops/spec_verify.md."""

from typing import NamedTuple

import torch
from torch import Tensor


class VerifyResult(NamedTuple):
    """What `spec_verify` returns, int64 tensors on the device of the tokens.

    Examples
    --------
    >>> torch_quartz.ops.VerifyResult._fields
    ('accepted', 'committed', 'next_tokens', 'next_positions', 'tokens')
    """

    accepted: Tensor  # (requests,): drafts that were right
    committed: Tensor  # (requests,): tokens that the step yields
    next_tokens: Tensor  # (requests,): the last of them, input of the next step; -1 where nothing could be drawn
    next_positions: Tensor  # (requests,): of the token to be drawn next
    tokens: Tensor  # like target_tokens, with -1 in place of those that are not committed


def spec_verify(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_drafts: Tensor,
    positions: Tensor | None = None,
    end_tokens: Tensor | None = None,
) -> VerifyResult:
    """Accept drafts while they equal the tokens that the target drew itself, with the noise of their positions.

    The tokens committed are therefore those of decoding without drafts, whatever the drafter. The target's tokens come
    from `sample` over all verified rows, each with its own position.

    Parameters
    ----------
    target_tokens : Tensor
        Shape ``(drafts + requests,)``: request ``r`` has ``cu_drafts[r] + r`` to ``cu_drafts[r + 1] + r``, one for each
        draft and the one behind. -1 is a row in which nothing could be drawn.
    draft_tokens : Tensor
        Shape ``(drafts,)``, the drafts of all requests; -1 is never accepted.
    cu_drafts : Tensor
        Shape ``(requests + 1,)``, ascending from 0 to ``drafts``.
    positions : Tensor, optional
        Shape ``(requests,)``: the position of each request's first token drawn; 0 if not given.
    end_tokens : Tensor, optional
        Shape ``(requests, n)``: tokens behind which nothing is committed, -1 for none.

    Returns
    -------
    VerifyResult
        Counts, the next tokens and positions, and the tokens committed.

    Raises
    ------
    RuntimeError
        Other dtypes or shapes, tensors on different devices.

    Examples
    --------
    >>> target, drafts = torch.tensor([5, 6, 7, 8], device="quartz"), torch.tensor([5, 9], device="quartz")
    >>> result = torch_quartz.ops.spec_verify(target, drafts, torch.tensor([0, 2, 2], device="quartz"))
    >>> result.accepted.tolist(), result.next_tokens.tolist(), result.tokens.tolist()
    ([1, 0], [6, 8], [5, 6, -1, 8])
    """
    return VerifyResult(*torch.ops.quartz.spec_verify(target_tokens, draft_tokens, cu_drafts, positions, end_tokens))


@torch.library.register_fake("quartz::spec_verify")
def _(target_tokens, draft_tokens, cu_drafts, positions=None, end_tokens=None):
    def empty(size):
        return target_tokens.new_empty((size,), dtype=torch.int64)

    requests = cu_drafts.shape[0] - 1
    return empty(requests), empty(requests), empty(requests), empty(requests), empty(target_tokens.shape[0])
