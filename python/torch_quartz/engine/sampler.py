"""How each running sequence draws its tokens: parameters by slot on the device, and the call of `ops.sample`.

A parameter that no row of a step uses is not passed, which changes nothing for the others: a row's token is a function
of its own logits and parameters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_quartz.engine.kv_cache import upload

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_FOREVER = 2**62  # a position that no sequence reaches
_ANY = -2  # in the context of a bad word: whatever stands there


class Sampler:
    """Sampling parameters of all slots.

    Parameters
    ----------
    slots : int
        Sequences that run at the same time.
    vocab_size : int
        Columns of the logits.
    device : device
    """

    def __init__(self, slots: int, vocab_size: int, device: Any):
        self.vocab_size = vocab_size
        self._device = device
        self._words = (vocab_size + 31) // 32
        self._floats = torch.zeros(len(_FLOATS), slots, device=device)
        self._ints = torch.zeros(4, slots, dtype=torch.int64, device=device)  # top_k, seed, sample index, counts' row
        # What the host knows of each slot, to leave out what no row uses.
        self._uses = {name: np.zeros(slots, bool) for name in ("top_k", "top_p", "min_p", "penalties", "allowed")}
        self._entries = np.zeros(slots, np.int64)
        self._contexts = np.zeros(slots, np.int64)
        self._wanted = np.full(slots, -1, np.int64)  # logprobs: -1 none, else how many most likely tokens
        # Tables that only some requests need, made with the first of them.
        self._bias: tuple[Tensor, Tensor, Tensor] | None = None  # id, value, position from which it ends
        self._bad: tuple[Tensor, Tensor] | None = None  # last tokens; the tokens before them
        self._allowed: Tensor | None = None
        self._counts: Tensor | None = None
        self._prompts: Tensor | None = None
        self._count_rows = np.full(slots, -1, np.int64)
        self._free_rows: list[int] = []

    @property
    def bytes(self) -> int:
        """Device memory of the tables."""
        tables = [self._floats, self._ints, self._allowed, self._counts, self._prompts]
        tables += [*(self._bias or ()), *(self._bad or ())]
        return sum(t.numel() * t.element_size() for t in tables if t is not None)

    def wants_logprobs(self, slots: np.ndarray) -> tuple[bool, int]:
        """Return whether rows of these slots want log probabilities, and the most top tokens that one wants."""
        most = int(self._wanted[slots].max(initial=-1))
        return most >= 0, max(most, 0)

    # ---- slots

    def release(self, slots: np.ndarray) -> None:
        """Forget what sequences that left their slots had."""
        for slot in slots.tolist():
            if self._count_rows[slot] >= 0:
                self._free_rows.append(int(self._count_rows[slot]))
                self._count_rows[slot] = -1

    def admit(self, sequences: list[tuple[int, Any]]) -> None:
        """Take the parameters of sequences that got a slot.

        Parameters
        ----------
        sequences : list of (slot, SequenceState)
        """
        if not sequences:
            return
        floats = np.zeros((len(_FLOATS), len(sequences)), np.float32)
        ints = np.zeros((4, len(sequences)), np.int64)
        for column, (slot, sequence) in enumerate(sequences):
            params = sequence.request.params
            floats[:, column] = [getattr(params, name) for name in _FLOATS]
            penalties = (
                params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
            )
            self._uses["top_k"][slot] = params.top_k > 0
            self._uses["top_p"][slot] = params.top_p < 1.0
            self._uses["min_p"][slot] = params.min_p > 0.0
            self._uses["penalties"][slot] = penalties
            self._wanted[slot] = -1 if params.logprobs is None else params.logprobs
            if penalties and self._count_rows[slot] < 0:
                self._count_rows[slot] = self._take_count_row()
            ints[:, column] = params.top_k, sequence.seed, sequence.index, self._count_rows[slot]
            if penalties:
                self._set_counts(int(self._count_rows[slot]), sequence)
            self._set_entries(slot, sequence)
            self._set_bad_words(slot, sequence)
            self._set_allowed(slot, params)
        places = upload(np.array([slot for slot, _ in sequences], np.int64), self._device)
        self._floats.index_copy_(1, places, upload(floats, self._device))
        self._ints.index_copy_(1, places, upload(ints, self._device))

    def _take_count_row(self) -> int:
        if not self._free_rows:
            held = 0 if self._counts is None else self._counts.shape[0]
            more = max(1, held)  # as many again: tables of a large vocabulary are not small
            counts = torch.zeros(held + more, self.vocab_size, dtype=torch.int32, device=self._device)
            prompts = torch.zeros(held + more, self._words, dtype=torch.int32, device=self._device)
            if self._counts is not None and self._prompts is not None:
                counts[:held].copy_(self._counts)
                prompts[:held].copy_(self._prompts)
            self._counts, self._prompts = counts, prompts
            self._free_rows = list(range(held + more - 1, held - 1, -1))
        return self._free_rows.pop()

    def _set_counts(self, row: int, sequence: Any) -> None:
        from torch_quartz.ops import count_tokens, token_bits

        assert self._counts is not None and self._prompts is not None
        ids = np.asarray(sequence.token_ids, np.int64)[None]
        border = sequence.num_prompt_tokens
        self._prompts[row].copy_(token_bits(upload(ids[:, :border].copy(), self._device), self.vocab_size)[0])
        if ids.shape[1] > border:
            self._counts[row].copy_(count_tokens(upload(ids[:, border:].copy(), self._device), self.vocab_size)[0])
        else:
            self._counts[row].zero_()

    def _set_entries(self, slot: int, sequence: Any) -> None:
        params, request = sequence.request.params, sequence.request
        entries: list[tuple[int, float, int]] = []
        for token, value in (params.logit_bias or {}).items():
            entries.append((int(token), float(value), _FOREVER))
        if params.min_tokens > 0:
            until = sequence.num_prompt_tokens + params.min_tokens
            entries += [(token, -np.inf, until) for token in request.all_stop_token_ids]
        entries += [(word[-1], -np.inf, _FOREVER) for word in request.bad_words_token_ids if len(word) == 1]
        self._entries[slot] = len(entries)
        if not entries:
            return
        self._bias = self._wider(self._bias, len(entries), (torch.int64, torch.float32, torch.int64))
        for table, kind, column in zip(self._bias, (np.int64, np.float32, np.int64), range(3), strict=True):
            table[slot, : len(entries)].copy_(upload(np.array([e[column] for e in entries], kind), self._device))

    def _wider(self, tables: Any, width: int, dtypes: tuple[torch.dtype, ...]) -> Any:
        held = 0 if tables is None else tables[0].shape[1]
        if width <= held:
            return tables
        width = 1 << (width - 1).bit_length()
        slots = self._floats.shape[1]
        wider = tuple(torch.zeros(slots, width, dtype=dtype, device=self._device) for dtype in dtypes)
        for new, old in zip(wider, tables or (), strict=False):
            new[:, :held].copy_(old)
        return wider

    def _set_bad_words(self, slot: int, sequence: Any) -> None:
        words = [word for word in sequence.request.bad_words_token_ids if len(word) > 1]
        self._contexts[slot] = len(words)
        if not words:
            return
        length = max(len(word) for word in words) - 1
        slots = self._floats.shape[1]
        held = (0, 0) if self._bad is None else tuple(self._bad[1].shape[1:])
        if len(words) > held[0] or length > held[1]:
            shape = [1 << (max(x, y) - 1).bit_length() for x, y in zip((len(words), length), held, strict=True)]
            last = torch.full((slots, shape[0]), -1, dtype=torch.int64, device=self._device)
            before = torch.full((slots, *shape), _ANY, dtype=torch.int32, device=self._device)
            if self._bad is not None:
                last[:, : held[0]].copy_(self._bad[0])
                before[:, : held[0], shape[1] - held[1] :].copy_(self._bad[1])
            self._bad = last, before
        assert self._bad is not None
        last_ids = np.full(self._bad[0].shape[1], -1, np.int64)
        contexts = np.full(tuple(self._bad[1].shape[1:]), _ANY, np.int32)
        for row, word in enumerate(words):
            last_ids[row] = word[-1]
            contexts[row, contexts.shape[1] - len(word) + 1 :] = word[:-1]
        self._bad[0][slot].copy_(upload(last_ids, self._device))
        self._bad[1][slot].copy_(upload(contexts, self._device))

    def _set_allowed(self, slot: int, params: Any) -> None:
        allowed = params.allowed_token_ids
        self._uses["allowed"][slot] = allowed is not None
        if allowed is None:
            return
        if self._allowed is None:
            shape = (self._floats.shape[1], self._words)
            self._allowed = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        bits = np.zeros(self._words * 32, bool)
        bits[list(allowed)] = True
        words = np.packbits(bits, bitorder="little").view(np.int32)
        self._allowed[slot].copy_(upload(words, self._device))

    # ---- steps

    def draw(
        self,
        logits: Tensor,
        slots: np.ndarray,
        places: Tensor,
        positions: Tensor,
        tokens: Tensor,
        *,
        pending: Tensor | None = None,
        bitmask: Tensor | None = None,
        logprobs: bool = False,
        top_n: int = 0,
    ) -> Any:
        """Draw a token a row.

        Parameters
        ----------
        logits : Tensor
            ``(rows, vocabulary)``.
        slots : numpy array
            ``(rows,)``: the slot of each row.
        places : Tensor
            The same on the device, int64.
        positions : Tensor
            ``(rows,)``, int64: of the tokens drawn.
        tokens : Tensor
            ``(slots, width)``: all tokens before those drawn, drafts included.
        pending, bitmask, logprobs, top_n
            As for `torch_quartz.ops.sample`.

        Returns
        -------
        SampleResult
        """
        from torch_quartz.ops import sample

        temperature, top_p, min_p, repetition, frequency, presence = self._floats.index_select(1, places).unbind(0)
        top_k, seeds, samples, count_rows = self._ints.index_select(1, places).unbind(0)
        uses = {name: bool(flags[slots].any()) for name, flags in self._uses.items()}
        options: dict[str, Any] = {}
        if uses["penalties"]:
            options = {
                "repetition_penalty": repetition,
                "frequency_penalty": frequency,
                "presence_penalty": presence,
                "counts": self._counts,
                "prompt_mask": self._prompts,
                "slots": count_rows,
                "pending": pending,
            }
        bias = self._biases(slots, places, positions, tokens)
        if bias is not None:
            options["bias_ids"], options["bias_values"] = bias
        if uses["allowed"]:
            assert self._allowed is not None
            own = self._allowed.index_select(0, places)
            own = torch.where(self._flag("allowed", slots).unsqueeze(1), own, -1)
            bitmask = own if bitmask is None else bitmask & own
        return sample(
            logits,
            temperature,
            top_k if uses["top_k"] else None,
            top_p if uses["top_p"] else None,
            min_p if uses["min_p"] else None,
            seeds,
            positions,
            sample_indices=samples,
            bitmask=bitmask,
            logprobs=logprobs,
            top_n=top_n,
            **options,
        )

    def plain_parameters(self, slots: np.ndarray, places: Tensor) -> dict[str, Tensor | None] | None:
        """Return what `ops.sample` needs for these slots; None where one has penalties, biases or forbidden tokens.

        Parameters
        ----------
        slots, places
            As for `draw`.
        """
        special = self._uses["penalties"][slots].any() or self._uses["allowed"][slots].any()
        if special or self._entries[slots].any() or self._contexts[slots].any():
            return None
        temperature, top_p, min_p = self._floats[:3].index_select(1, places).unbind(0)
        top_k, seeds, samples, _ = self._ints.index_select(1, places).unbind(0)
        uses = {name: bool(flags[slots].any()) for name, flags in self._uses.items()}
        return {
            "temperature": temperature,
            "top_k": top_k if uses["top_k"] else None,
            "top_p": top_p if uses["top_p"] else None,
            "min_p": min_p if uses["min_p"] else None,
            "seeds": seeds,
            "sample_indices": samples,
        }

    def penalised(self, slots: np.ndarray) -> bool:
        """Whether one of these slots needs the counts of tokens."""
        return bool(self._uses["penalties"][slots].any())

    def _flag(self, name: str, slots: np.ndarray) -> Tensor:
        return upload(self._uses[name][slots], self._device)

    def _biases(
        self, slots: np.ndarray, places: Tensor, positions: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return ids and values that are added to the logits of rows; -1 where an entry does not count."""
        ids, values = [], []
        entries = int(self._entries[slots].max(initial=0))
        if entries:
            assert self._bias is not None
            id_, value, until = (table[:, :entries].index_select(0, places) for table in self._bias)
            number = torch.arange(entries, device=self._device)
            held = upload(self._entries[slots], self._device).unsqueeze(1)
            ids.append(torch.where((positions.unsqueeze(1) < until) & (number < held), id_, -1))
            values.append(value)
        words = int(self._contexts[slots].max(initial=0))
        if words:
            assert self._bad is not None
            last, before = (table[:, :words].index_select(0, places) for table in self._bad)
            length = before.shape[2]
            context = positions.unsqueeze(1) + torch.arange(-length, 0, device=self._device)
            there = tokens[places.unsqueeze(1), context.clamp(min=0)]
            there = torch.where(context >= 0, there, _ANY - 1)
            matches = ((before == _ANY) | (before == there.unsqueeze(1))).all(2)
            held = upload(self._contexts[slots], self._device).unsqueeze(1)
            number = torch.arange(words, device=self._device)
            ids.append(torch.where(matches & (number < held), last, -1))
            values.append(torch.full_like(ids[-1], -torch.inf, dtype=torch.float32))
        if not ids:
            return None
        return (ids[0], values[0]) if len(ids) == 1 else (torch.cat(ids, 1), torch.cat(values, 1))

    def count(self, slots: np.ndarray, places: Tensor, tokens: Tensor) -> None:
        """Count committed tokens of rows; -1 is passed over.

        Parameters
        ----------
        slots, places
            As for `draw`.
        tokens : Tensor
            ``(rows,)``, int64.
        """
        if not self.penalised(slots):
            return
        assert self._counts is not None
        rows = self._ints[3].index_select(0, places)
        counted = (rows >= 0) & (tokens >= 0)
        flat = torch.where(counted, rows * self.vocab_size + tokens, 0)
        self._counts.view(-1).index_put_((flat,), counted.int(), accumulate=True)
