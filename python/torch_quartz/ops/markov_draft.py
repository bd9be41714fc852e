"""The sequential part of a drafter with a low-rank Markov head. Page: docs/ops/markov_draft.md."""

import torch
from torch import Tensor

from torch_quartz.ops.sample import _per_row


def markov_draft(
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    previous: Tensor,
    temperature: Tensor | float | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    seeds: Tensor | int | None = None,
    positions: Tensor | int | None = None,
    *,
    sample_indices: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw drafts one after the other from ``base[:, j] + w1[token before] @ w2.T``, each with its position's noise.

    The noise is the one that the target will draw with, which keeps acceptance high. Nothing waits for the device.

    Parameters
    ----------
    base : Tensor
        Shape ``(requests, drafts, vocabulary)``: the logits of a drafter that saw no draft.
    w1, w2 : Tensor
        Shape ``(vocabulary, rank)``, one dtype, which the product has too.
    previous : Tensor
        Shape ``(requests,)``, integers: the token in front of the first draft.
    temperature, top_k, top_p, min_p, seeds, sample_indices
        As for `sample`, of the request.
    positions : Tensor or int, optional
        Shape ``(requests,)``: of the first draft; 0 if not given.

    Returns
    -------
    tuple of Tensor
        The drafts ``(requests, drafts)``, int64, and the logits they were drawn from, float32.

    Raises
    ------
    RuntimeError
        Other dtypes or shapes, tensors on different devices.

    Examples
    --------
    >>> base, w1, w2 = torch.zeros(1, 2, 3), torch.eye(3), torch.eye(3).roll(1, 0)
    >>> drafts, logits = torch_quartz.ops.markov_draft(
    ...     base.to("quartz"), w1.to("quartz"), w2.to("quartz"), torch.tensor([0], device="quartz"), temperature=0.0
    ... )
    >>> drafts.tolist()
    [[1, 2]]
    """
    rows = base[:, 0] if base.dim() == 3 and base.shape[1] > 0 else base
    return torch.ops.quartz.markov_draft(
        base,
        w1,
        w2,
        previous,
        _per_row(temperature, rows, torch.float32),
        _per_row(top_k, rows, torch.int64),
        _per_row(top_p, rows, torch.float32),
        _per_row(min_p, rows, torch.float32),
        _per_row(seeds, rows, torch.int64),
        _per_row(positions, rows, torch.int64),
        _per_row(sample_indices, rows, torch.int64),
    )


@torch.library.register_fake("quartz::markov_draft")
def _(
    base,
    w1,
    w2,
    previous,
    temperature=None,
    top_k=None,
    top_p=None,
    min_p=None,
    seeds=None,
    positions=None,
    sample_indices=None,
):
    return base.new_empty(base.shape[:2], dtype=torch.int64), base.new_empty(base.shape, dtype=torch.float32)
