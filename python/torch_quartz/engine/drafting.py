"""What a drafter is given behind a step (drafters/__init__.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torch_quartz.engine.drafters import DraftContext
from torch_quartz.engine.kv_cache import upload
from torch_quartz.engine.paged_context import PagedStep

if TYPE_CHECKING:
    from torch_quartz.engine.model_runner import ModelRunner, Step


def make_context(runner: ModelRunner, step: Step, committed: Tensor | None) -> DraftContext:
    """Return the context of a step whose tokens are drawn.

    Parameters
    ----------
    runner : ModelRunner
    step : Step
    committed : Tensor or None
        Tokens that each drawing sequence got; None where none drew.
    """
    inputs, state, device = step.inputs, runner.state, runner.device
    drawn = np.zeros(inputs.num_seqs, bool)
    drawn[inputs.sampling] = True
    if committed is None or len(inputs.sampling) != inputs.num_seqs:
        whole = torch.zeros(inputs.num_seqs, dtype=torch.int64, device=device)
        if committed is not None:
            whole.index_copy_(0, inputs.sampling_index, committed)
        committed = whole
    lengths = state.lengths.index_select(0, inputs.places_of_sequences)
    row_sequence = inputs.row_numbers()
    # The newest token of a sequence that drew stands behind its last committed row; a chunk's rows are all of a prompt.
    committed_row = inputs.row_positions < (lengths - 1).index_select(0, row_sequence)
    ends = inputs.query_starts[1:].long() - 1
    verified = np.asarray(step.plan.drafts) > 0
    if verified.any():
        begins = inputs.query_starts[:-1].long()
        is_verified = torch.from_numpy(verified).to(device)
        last_rows = torch.where(is_verified, begins + (committed - 1).clamp(min=0), ends)
    else:
        last_rows = ends

    layers = dict(zip(runner.drafter.attention_modules, runner.draft_layers, strict=False)) if runner.drafter else {}
    tables: list[Tensor] = []

    def make_step(query_lens: np.ndarray, query_starts: Tensor, positions: Tensor, rows_of: Tensor) -> PagedStep:
        if not tables:
            tables.extend(_extended_tables(runner, step))
        size = runner.cache.block_size
        column = positions.clamp(min=0) // size
        valid = (positions >= 0) & (positions < state.max_model_len)
        slots = [
            torch.where(valid, table[rows_of, column.clamp(max=table.shape[1] - 1)] * size + positions % size, -1)
            for table in tables
        ]
        last = (query_starts[1:].long() - 1).clamp(min=0)
        counts = (positions.index_select(0, last) + 1).clamp(min=0, max=tables[0].shape[1] * size).to(torch.int32)
        return PagedStep(layers, tables, slots, query_starts.to(torch.int32), counts, int(query_lens.max()))

    def draw(logits: Tensor, offset: int, pending: Tensor | None) -> Tensor:
        return runner.sampler.draw(
            logits, inputs.slot, inputs.places_of_sequences, lengths + offset, state.tokens, pending=pending
        ).tokens

    return DraftContext(
        runner=runner,
        num_seqs=inputs.num_seqs,
        num_rows=inputs.num_rows,
        query_lens=inputs.query_len,
        drawn=drawn,
        slots=inputs.places_of_sequences,
        query_starts=inputs.query_starts,
        row_sequence=row_sequence,
        row_positions=inputs.row_positions,
        row_tokens=inputs.row_tokens,
        row_committed=committed_row,
        committed=committed,
        last_rows=last_rows,
        tokens=state.tokens,
        lengths=lengths,
        hidden=step.taps,
        max_lengths=np.minimum(np.asarray(step.plan.max_length).astype(np.int64) + 1, state.width),
        _make_step=make_step,
        _draw=draw,
        plain_parameters=lambda: runner.sampler.plain_parameters(inputs.slot, inputs.places_of_sequences),
    )


def _extended_tables(runner: ModelRunner, step: Step) -> list[Tensor]:
    """Return the block tables of a step's sequences, with blocks of the drafter behind those that are theirs."""
    inputs, size = step.inputs, runner.cache.block_size
    lengths = np.asarray(step.plan.max_length).astype(np.int64)
    held = -(-lengths // size)  # columns that the scheduler has filled
    width = int(held.max()) + runner.scratch_blocks
    number = np.arange(width)[None] - held[:, None]
    tables = []
    for group, table in zip(runner.cache.groups, runner.state.tables, strict=True):
        own = table[:, :width].index_select(0, inputs.places_of_sequences)
        columns = own.shape[1]
        scratch = group.num_blocks + np.arange(len(held))[:, None] * runner.scratch_blocks + number
        if group.kind == "full" and runner.scratch_blocks:
            numbers = upload(np.where((number >= 0) & (number < runner.scratch_blocks), scratch, -1), runner.device)
            numbers = numbers[:, :columns].to(torch.int32)
            own = torch.where(numbers >= 0, numbers, own)
        tables.append(own)
    return tables
