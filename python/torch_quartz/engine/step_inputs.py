"""From a plan of the scheduler to the tensors of a step: rows, positions, token ids, pages, and who needs what.

Everything that depends on the plan alone is computed on the host with numpy and travels in one packed copy; what
depends on lengths that the host does not know yet is computed on the device from the slots' tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_quartz.engine.device_state import DeviceState, Packed
from torch_quartz.engine.kv_cache import KVCache
from torch_quartz.engine.last_layer import set_needed
from torch_quartz.engine.paged_context import PagedStep
from torch_quartz.engine.state_layers import StateStep


class StepInputs:
    """The tensors of one step.

    Parameters
    ----------
    plan : StepPlan
    state : DeviceState
    cache : KVCache
    layers : dict of Module to PagedLayer
    prompt_lens : numpy array
        By slot: tokens of the prompt, for rows whose prompt logits are wanted.
    all_rows : bool
        Whether all rows run through the last layer (a drafter reads them).

    Attributes
    ----------
    slot, query_len, start : numpy array
        ``(num_seqs,)``.
    sampling : numpy array
        The sequences that draw tokens.
    counts : numpy array
        Rows from which each of them draws: 1 + drafts.
    ids, positions : Tensor
        ``(1, rows)``, for the model.
    places, row_positions : Tensor
        ``(rows,)``: slot and true position of each row.
    """

    def __init__(
        self,
        plan: Any,
        state: DeviceState,
        cache: KVCache,
        layers: dict,
        prompt_lens: np.ndarray,
        all_rows: bool,
    ):
        device = state.tokens.device
        self.slot = plan.slot.astype(np.int64)
        self.query_len = plan.query_len.astype(np.int64)
        self.start = plan.start.astype(np.int64)
        self.num_seqs = len(self.slot)
        self.num_rows = int(self.query_len.sum())
        ends = np.cumsum(self.query_len)
        begins = ends - self.query_len
        samples = np.asarray(plan.samples) != 0
        self.sampling = np.flatnonzero(samples)
        self.counts = 1 + plan.drafts.astype(np.int64)[self.sampling]
        self._choose(plan, ends, samples, prompt_lens, all_rows)

        packed = Packed()
        one_each = self.num_rows == self.num_seqs
        row_sequence = np.arange(self.num_seqs) if one_each else np.repeat(np.arange(self.num_seqs), self.query_len)
        at_slot = packed.add(self.slot)
        at_start = packed.add(self.start)
        at_lens = packed.add(self.query_len)
        at_starts = packed.add(np.concatenate(([0], ends)))
        known = bool((self.start >= 0).all())
        if not one_each:
            at_sequence = packed.add(row_sequence)
            at_offset = packed.add(np.arange(self.num_rows) - begins[row_sequence])
            at_place = packed.add(self.slot[row_sequence])
        at_needed = packed.add(self.needed_rows) if self.saves else None
        at_tails = packed.add(np.concatenate(([0], np.cumsum(self.tails)))) if self.saves else None
        at_sample = packed.add(self.sample_rows)
        at_prompt = packed.add(self.prompt_rows)
        at_sampling = packed.add(self.sampling)
        at_cu = packed.add(np.concatenate(([0], np.cumsum(self.counts - 1))))
        sample_sequence = np.repeat(np.arange(len(self.sampling)), self.counts)
        self.sample_offset = np.arange(len(sample_sequence)) - (np.cumsum(self.counts) - self.counts)[sample_sequence]
        self.sample_slots = self.slot[self.sampling][sample_sequence]
        self.sample_sequence = sample_sequence
        at_sample_place = packed.add(self.sample_slots)
        is_draft = self.sample_offset > 0
        width = state.drafts.shape[1]
        at_draft = packed.add((self.sample_slots * width + self.sample_offset - 1)[is_draft])
        numbers = packed.upload(device)

        self.places_of_sequences = numbers[at_slot]
        self.query_starts = numbers[at_starts].to(torch.int32)
        lengths = state.lengths.index_select(0, self.places_of_sequences)
        self.lengths_before = lengths
        start = numbers[at_start]
        first = start if known else torch.where(start >= 0, start, lengths - 1)
        if one_each:
            self.row_sequence, self.places, self.row_positions = None, self.places_of_sequences, first
        else:
            self.row_sequence = numbers[at_sequence]
            self.places = numbers[at_place]
            self.row_positions = first.index_select(0, self.row_sequence) + numbers[at_offset]
        self._sequence_numbers = row_sequence
        key_counts = (first + numbers[at_lens]).to(torch.int32)
        flat = self.places * state.width + self.row_positions.clamp(max=state.width - 1)
        self.row_tokens = state.tokens.view(-1).index_select(0, flat).long()
        self.ids = self.row_tokens.unsqueeze(0)
        # Rows behind the end of a sequence that has ended meanwhile still get a position that the model has.
        self.positions = self.row_positions.clamp(max=state.max_model_len - 1).unsqueeze(0)
        columns = -(-int(max(plan.max_length.max(), 1)) // cache.block_size)
        tables = [
            table.index_select(0, self.places_of_sequences)
            if group.kind == "state"
            else table[:, :columns].index_select(0, self.places_of_sequences)
            for group, table in zip(cache.groups, state.tables, strict=True)
        ]
        slots = [
            state.slot_mapping(number, self.places, self.row_positions) if group.kind != "state" else self.places
            for number, group in enumerate(cache.groups)
        ]
        most = int(self.query_len.max())
        self.step = PagedStep(layers, tables, slots, self.query_starts, key_counts, most)
        if self.saves:
            tails = numbers[at_tails].to(torch.int32)
            set_needed(self.step, numbers[at_needed], tails, int(self.tails.max()))
        for number, group in enumerate(cache.groups):
            if group.kind == "state":
                drafts = np.asarray(plan.drafts) > 0
                fresh = self.start == 0
                blocks = tables[number][:, 0].long()
                self.step.states = StateStep(begins, self.query_len, fresh, drafts, blocks)
        self.sample_index = numbers[at_sample]
        self.prompt_index = numbers[at_prompt]
        self.sampling_index = numbers[at_sampling]
        self.cu_drafts = numbers[at_cu]
        self.sample_places = numbers[at_sample_place]
        self.draft_index = numbers[at_draft]
        self.is_draft = is_draft

    def _choose(
        self, plan: Any, ends: np.ndarray, samples: np.ndarray, prompt_lens: np.ndarray, all_rows: bool
    ) -> None:
        """Decide which rows are needed behind the last layer, and where tokens are drawn among them."""
        tails = np.zeros(self.num_seqs, np.int64)
        tails[self.sampling] = self.counts
        wanted = np.asarray(plan.logits_from)
        self.prompts = np.flatnonzero(wanted >= 0)
        spans = []  # of prompt rows: sequence, first position, rows
        for i in self.prompts.tolist():
            end = int(min(self.start[i] + self.query_len[i], prompt_lens[self.slot[i]] - 1))
            count = end - int(wanted[i])
            if count > 0:
                spans.append((i, int(wanted[i]), count))
                tails[i] = max(tails[i], self.start[i] + self.query_len[i] - wanted[i])
        self.spans = spans
        needed = int(tails.sum())
        self.saves = not all_rows and needed < self.num_rows
        if not self.saves:
            tails = self.query_len
        self.tails = tails
        tail_ends = np.cumsum(tails)
        if self.saves:
            offset = np.arange(needed) - np.repeat(tail_ends - tails, tails)
            self.needed_rows = np.repeat(ends - tails, tails) + offset
        # Rows among those that come out of the model.
        self.num_out = needed if self.saves else self.num_rows
        last = tail_ends[self.sampling]
        starts = np.repeat(last - self.counts, self.counts)
        within = np.arange(int(self.counts.sum())) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        self.sample_rows = starts + within
        parts = []
        for i, position, count in spans:
            row = tail_ends[i] - (self.start[i] + self.query_len[i] - position)
            parts.append(np.arange(row, row + count))
        self.prompt_rows = np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def row_numbers(self) -> Tensor:
        """Return the sequence of each row, on the device."""
        if self.row_sequence is None:
            return torch.arange(self.num_seqs, device=self.places.device)
        return self.row_sequence
