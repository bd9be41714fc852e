"""Drafts from what a request already contains: what followed its last tokens where they occurred before."""

from __future__ import annotations

from typing import Any

from torch_quartz.engine.drafters import DraftContext, Drafter, Proposal


class NgramDrafter(Drafter):
    """Looks the longest suffix of a sequence up in the sequence itself (`ngram_propose`).

    Parameters
    ----------
    max_drafts : int
        At most so many tokens are proposed.
    shortest, longest : int
        Lengths of the suffix that are looked for.
    """

    def __init__(self, max_drafts: int, shortest: int = 1, longest: int = 4):
        self.max_drafts = max_drafts
        self._shortest, self._longest = shortest, longest

    def propose(self, context: DraftContext) -> Proposal:
        """Return what followed the latest occurrence of the longest suffix."""
        from torch_quartz.ops import ngram_propose

        # The operator reads whole rows; no sequence of the step is longer than the bound.
        width = int(context.max_lengths.max()) if context.num_seqs else 1
        rows = context.tokens[:, :width].index_select(0, context.slots)
        drafts, available = ngram_propose(rows, self.max_drafts, self._shortest, self._longest, lengths=context.lengths)
        return Proposal(drafts, available)


def make(config: Any) -> NgramDrafter:
    """Return the drafter of a `SpeculativeConfig`."""
    return NgramDrafter(config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)
