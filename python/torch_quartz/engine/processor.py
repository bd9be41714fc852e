"""What a finished step means for its requests: tokens, log probabilities, texts, grammars, ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from torch_quartz.engine.outputs import Logprob
from torch_quartz.engine.sequence import Request, SequenceState

if TYPE_CHECKING:
    from torch_quartz.engine.llm_engine import LLMEngine

# StepOutput.finished of the scheduler
_STOP, _LENGTH, _ABORTED, _ERROR = 1, 2, 3, 4
_NOTHING_LEFT = (
    "no token could be drawn: the model's logits are NaN, or the constraints (grammar, allowed_token_ids, bad_words, "
    "min_tokens) exclude every token"
)


class Processor:
    """Applies the results of steps to the requests of an engine, and makes the grammar masks of steps."""

    def __init__(self, engine: LLMEngine):
        self._engine = engine

    # ---- grammars

    def bitmask(self, plan: Any) -> torch.Tensor | None:
        """Return which tokens each sampling row of a step may draw; None where all may draw all.

        A grammar that fails ends its sample alone. A draft that its mask forbids is never the token drawn, so that
        verification rejects it.

        Parameters
        ----------
        plan : StepPlan
            Launched; the tokens of the step before have been processed.

        Returns
        -------
        Tensor or None
            ``(rows, ceil(vocabulary / 32))``, int32, pinned where the device copies from it.
        """
        wanted: list[tuple[SequenceState, int, int]] = []
        row = 0
        for key, index, samples, drafts in zip(
            plan.key.tolist(), plan.index.tolist(), plan.samples.tolist(), plan.drafts.tolist(), strict=True
        ):
            if not samples:
                continue
            request = self._engine.find(key)
            if request is not None and request.grammar is not None:
                sequence = request.sequences[index]
                if sequence.finish_reason is None:
                    wanted.append((sequence, row, drafts))
            row += 1 + drafts
        if not wanted:
            return None
        words = (self._engine.runner.vocab_size + 31) // 32
        # All bits set: rows without a grammar are free.
        mask = torch.full((row, words), -1, dtype=torch.int32, pin_memory=torch.quartz.substrate() == "cuda")
        entries = []
        for sequence, first, drafts in wanted:
            if sequence.matcher is None:
                sequence.matcher = sequence.request.grammar.matcher()
            entries.append((sequence.matcher, first, sequence.drafts[:drafts]))
        errors = type(entries[0][0]).fill_batch(mask, entries)
        for (sequence, first, drafts), error in zip(wanted, errors, strict=True):
            if error is not None:
                mask[first : first + 1 + drafts].fill_(-1)
                self._engine.fail(sequence, error)
        return mask

    # ---- results

    def process(self, plan: Any, result: Any, launched: float) -> list[Request]:
        """Take the tokens of a step; return the requests that have news.

        Parameters
        ----------
        plan : StepPlan
            What was launched.
        result : StepResult
            What came back.
        launched : float
            When, by `time.monotonic`.
        """
        engine = self._engine
        now = time.monotonic()
        kept = engine.scheduler.update(plan.step_id, result.tokens, result.available, result.confidences)
        self._first_time(plan, launched)
        touched = dict.fromkeys(self._prompt_logprobs(result))
        rows = _Rows(result)
        for i, (key, index, drafts, count, finished, stop) in enumerate(
            zip(
                plan.key.tolist(),
                plan.index.tolist(),
                plan.drafts.tolist(),
                kept.num_tokens.tolist(),
                kept.finished.tolist(),
                kept.stop_token.tolist(),
                strict=True,
            )
        ):
            request = engine.find(key)
            if request is None:
                continue  # ended while the step ran
            sequence = request.sequences[index]
            if sequence.finish_reason is None and (count or finished):
                self._count(sequence, drafts, count, now)
                try:
                    self._take(sequence, rows, i, count, finished, stop)
                except Exception as error:
                    engine.fail(sequence, error)
                touched[request] = None
            elif sequence.finish_reason is not None:
                touched[request] = None  # failed while its mask was made
            sequence.drafts = rows.drafts(i) if sequence.finish_reason is None else []
        return list(touched)

    def _first_time(self, plan: Any, launched: float) -> None:
        counters = self._engine.counters
        for _, key, _, cached in plan.new:
            request = self._engine.find(key)
            if request is not None and not request.metrics.first_scheduled_time:
                request.metrics.first_scheduled_time = launched
                request.metrics.num_cached_tokens = cached
                counters["prompt_tokens"] += len(request.prompt_token_ids)
                counters["cached_tokens"] += cached

    def _count(self, sequence: SequenceState, planned: int, count: int, now: float) -> None:
        counters, metrics = self._engine.counters, sequence.request.metrics
        verified = min(planned, len(sequence.drafts))
        accepted = min(verified, max(count - 1, 0))
        counters["generated_tokens"] += count
        counters["verified_tokens"] += verified
        counters["accepted_tokens"] += accepted
        metrics.num_generated_tokens += count
        metrics.num_drafted_tokens += verified
        metrics.num_accepted_tokens += accepted
        if count:
            sequence.failures = 0
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now

    def _take(self, sequence: SequenceState, rows: _Rows, i: int, count: int, finished: int, stop: int) -> None:
        params, detokenizer = sequence.params, sequence.detokenizer
        for column in range(count):
            token = rows.tokens[i][column]
            ends = finished == _STOP and column == count - 1
            sequence.token_ids.append(token)
            if sequence.logprobs is not None:
                self._logprob(sequence, rows, i, column, token)
            search = sequence.num_output_tokens > params.min_tokens
            if detokenizer is not None and (not ends or params.include_stop_str_in_output):
                found = detokenizer.add(token, search)
                if found is not None:
                    self._end(sequence, "stop", found)
                    return
            if sequence.matcher is not None and not ends:
                sequence.matcher.accept([token])
                if sequence.matcher.is_finished:
                    self._end(sequence, "stop")
                    return
        if finished == _STOP:
            sequence_stop = stop if stop in params.stop_token_ids else None
            self._end(sequence, "stop", sequence_stop)
        elif finished == _LENGTH:
            self._end(sequence, "length")
        elif finished == _ABORTED:
            self._end(sequence, "abort")
        elif finished == _ERROR:
            self._engine.fail(sequence, _NOTHING_LEFT)

    def _end(self, sequence: SequenceState, reason: str, stop_reason: int | str | None = None) -> None:
        if sequence.detokenizer is not None:
            found = sequence.detokenizer.finish(sequence.num_output_tokens > sequence.params.min_tokens)
            if found is not None:  # in what had been held back as the beginning of a character
                reason, stop_reason = "stop", found
        sequence.finish(reason, stop_reason)
        self._engine.scheduler.finish(sequence.key, sequence.index)  # which may know it already

    # ---- log probabilities

    def _logprob(self, sequence: SequenceState, rows: _Rows, i: int, column: int, token: int) -> None:
        params = sequence.params
        value = (rows.raw if params.logprobs_mode == "raw" else rows.processed)[i][column]
        ids, values = rows.top(i, column, params.logprobs)
        sequence.logprobs.append(self._entry(token, value, ids, values))
        sequence.cumulative_logprob += value

    def _prompt_logprobs(self, result: Any) -> list[Request]:
        found = []
        for key, first, raw, top_ids, top_values in result.prompt_logprobs or ():
            request = self._engine.find(key)
            if request is None or request.prompt_logprobs is None:
                continue
            wanted = request.params.prompt_logprobs
            for offset, value in enumerate(raw.tolist()):
                place = first + offset + 1  # logits of a row are about the token behind it
                if place >= len(request.prompt_token_ids):
                    break
                ids = top_ids[offset][:wanted].tolist() if wanted else []
                values = top_values[offset][:wanted].tolist() if wanted else []
                token = request.prompt_token_ids[place]
                request.prompt_logprobs[place] = self._entry(token, value, ids, values)
        return found

    def _entry(self, token: int, value: float, ids: list[int], values: list[float]) -> dict[int, Logprob]:
        decoder = self._engine.factory.decoder
        word = decoder.word if decoder is not None else lambda token: None
        entry = {token: Logprob(value, ids.index(token) + 1 if token in ids else None, word(token))}
        for rank, (other, logprob) in enumerate(zip(ids, values, strict=True), 1):
            if other != token and other >= 0:
                entry[other] = Logprob(logprob, rank, word(other))
        return entry


class _Rows:
    """The arrays of a result as lists, each made when first asked for."""

    def __init__(self, result: Any):
        self._result = result
        self.tokens: list[list[int]] = result.tokens.tolist()
        self._lists: dict[str, Any] = {}

    def _list(self, name: str) -> Any:
        if name not in self._lists:
            self._lists[name] = getattr(self._result, name).tolist()
        return self._lists[name]

    @property
    def raw(self) -> list[list[float]]:
        return self._list("raw_logprobs")

    @property
    def processed(self) -> list[list[float]]:
        return self._list("logprobs")

    def top(self, i: int, column: int, count: int) -> tuple[list[int], list[float]]:
        if not count:
            return [], []
        return self._list("top_ids")[i][column][:count], self._list("top_logprobs")[i][column][:count]

    def drafts(self, i: int) -> list[int]:
        if self._result.drafts is None:
            return []
        row = self._list("drafts")[i]
        return row[: row.index(-1)] if -1 in row else row
