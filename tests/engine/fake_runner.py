"""A runner without a model: tokens come from a hash of everything in front, so that a plain loop gives them too.

It keeps its own tables by slot, as the device does, and so notices a plan that is wrong.
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np
from torch_quartz._C import engine as core
from torch_quartz.engine.llm_engine import LLMEngine
from torch_quartz.engine.requests import RequestFactory

VOCABULARY = 64
EOS = 1


def draw(history: list[int], seed: int, index: int, allowed=None) -> int:
    """Return the token behind some tokens: a hash; -1 where nothing is allowed."""
    text = f"{seed} {index} {history}".encode()
    numbers = hashlib.blake2b(text, digest_size=VOCABULARY).digest()
    choice = [token for token in range(VOCABULARY) if allowed is None or token in allowed]
    return max(choice, key=lambda token: (numbers[token], -token)) if choice else -1


def expected(prompt, params, seed, index, limit=10**9, eos=EOS, nan=None):
    """Return the output of a plain loop: tokens and the reason for the end."""
    history, output = list(prompt), []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {eos})
    while True:
        if nan is not None and nan in history:
            return output, "error"
        allowed = None if len(output) >= params.min_tokens else set(range(VOCABULARY)) - stops
        token = draw(history, seed, index, allowed)
        history.append(token)
        output.append(token)
        if token in stops:
            return output, "stop"
        if len(output) == params.max_tokens or len(history) == limit:
            return output, "length"


class FakeRunner:
    """Stands for `ModelRunner`.

    Parameters
    ----------
    groups : list of GroupSpec
        Of the imagined model.
    max_drafts : int
        Drafts proposed a step: right ones and wrong ones.
    faults : dict
        From "execute", "sample" or "wait" to a function of the plan that may raise.
    nan : int, optional
        Sequences with this token have no logits.
    """

    vocab_size = VOCABULARY
    saved_rows = 0

    def __init__(self, groups, max_drafts=0, nan=None):
        self.groups = groups
        self.faults = {}
        self.rows = 0
        self._max_drafts = max_drafts
        self._nan = nan
        self._tokens: dict[int, list[int]] = {}  # by slot
        self._drafts: dict[int, list[int]] = {}
        self._sequences = {}

    def memory_report(self):
        return {"total": 0}

    def execute(self, plan, sequences):
        self._fault("execute", plan)
        for slot in plan.released.tolist():
            self._tokens.pop(slot, None)
        for slot, key, index, _ in plan.new:
            sequence = sequences(key, index)
            assert slot not in self._tokens, "a slot was not released"
            self._tokens[slot] = list(sequence.token_ids)
            self._drafts[slot] = []
            self._sequences[slot] = sequence
        for slot, key, index in zip(plan.slot.tolist(), plan.key.tolist(), plan.index.tolist(), strict=True):
            assert (self._sequences[slot].key, self._sequences[slot].index) == (key, index)
        self.rows += plan.num_rows
        return SimpleNamespace(plan=plan, result=None)

    def sample(self, step, bitmask):
        plan = step.plan
        self._fault("sample", plan)
        count, columns = len(plan.key), 1 + self._max_drafts
        tokens = np.full((count, columns), -1, np.int32)
        proposals = np.full((count, self._max_drafts), -1, np.int32)
        row = 0
        for i, (slot, samples, drafts) in enumerate(
            zip(plan.slot.tolist(), plan.samples.tolist(), plan.drafts.tolist(), strict=True)
        ):
            if not samples:
                continue
            masks = None if bitmask is None else [_allowed(mask) for mask in bitmask[row : row + 1 + drafts]]
            row += 1 + drafts
            drawn = self._verify(slot, drafts, masks)
            tokens[i, : len(drawn)] = drawn
            self._drafts[slot] = self._propose(slot)
            proposals[i, : len(self._drafts[slot])] = self._drafts[slot]
        assert bitmask is None or row == len(bitmask)
        zeros = np.zeros(tokens.shape, np.float32)
        step.result = SimpleNamespace(
            tokens=tokens,
            raw_logprobs=-tokens.astype(np.float32) / 7,
            logprobs=zeros,
            top_ids=None,
            top_logprobs=None,
            drafts=proposals,
            available=(proposals >= 0).sum(1).astype(np.int32) if self._max_drafts else None,
            confidences=None,
            prompt_logprobs=[],
        )

    def wait(self, step):
        self._fault("wait", step.plan)
        return step.result

    def _verify(self, slot, drafts, masks):
        history, sequence = self._tokens[slot], self._sequences[slot]
        proposed = [*self._drafts[slot][:drafts], *[-1] * drafts][:drafts]
        drawn = []
        for place in range(1 + drafts):
            if self._nan is not None and self._nan in history:
                return drawn or [-1]
            allowed = masks[place] if masks else None
            if len(history) - sequence.num_prompt_tokens < sequence.params.min_tokens:
                stops = set(sequence.request.all_stop_token_ids)
                allowed = (allowed or set(range(VOCABULARY))) - stops
            token = draw(history, sequence.seed, sequence.index, allowed)
            if token < 0:
                return drawn or [-1]
            history.append(token)
            drawn.append(token)
            if place == drafts or proposed[place] != token:
                break
        return drawn

    def _propose(self, slot):
        """Draw drafts as the model would, the first ones right, as many as a hash says."""
        sequence, history, found = self._sequences[slot], list(self._tokens[slot]), []
        right = sum(history) % (self._max_drafts + 1)
        for place in range(self._max_drafts):
            token = draw(history, sequence.seed, sequence.index)
            found.append(token if place < right else (token + 1) % VOCABULARY)
            history.append(found[-1])
        return found[: len(history) % (self._max_drafts + 1)]

    def _fault(self, place, plan):
        if place in self.faults:
            self.faults[place](plan)


def _allowed(mask):
    return {token for token in range(VOCABULARY) if int(mask[token // 32]) >> (token % 32) & 1}


def make_engine(*, tokenizer=None, num_blocks=64, host_blocks=0, max_drafts=0, nan=None, overlap=True, **options):
    """Return an engine on a fake runner."""
    config = SimpleNamespace(
        **{
            "seed": 0,
            "overlap": overlap,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 64,
            "enable_prefix_caching": True,
            "policy": "fcfs",
            "preemption": "swap" if host_blocks else "recompute",
            "max_prefill_tokens_per_request": 0,
            "speculative": SimpleNamespace(num_speculative_tokens=max_drafts, adaptive=False, step_times=None)
            if max_drafts
            else None,
            **options,
        }
    )
    groups = [core.GroupSpec("full", num_blocks=num_blocks, host_blocks=host_blocks)]
    factory = RequestFactory(tokenizer, VOCABULARY, config.max_model_len, (EOS,))
    return LLMEngine(config, FakeRunner(groups, max_drafts, nan), factory)


def finish(engine, limit=5000):
    """Step until nothing is left; return the finished outputs by request."""
    done = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests():
            engine.check()
            return done
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done
                done[output.request_id] = output
    raise AssertionError("the engine does not come to an end")
