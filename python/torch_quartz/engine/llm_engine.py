"""The engine's loop: plan a step, launch it, take the tokens of the one before, and keep serving whatever happens.

One thread calls it. A step that fails is discarded: its sequences are computed again, and given up only when that does
not help. What concerns one request alone (a grammar, a text, logits without a number) fails that request alone.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torch_quartz.engine.metrics import EngineMetrics
from torch_quartz.engine.outputs import RequestOutput
from torch_quartz.engine.processor import Processor
from torch_quartz.engine.requests import RequestFactory
from torch_quartz.engine.sampling_params import OutputKind, SamplingParams
from torch_quartz.engine.sequence import Request, SequenceState

_log = logging.getLogger(__name__)
# Failed steps with a sequence in them since its last token. First it is computed again. If it never had a token, it is
# then set aside, tried without others of its kind, and given up: a prompt that breaks the model takes nobody along.
_SET_ASIDE, _ALONE, _FAILURES = 2, 3, 6
# Of the scheduler's counts: better names, and those that the engine counts itself, by what requests got.
_NAMES = {"prefix_queries": "prefix_cache_queries", "prefix_hits": "prefix_cache_hits", "rows": "computed_rows"}
_OURS = {"steps", "tokens", "drafts_verified", "drafts_accepted"}
_GAUGES = {
    "num_requests": "Requests that have not finished",
    "num_waiting": "Sequences that wait for a slot",
    "num_running": "Sequences that run",
    "num_preempted": "Sequences that were preempted and wait",
    "num_in_flight": "Steps on the device",
    "nodes": "Blocks in the prefix tree",
    "blocks_used": "Blocks of keys and values in use",
    "blocks_cached": "Blocks kept for later requests",
    "blocks_free": "Blocks without content",
}


@dataclass
class _Launched:
    """A step on the device: the plan, the runner's handle, and when it was launched (`time.monotonic`)."""

    plan: Any
    step: Any
    time: float


class LLMEngine:
    """Requests in, outputs out, one step at a time.

    Parameters
    ----------
    config : EngineConfig
        Sizes and policies.
    runner : ModelRunner
        The model on the device, its pools allocated.
    factory : RequestFactory
        Checks requests.
    scheduler : callable, optional
        Makes the scheduler, by default `make_scheduler` of the configuration and the runner; called again where the
        scheduler itself failed.

    Examples
    --------
    >>> engine = LLMEngine.from_options(model, device="quartz")
    >>> engine.add_request("a", "Hello", SamplingParams(max_tokens=4))
    >>> while engine.has_unfinished_requests():
    ...     for output in engine.step():
    ...         print(output.outputs[0].text)
    """

    def __init__(self, config: Any, runner: Any, factory: RequestFactory, scheduler: Any = None):
        self.config = config
        self.runner = runner
        self.factory = factory
        self._make_scheduler = scheduler or (lambda: make_scheduler(config, runner))
        self.scheduler = self._make_scheduler()
        self._metrics = EngineMetrics()
        self._processor = Processor(self)
        self._requests: dict[int, Request] = {}
        self._by_id: dict[str, Request] = {}
        self._ended: dict[int, Request] = {}  # ended between steps: the next one says so
        self._in_flight: _Launched | None = None
        self._aside: deque[Request] = deque()  # not in the scheduler, to be tried one at a time
        self._suspect: Request | None = None  # the one that is tried
        self._next_key = 0

    @classmethod
    def from_options(cls, model: Any, *, tokenizer: Any = None, **options: Any) -> LLMEngine:
        """Load a model and return an engine for it; the arguments are those of `LLM`."""
        from torch_quartz.engine.loading import load

        return cls(*load(model, tokenizer, options))

    # ---- requests

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | None = None, *, priority: int = 0
    ) -> None:
        """Add a request to the queue.

        Parameters
        ----------
        request_id : str
            A name that no unfinished request has.
        prompt : str, list of int or dict
            See `RequestFactory.make`.
        params : SamplingParams, optional
            The defaults if not given.
        priority : int
            Lower ones first, under the "priority" policy.

        Raises
        ------
        ValueError
            Names the field, the rule and the value; nothing was added.
        """
        self.submit(self.make_request(request_id, prompt, params, priority=priority))

    def make_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        output_kind: OutputKind | None = None,
    ) -> Request:
        """Return a checked request for `submit`; raises as `add_request`. Any thread may call it."""
        return self.factory.make(request_id, prompt, params, priority=priority, output_kind=output_kind)

    def submit(self, request: Request) -> None:
        """Add a request that `make_request` made; raises ValueError where it is known or can never run."""
        if request.request_id in self._by_id:
            raise ValueError(f"request_id must be of no unfinished request, got {request.request_id!r}")
        self.factory.start(request, self._next_key, self.config.seed)
        self._enqueue(request)
        self._next_key += 1
        request.metrics.arrival_time = time.monotonic()
        self._requests[request.key] = request
        self._by_id[request.request_id] = request
        self._metrics.counters["requests"] += 1

    def _enqueue(self, request: Request) -> None:
        params = request.params
        self.scheduler.add_request(
            request.key,
            request.prompt_token_ids,
            max_tokens=request.max_tokens,
            min_tokens=params.min_tokens,
            stop_ids=list(request.all_stop_token_ids),
            n=params.n,
            priority=request.priority,
            namespace=request.cache_salt,
            cache_read=params.prompt_logprobs is None,
            logits_from=-1 if params.prompt_logprobs is None else 0,
        )

    def abort_request(self, request_id: str | Iterable[str]) -> bool:
        """End requests at once; the next step returns what they have, with reason "abort".

        Unknown and finished ones are passed over. Returns whether one was ended.
        """
        found = False
        for name in [request_id] if isinstance(request_id, str) else request_id:
            request = self._by_id.get(name)
            if request is None:
                continue
            found = True
            self.scheduler.abort(request.key)
            for sequence in request.sequences:
                sequence.finish("abort")
            self._end(request)
        return found

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do or to say."""
        return bool(self._requests or self._ended)

    @property
    def num_unfinished_requests(self) -> int:
        """How many requests have not ended."""
        return len(self._requests)

    # ---- steps

    def step(self) -> list[RequestOutput]:
        """Launch the next step, take the tokens of the one before, and return the outputs of requests with news.

        Exceptions of the model, the device or a grammar do not leave this function: they end or repeat requests, and
        `metrics` shows them.
        """
        start = time.monotonic()
        touched: dict[int, Request] = {}
        try:
            self._advance(touched)
        except Exception as error:
            self._restart(error)
        except BaseException:
            # Ctrl-C: the step may be half done, and nobody will call for these requests.
            self._restart(InterruptedError("interrupted"))
            raise
        finally:
            self._metrics.add_step(time.monotonic() - start)
        return self._outputs(touched)

    def _advance(self, touched: dict[int, Request]) -> None:
        if self._aside:
            self._try_one()
        before = self._in_flight
        plan = self.scheduler.schedule()
        if plan is None and before is None and self._requests:
            raise RuntimeError(f"nothing can run: {self.scheduler.num_waiting} sequences wait for ever")
        launched = None
        failed: Exception | None = None
        if plan is not None:
            now = time.monotonic()
            try:
                launched = _Launched(plan, self.runner.execute(plan, self.sequence), now)
                self._metrics.counters["steps"] += 1
            except Exception as error:
                failed = error  # first the tokens of the step before, which knows nothing of this
        self._in_flight = None
        if before is not None and not self._collect(before, touched):
            return  # whatever was launched behind it is discarded with it
        if failed is not None:
            self._discard(plan, failed)
        if launched is None:
            return
        try:
            mask = self._processor.bitmask(launched.plan)
            self.runner.sample(launched.step, mask)
        except Exception as error:
            self._discard(plan, error)
            return
        # Nothing more to launch (no overlap, or nobody is left): take the tokens now.
        if not self.config.overlap or not self._requests:
            self._collect(launched, touched)
        else:
            self._in_flight = launched

    def _collect(self, launched: _Launched, touched: dict[int, Request]) -> bool:
        try:
            result = self.runner.wait(launched.step)
        except Exception as error:
            self._discard(launched.plan, error)
            return False
        for request in self._processor.process(launched.plan, result, launched.time):
            touched[request.key] = request
        return True

    def sequence(self, key: int, index: int) -> SequenceState:
        """Return a running sample."""
        return self._requests[key].sequences[index]

    def find(self, key: int) -> Request | None:
        """Return an unfinished request; None where it has ended (with rows still on the device)."""
        return self._requests.get(key)

    def fail(self, sequence: SequenceState, error: Exception | str) -> None:
        """End one sample with an error, unless it has ended; the others go on."""
        reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        sequence.finish("error", error=reason)
        self.scheduler.finish(sequence.key, sequence.index)

    def _discard(self, plan: Any, error: Exception) -> None:
        """Take a step as never run: its samples are computed again, or fail where that did not help before."""
        self._note(error)
        members = [
            request.sequences[index]
            for key, index in zip(plan.key.tolist(), plan.index.tolist(), strict=True)
            if (request := self._requests.get(key)) is not None
        ]
        for sequence in members:
            sequence.failures += 1
        requests = list(dict.fromkeys(sequence.request for sequence in members))
        newcomers = [request for request in requests if request.num_output_tokens == 0]
        for request in requests:
            newcomer = request in newcomers
            worst = max(sequence.failures for sequence in request.sequences)
            if worst >= (_ALONE if newcomers == [request] else _FAILURES):
                for sequence in request.sequences:
                    # The samples of a prompt that cannot be computed fail together.
                    if newcomer or sequence.failures == worst:
                        self.fail(sequence, error)
            elif newcomer and worst >= _SET_ASIDE:
                self.scheduler.abort(request.key)
                self._aside.append(request)
                if request is self._suspect:
                    self._suspect = None
            if request.finished:
                self._end(request)
        self.scheduler.discard(plan.step_id)

    def _try_one(self) -> None:
        """Put the next request that was set aside into the queue, when the last one and all others are well."""
        if self._suspect is not None and self._suspect.num_output_tokens == 0 and not self._suspect.finished:
            return
        aside = {request.key for request in self._aside}
        if any(s.failures for r in self._requests.values() if r.key not in aside for s in r.sequences):
            return  # still being computed again
        self._suspect = None
        while self._aside and self._suspect is None:
            request = self._aside.popleft()
            if request.key in self._requests:  # not aborted meanwhile
                self._enqueue(request)
                self._suspect = request

    def _restart(self, error: Exception) -> None:
        """All requests fail, and a new scheduler takes over: the state of the old one is not known."""
        self._note(error)
        self._in_flight = self._suspect = None
        self._aside.clear()
        for request in list(self._requests.values()):
            for sequence in request.sequences:
                sequence.finish("error", error=f"{type(error).__name__}: {error}")
            self._end(request)
        self.scheduler = self._make_scheduler()

    def _note(self, error: Exception) -> None:
        self._metrics.counters["failed_steps"] += 1
        self._metrics.last_error = f"{type(error).__name__}: {error}"
        _log.error("a step failed: %s", "".join(traceback.format_exception(error)))

    def _end(self, request: Request) -> None:
        del self._requests[request.key]
        del self._by_id[request.request_id]
        request.metrics.finished_time = time.monotonic()
        reasons = {sequence.finish_reason for sequence in request.sequences}
        reason = next((reason for reason in ("error", "abort") if reason in reasons), "stop")
        self._metrics.add_finished(request.metrics, reason)
        self._ended[request.key] = request

    def _outputs(self, touched: dict[int, Request]) -> list[RequestOutput]:
        for request in touched.values():
            if request.key in self._requests and request.finished:
                self._end(request)
        ended, self._ended = self._ended, {}
        outputs = [
            request.output()
            for request in touched.values()
            if request.key not in ended and request.output_kind is not OutputKind.FINAL_ONLY
        ]
        return outputs + [request.output() for request in ended.values()]

    # ---- reports

    @property
    def counters(self) -> dict[str, int]:
        """The counters that steps advance."""
        return self._metrics.counters

    def metrics(self) -> dict[str, Any]:
        """Return counts, rates and states as a flat dict; see docs/serving.md."""
        return self._metrics.as_dict(self._scheduler_stats())

    def prometheus(self) -> str:
        """Return `metrics` in Prometheus' text format; needs the package prometheus-client."""
        return self._metrics.prometheus(self._scheduler_stats(), _GAUGES)

    def memory_report(self) -> dict[str, Any]:
        """Return what takes memory on the device, in bytes."""
        return self.runner.memory_report()

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks, as after a change of the weights."""
        self.scheduler.reset_prefix_cache()

    def check(self) -> None:
        """Raise AssertionError or RuntimeError where a block, a slot or a request is lost."""
        self.scheduler.check()
        if not self._requests and self._in_flight is None:
            stats = self._scheduler_stats()
            assert stats["num_running"] == stats["num_waiting"] == stats["num_preempted"] == 0, stats
            assert stats["blocks_used"] == 0, stats

    def _scheduler_stats(self) -> dict[str, Any]:
        stats = self.scheduler.stats()
        groups = stats.pop("groups")
        result = {"num_requests": len(self._requests), "last_layer_rows_saved": self.runner.saved_rows}
        result |= {f"blocks_{name}": sum(group[name] for group in groups) for name in ("used", "cached", "free")}
        return result | {_NAMES.get(name, name): value for name, value in stats.items() if name not in _OURS}


def make_scheduler(config: Any, runner: Any) -> Any:
    """Return the scheduler of a configuration for the groups of a runner's model."""
    from torch_quartz._C import engine

    speculative = config.speculative
    drafts = speculative.num_speculative_tokens if speculative is not None else 0
    scheduler = engine.Scheduler(
        engine.SchedulerConfig(
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            groups=runner.groups,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.policy,
            preemption=config.preemption,
            max_drafts=drafts,
            adaptive_drafts=speculative is not None and bool(speculative.adaptive),
            max_prefill_tokens_per_request=config.max_prefill_tokens_per_request,
        )
    )
    if speculative is not None and speculative.step_times is not None:
        scheduler.set_step_times(torch.tensor(speculative.step_times, dtype=torch.float32).numpy())
    return scheduler
