"""Model runner and scheduler without the layers above them: what a request's tokens and log probabilities are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch_quartz.engine.config import EngineConfig
from torch_quartz.engine.llm_engine import make_scheduler
from torch_quartz.engine.model_runner import ModelRunner
from torch_quartz.engine.sampling_params import SamplingParams

OPTIONS = {"max_model_len": 64, "kv_cache_bytes": 2**22, "block_size": 8, "max_num_seqs": 16}


class Driver:
    """Serves requests of token ids.

    Parameters
    ----------
    model : Module
    **options
        Of EngineConfig, beside `OPTIONS`.
    """

    def __init__(self, model: Any, **options: Any):
        self.config = EngineConfig(model, **{**OPTIONS, **options})
        self.runner = ModelRunner(model, self.config)
        self.runner.allocate()
        self.scheduler = make_scheduler(self.config, self.runner)
        self.sequences: dict[tuple[int, int], Any] = {}
        self.found: dict[tuple[int, int], dict[str, list]] = {}
        self.prompt_logprobs: dict[int, list] = {}
        self.plans: list[Any] = []

    def add(
        self, prompt: list[int], params: SamplingParams | None = None, stop_ids: tuple = (), bad_words: tuple = ()
    ) -> int:
        """Add a request; return its key."""
        params = params or SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
        key = len({key for key, _ in self.sequences})
        request = SimpleNamespace(params=params, all_stop_token_ids=stop_ids, bad_words_token_ids=bad_words)
        for index in range(params.n):
            self.sequences[key, index] = SimpleNamespace(
                key=key,
                index=index,
                request=request,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                seed=params.seed or 0,
            )
            self.found[key, index] = {"tokens": [], "raw": [], "top": []}
        wanted = params.prompt_logprobs is not None
        self.scheduler.add_request(
            key,
            np.array(prompt, np.int32),
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_ids=list(stop_ids),
            n=params.n,
            cache_read=not wanted,
            logits_from=0 if wanted else -1,
        )
        return key

    def run(self, overlap: bool = True, guard: Any = None) -> dict[tuple[int, int], dict[str, list]]:
        """Serve everything; return tokens and log probabilities by key and index."""
        before = None
        while self.scheduler.has_unfinished:
            plan = self.scheduler.schedule()
            step = None
            if plan is not None:
                self.plans.append(plan)
                step = self._guarded(guard, self.runner.execute, plan, lambda key, index: self.sequences[key, index])
            if before is not None:
                self._take(*before)
            if step is not None:
                self._guarded(guard, self.runner.sample, step, None)
            before = None if step is None else (plan, step)
            if before is not None and not overlap:
                self._take(*before)
                before = None
        if before is not None:
            self._take(*before)
        self.scheduler.check()
        return self.found

    @staticmethod
    def _guarded(guard: Any, function: Any, *arguments: Any) -> Any:
        if guard is None:
            return function(*arguments)
        with guard:
            return function(*arguments)

    def _take(self, plan: Any, step: Any) -> None:
        result = self.runner.wait(step)
        kept = self.scheduler.update(plan.step_id, result.tokens, result.available, result.confidences)
        for i, (key, index, count) in enumerate(zip(kept.key, kept.index, kept.num_tokens, strict=True)):
            entry = self.found[int(key), int(index)]
            sequence = self.sequences[int(key), int(index)]
            for column in range(int(count)):
                sequence.token_ids.append(int(result.tokens[i, column]))
                entry["tokens"].append(int(result.tokens[i, column]))
                if result.raw_logprobs is not None:
                    entry["raw"].append(result.raw_logprobs[i, column].tobytes())
                if result.top_ids is not None:
                    entry["top"].append((result.top_ids[i, column].tobytes(), result.top_logprobs[i, column].tobytes()))
        for key, first, raw, ids, values in result.prompt_logprobs:
            self.prompt_logprobs.setdefault(key, []).append((first, raw, ids, values))


def rescored(model: Any, prompt: list[int], output: list[int]) -> list[bytes]:
    """Return the log probabilities of an output by a plain forward pass."""
    from torch_quartz.ops import token_logprobs

    ids = torch.tensor([[*prompt, *output]], device="quartz")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0]
    values = token_logprobs(logits[len(prompt) - 1 : -1], ids[0, len(prompt) :]).cpu().numpy()
    return [value.tobytes() for value in values]
