"""The tables of running sequences on the device, by slot: tokens, lengths, drafts and blocks.

They are what makes a step independent of the host: rows find their tokens, positions and pages here, and sampling
writes the new ones. The host uploads what it decided (one packed copy a step) and waits for nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_quartz.engine.kv_cache import KVCache, upload


class DeviceState:
    """Tables of all slots.

    Parameters
    ----------
    cache : KVCache
    slots : int
        Sequences that run at the same time.
    max_model_len, max_drafts : int
    device : device

    Attributes
    ----------
    tokens : Tensor
        ``(slots, width)``, int32: prompt and output; drafts stand behind the length, 0 for a missing one.
    lengths : Tensor
        ``(slots,)``, int64: tokens known.
    drafts : Tensor
        ``(slots, max(1, max_drafts))``, int64; -1 for a missing one.
    tables : list of Tensor
        A group: ``(slots, columns)``, int32.
    """

    def __init__(self, cache: KVCache, slots: int, max_model_len: int, max_drafts: int, device: Any):
        self.max_model_len = max_model_len
        self.max_drafts = max_drafts
        self._device = device
        self._block_size = cache.block_size
        # Sequences that ended with the step in flight may run one step more, and the last column takes what no
        # sequence gets.
        self.width = max_model_len + 3 * (max_drafts + 1) + 1
        columns = -(-self.width // cache.block_size)
        self.tokens = torch.zeros(slots, self.width, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self.drafts = torch.full((slots, max(1, max_drafts)), -1, dtype=torch.int64, device=device)
        self.tables = [
            torch.zeros(slots, 1 if group.kind == "state" else columns, dtype=torch.int32, device=device)
            for group in cache.groups
        ]

    @property
    def bytes(self) -> int:
        """Device memory of the tables."""
        return sum(t.numel() * t.element_size() for t in (self.tokens, self.lengths, self.drafts, *self.tables))

    def admit(self, sequences: list[tuple[int, Any]]) -> None:
        """Take the tokens of sequences that got a slot.

        Parameters
        ----------
        sequences : list of (slot, SequenceState)
        """
        if not sequences:
            return
        ids = [np.asarray(sequence.token_ids, np.int32) for _, sequence in sequences]
        flat = upload(np.concatenate(ids), self._device)
        begin = 0
        for (slot, _), one in zip(sequences, ids, strict=True):
            self.tokens[slot, : len(one)].copy_(flat[begin : begin + len(one)])
            begin += len(one)
        numbers = np.array([[slot for slot, _ in sequences], [len(one) for one in ids]], np.int64)
        places, lengths = upload(numbers, self._device).unbind(0)
        self.lengths.index_copy_(0, places, lengths)
        self.drafts.index_fill_(0, places, -1)

    def update_tables(self, updates: np.ndarray) -> None:
        """Write blocks into the tables: (group, slot, column, block) each."""
        for number, table in enumerate(self.tables):
            chosen = updates[updates[:, 0] == number] if len(self.tables) > 1 else updates
            if len(chosen):
                numbers = np.empty((2, len(chosen)), np.int64)
                numbers[0] = chosen[:, 1].astype(np.int64) * table.shape[1] + chosen[:, 2]
                numbers[1] = chosen[:, 3]
                places, blocks = upload(numbers, self._device).unbind(0)
                table.view(-1).index_copy_(0, places, blocks.to(torch.int32))

    def slot_mapping(self, group: int, places: Tensor, positions: Tensor) -> Tensor:
        """Return where rows write their keys: -1 for positions that no sequence may have.

        Parameters
        ----------
        group : int
        places, positions : Tensor
            ``(rows,)``, int64: slot and position of each row.
        """
        size = self._block_size
        inside = positions.clamp(0, self.width - 1)
        column = inside // size
        table = self.tables[group]
        block = table.view(-1).index_select(0, places * table.shape[1] + column).long()
        return torch.where((positions >= 0) & (positions < self.max_model_len), block * size + inside % size, -1)


class Packed:
    """Host numbers of a step that travel in one copy."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._end = 0

    def add(self, values: np.ndarray) -> slice:
        """Add int64 numbers; return where they will be."""
        begin = self._end
        self._parts.append(values)
        self._end += len(values)
        return slice(begin, self._end)

    def upload(self, device: Any) -> Tensor:
        """Return all numbers on the device, int64."""
        return upload(np.concatenate(self._parts, dtype=np.int64, casting="same_kind"), device)
