"""What proposes the tokens that the next step verifies: the protocol between a drafter and the model runner.

A drafter runs at the end of every step, on the device, behind the tables' update: nothing of it waits for the host, its
shapes follow from the plan, and what it proposes changes speed alone, never a committed token. `ngram` looks into the
tokens, `model` runs a smaller model, `mtp` and `dspark` run heads over the target's hidden states.

How a step and a drafter meet, in order:

1. `execute`: the target runs over the step's rows, ``rows = sum(query_len)``, one sequence behind another. Hidden
   states of the layers in `Drafter.needs_hidden` are kept for all rows.
2. `sample`: tokens are drawn and verified; tokens, lengths and counts of the slots are updated.
3. `Drafter.propose(context)`: returns drafts for every sequence of the step. Those of sequences that drew nothing (a
   chunk of a prompt that is not the last) are ignored, but their rows must be taken note of: a drafter with keys and
   values of its own writes those of all rows, as the target does.
4. The drafts go to ``drafts[slot]`` and the host; the next step reads them on the device.

Keys and values: a drafter names its layers in `kv_layers`. The runner gives them pages in the group of full attention,
so that they share the target's block tables, prefix cache, copies and swapping: where the target's keys of a token
are, the drafter's are too, provided that it wrote them in the step that computed the token. A layer's window is given
to the attention call; its blocks live as long as those of full attention. Rows of rejected drafts are written as well
and written again by a later step at the same positions, as the target's are; positions behind a sequence's length are
never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torch_quartz.engine.model_runner import ModelRunner
    from torch_quartz.engine.paged_context import PagedStep


@dataclass(frozen=True)
class KVLayerSpec:
    """The pages of one attention layer.

    Attributes
    ----------
    kv_heads, key_size, value_size : int
        Heads, and elements of a key and of a value of one head.
    dtype : torch.dtype
    window : int or None
        A query sees keys ``p - window + 1`` to ``p``.
    """

    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    window: int | None = None


class Proposal(NamedTuple):
    """What a drafter returns, tensors on the device, one row a sequence of the step.

    Attributes
    ----------
    drafts : Tensor
        ``(num_seqs, max_drafts)``, int64: the tokens at positions ``lengths`` and on; -1 behind the last.
    available : Tensor
        ``(num_seqs,)``, int64: how many there are.
    confidences : Tensor or None
        ``(num_seqs, max_drafts)``, float32: the chance that a draft is right, given that those before it are.
    """

    drafts: Tensor
    available: Tensor
    confidences: Tensor | None = None


@dataclass
class DraftContext:
    """What a drafter may read behind a step; valid during `propose` only. Tensors are on the device.

    Attributes
    ----------
    num_seqs, num_rows : int
        Of the step.
    query_lens : numpy array
        ``(num_seqs,)``: rows of each sequence, known to the host.
    drawn : numpy array of bool
        ``(num_seqs,)``: whether the sequence drew tokens in this step.
    slots : Tensor
        ``(num_seqs,)``, int64: the sequences' rows in `tokens`.
    query_starts : Tensor
        ``(num_seqs + 1,)``, int32: where each sequence's rows begin.
    row_sequence : Tensor
        ``(num_rows,)``, int64: the sequence of each row.
    row_positions : Tensor
        ``(num_rows,)``, int64: the position of each row's token. ``tokens[slots[row_sequence], row_positions + 1]`` is
        the token behind a row, once it is known: true of all committed rows of `drawn` sequences and of prompts.
    row_tokens : Tensor
        ``(num_rows,)``, int64: the tokens that the target was given.
    row_committed : Tensor
        ``(num_rows,)``, bool: whether the row's token is part of its sequence (rejected drafts are not).
    committed : Tensor
        ``(num_seqs,)``, int64: tokens that this step added; the last `committed` positions before `lengths`.
    last_rows : Tensor
        ``(num_seqs,)``, int64: the row of each sequence's last committed row token: the row whose logits the newest
        token was drawn from.
    tokens : Tensor
        ``(slots, width)``, int32: prompts and outputs, updated; `lengths` says how many count.
    lengths : Tensor
        ``(num_seqs,)``, int64: known tokens of each sequence, updated. The newest token stands at ``lengths - 1`` and
        has no keys yet.
    hidden : dict of int to Tensor
        Of each layer in `needs_hidden`: ``(num_rows, hidden size)``.
    max_lengths : numpy array
        ``(num_seqs,)``: upper bounds of ``lengths``.
    plain_parameters : callable
        Returns the keyword arguments of `ops.markov_draft` for the sequences' sampling parameters, or None where one of
        them has penalties, biases or forbidden tokens, which only `draw` knows.
    """

    runner: ModelRunner
    num_seqs: int
    num_rows: int
    query_lens: np.ndarray
    drawn: np.ndarray
    slots: Tensor
    query_starts: Tensor
    row_sequence: Tensor
    row_positions: Tensor
    row_tokens: Tensor
    row_committed: Tensor
    committed: Tensor
    last_rows: Tensor
    tokens: Tensor
    lengths: Tensor
    hidden: dict[int, Tensor]
    max_lengths: np.ndarray
    _make_step: Callable[..., PagedStep]
    _draw: Callable[..., Tensor]
    plain_parameters: Callable[[], dict[str, Tensor | None] | None]

    def rows_step(self) -> PagedStep:
        """Return a step over the rows of this step, for the drafter's own layers (`paged_context.running`)."""
        return self._make_step(self.query_lens, self.query_starts, self.row_positions, self.row_sequence)

    def step(self, query_lens: np.ndarray, query_starts: Tensor, positions: Tensor, row_sequence: Tensor) -> PagedStep:
        """Return a step over rows of the drafter's choice, ascending in position and contiguous in each sequence.

        Parameters
        ----------
        query_lens : numpy array
            ``(num_seqs,)``: rows of each sequence.
        query_starts : Tensor
            ``(num_seqs + 1,)``, int32: the sums of them.
        positions, row_sequence : Tensor
            ``(rows,)``, int64: each row's position in its sequence, and its sequence. Up to `lookahead` positions
            behind a sequence's blocks are held in blocks of the drafter, during `propose` only: the rows of the next
            step write those positions again. A position of -1 writes nowhere.

        Returns
        -------
        PagedStep
            Keys are counted up to the last row of each sequence.
        """
        return self._make_step(query_lens, query_starts, positions, row_sequence)

    def draw(self, logits: Tensor, offset: int, pending: Tensor | None = None) -> Tensor:
        """Draw one token a sequence as the target would: with its parameters and the noise of the position.

        Parameters
        ----------
        logits : Tensor
            ``(num_seqs, vocabulary)``.
        offset : int
            The token stands at position ``lengths + offset`` (0: the first draft).
        pending : Tensor, optional
            ``(num_seqs, offset)``: the drafts before it, for penalties.

        Returns
        -------
        Tensor
            ``(num_seqs,)``, int64; -1 where nothing can be drawn. Grammars are not looked at.
        """
        return self._draw(logits, offset, pending)


class Drafter:
    """Proposes drafts; the base class of all drafters.

    Attributes
    ----------
    max_drafts : int
        Drafts a sequence and step.
    lookahead : int
        Rows that it computes from the newest token on, that one included, where they are more than `max_drafts`.
    needs_hidden : tuple of int
        Taps: ``i`` is the output of the target's decoder layer ``i`` (0 is the first), -1 the output of the base model
        (behind its last norm, what the head is given). A tap of the last layer, or -1, makes all rows run through it.
    kv_layers : sequence of KVLayerSpec
        The drafter's own attention layers.
    attention_modules : sequence of Module
        The modules that call Transformers' attention interface with them, in the same order: a step that `DraftContext`
        makes finds their pages by them (``paged_context.Overrides(model).running(step)`` around the call of `model`).
        Empty for a drafter that calls the operators itself, with ``runner.draft_layers[i].key_pages``,
        ``step.tables[g]`` and ``step.slots[g]``, ``g`` being ``runner.draft_layers[i].group``.
    """

    max_drafts: int = 0
    lookahead: int = 0
    needs_hidden: tuple[int, ...] = ()
    kv_layers: Sequence[KVLayerSpec] = ()
    attention_modules: Sequence[nn.Module] = ()

    def bind(self, runner: ModelRunner) -> None:
        """Get to know the runner (``runner.model``, ``.head(hidden)``, ``.embed(ids)``, ``.device``); called once.

        `needs_hidden` and `kv_layers` are read behind this call. A drafter that does not fit the target raises
        ValueError naming what does not fit.
        """

    def propose(self, context: DraftContext) -> Proposal:
        """Return drafts for all sequences of the step."""
        raise NotImplementedError

    def weights(self) -> int:
        """Return the bytes of the drafter's own parameters, for the memory report."""
        return 0


def make_drafter(config: Any) -> Drafter:
    """Return the drafter of a `SpeculativeConfig`.

    Parameters
    ----------
    config : SpeculativeConfig
        Checked; its `method` names the module of this package.
    """
    import importlib

    module = importlib.import_module(f"{__name__}.{_MODULES[config.method]}")
    return module.make(config)


# Of SpeculativeConfig.method; each module has `make(config)`.
_MODULES = {"ngram": "ngram", "draft_model": "model", "mtp": "mtp", "dspark": "dspark"}
