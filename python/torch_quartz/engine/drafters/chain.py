"""Drafts one after the other: each is drawn, given to a small model, and the next is drawn from what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torch_quartz.engine.drafters import DraftContext, Proposal
from torch_quartz.engine.kv_cache import upload
from torch_quartz.engine.paged_context import PagedStep

if TYPE_CHECKING:
    from torch_quartz.engine.model_runner import ModelRunner


def only_drawn(context: DraftContext, positions: Tensor) -> Tensor:
    """Return positions of one row a sequence, -1 (written nowhere) for sequences that drew nothing.

    Parameters
    ----------
    context : DraftContext
    positions : Tensor
        ``(num_seqs,)``, int64.
    """
    if context.drawn.all():
        return positions
    return torch.where(upload(context.drawn.copy(), positions.device), positions, -1)


def one_row_step(context: DraftContext, positions: Tensor) -> PagedStep:
    """Return a step of one row a sequence, at the positions that `only_drawn` returned."""
    starts = torch.arange(context.num_seqs + 1, dtype=torch.int32, device=positions.device)
    return context.step(np.ones(context.num_seqs, np.int64), starts, positions, starts[:-1].long())


def until_first_missing(drafts: Tensor, confidences: Tensor | None = None) -> Proposal:
    """Return a proposal of the drafts before the first -1 of each row.

    Parameters
    ----------
    drafts : Tensor
        ``(num_seqs, max_drafts)``, int64; -1 where nothing could be drawn.
    confidences : Tensor, optional
        The same shape.
    """
    valid = (drafts >= 0).long().cumprod(1)
    return Proposal(torch.where(valid != 0, drafts, -1), valid.sum(1), confidences)


def nothing(context: DraftContext, max_drafts: int) -> Proposal:
    """Return a proposal without drafts."""
    device = context.lengths.device
    return Proposal(
        torch.full((context.num_seqs, max_drafts), -1, dtype=torch.int64, device=device),
        torch.zeros(context.num_seqs, dtype=torch.int64, device=device),
    )


def head_logits(runner: ModelRunner, hidden: Tensor) -> Tensor:
    """Return what the target's head, and all behind it, makes of a drafter's hidden states.

    Parameters
    ----------
    runner : ModelRunner
    hidden : Tensor
        ``(rows, hidden size)``, normed as the target's own.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return runner.head(hidden, BaseModelOutputWithPast(last_hidden_state=hidden.unsqueeze(0)))


def propose(
    context: DraftContext, max_drafts: int, logits: Tensor, forward: Callable[[int, Tensor], Tensor]
) -> Proposal:
    """Draw drafts in turn, each with the noise that the target will draw its position with.

    Parameters
    ----------
    context : DraftContext
    max_drafts : int
    logits : Tensor
        ``(num_seqs, vocabulary)``: what the first draft is drawn from.
    forward : callable
        ``forward(j, tokens)`` returns the logits behind draft ``j``, whose tokens are given (0 for missing ones).
    """
    drafts: list[Tensor] = []
    for number in range(max_drafts):
        pending = torch.stack(drafts, 1) if drafts else None
        drafts.append(context.draw(logits, number, pending))
        if number + 1 < max_drafts:
            logits = forward(number, drafts[-1].clamp(min=0))
    return until_first_missing(torch.stack(drafts, 1))
