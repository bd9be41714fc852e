"""Times and counts of requests and of the engine, as Python objects and as Prometheus text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass
class RequestMetrics:
    """What one request waited for and used; times are of `time.monotonic`, in seconds, 0 where not reached.

    Attributes
    ----------
    arrival_time, first_scheduled_time, first_token_time, last_token_time, finished_time : float
        When the request was added, got a slot, had its first and its latest token, and finished.
    num_prompt_tokens, num_generated_tokens : int
        Tokens of the prompt, and of all samples together.
    num_cached_tokens : int
        Tokens of the prompt that the prefix cache had.
    num_drafted_tokens, num_accepted_tokens : int
        Drafts that were verified, and those that were right.
    """

    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    finished_time: float = 0.0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step; None before it."""
        return self.first_scheduled_time - self.arrival_time if self.first_scheduled_time else None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token (TTFT); None before it."""
        return self.first_token_time - self.arrival_time if self.first_token_time else None

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds from one token to the next (TPOT); None with fewer than two tokens."""
        if self.num_generated_tokens < 2 or not self.first_token_time:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_generated_tokens - 1)

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to the end; None before it."""
        return self.finished_time - self.arrival_time if self.finished_time else None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the verified drafts that were right; None without drafts."""
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else None


# Upper bounds of the histograms, seconds: from a step of a small model to a request that waited for minutes.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TIMES = {
    "queue_time": "Seconds from arrival to the first step",
    "time_to_first_token": "Seconds from arrival to the first token",
    "time_per_output_token": "Mean seconds from one token of a request to the next",
    "e2e_latency": "Seconds from arrival to the end of a request",
}


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS) + 1)  # the last one is of what lies above all bounds
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[next((i for i, bound in enumerate(_BUCKETS) if value <= bound), len(_BUCKETS))] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Mean of the values; None without any."""
        return self.sum / self.count if self.count else None


class EngineMetrics:
    """Counters of an engine since its start; `LLMEngine.metrics` adds what the scheduler knows.

    Attributes
    ----------
    counters : dict of str to int
        By name; `COUNTERS` says what each counts.
    times : dict of str to Histogram
        Of finished requests, by the property of `RequestMetrics`.
    last_error : str or None
        The latest exception inside a step.
    """

    COUNTERS: ClassVar[dict[str, str]] = {
        "requests": "Requests added",
        "finished_requests": "Requests that ended with a stop or their length",
        "aborted_requests": "Requests aborted by the caller",
        "failed_requests": "Requests that ended with an error",
        "steps": "Steps launched",
        "failed_steps": "Steps that ended with an exception",
        "prompt_tokens": "Tokens of prompts of requests that started",
        "cached_tokens": "Tokens of prompts that the prefix cache had",
        "generated_tokens": "Tokens generated",
        "verified_tokens": "Drafts verified",
        "accepted_tokens": "Drafts that were right",
    }

    def __init__(self) -> None:
        self.counters = dict.fromkeys(self.COUNTERS, 0)
        self.times = {name: Histogram() for name in _TIMES}
        self.last_error: str | None = None
        self._start = time.monotonic()
        self._busy = 0.0  # seconds inside steps: rates are of these, not of the time without requests

    def add_step(self, seconds: float) -> None:
        """Count the time of a step."""
        self._busy += seconds

    def add_finished(self, request: RequestMetrics, reason: str) -> None:
        """Count a request that ended."""
        kind = {"abort": "aborted_requests", "error": "failed_requests"}.get(reason, "finished_requests")
        self.counters[kind] += 1
        for name, histogram in self.times.items():
            value = getattr(request, name)
            if value is not None and kind == "finished_requests":
                histogram.add(value)

    def as_dict(self, scheduler: dict[str, Any]) -> dict[str, Any]:
        """Return everything as one flat dict of numbers (and `last_error`)."""
        counters = self.counters
        rows: dict[str, Any] = dict(counters)
        rows["acceptance_rate"] = _ratio(counters["accepted_tokens"], counters["verified_tokens"])
        rows["prompt_tokens_per_second"] = _ratio(counters["prompt_tokens"], self._busy)
        rows["generated_tokens_per_second"] = _ratio(counters["generated_tokens"], self._busy)
        rows["busy_seconds"] = self._busy
        rows["uptime_seconds"] = time.monotonic() - self._start
        for name, histogram in self.times.items():
            rows[f"mean_{name}"] = histogram.mean
        rows["last_error"] = self.last_error
        return {**scheduler, **rows}

    def prometheus(self, scheduler: dict[str, Any], gauges: dict[str, str]) -> str:
        """Return everything in Prometheus' text format.

        Parameters
        ----------
        scheduler : dict
            What the scheduler knows: those named by `gauges` become gauges, other numbers counters.
        gauges : dict of str to str
            Name and help of values that go up and down.

        Raises
        ------
        ImportError
            Without the package prometheus-client.
        """
        try:
            from prometheus_client import CollectorRegistry, generate_latest
        except ImportError as error:
            raise ImportError("Prometheus text needs one more package: pip install prometheus-client") from error
        registry = CollectorRegistry()
        registry.register(_Collector(self, scheduler, gauges))
        return generate_latest(registry).decode()


class _Collector:
    def __init__(self, metrics: EngineMetrics, scheduler: dict[str, Any], gauges: dict[str, str]):
        self._metrics, self._scheduler, self._gauges = metrics, scheduler, gauges

    def collect(self):
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, text in EngineMetrics.COUNTERS.items():
            yield CounterMetricFamily(f"torch_quartz_{name}", text, value=self._metrics.counters[name])
        for name, value in self._scheduler.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if name in self._gauges:
                yield GaugeMetricFamily(f"torch_quartz_{name}", self._gauges[name], value=value)
            elif name not in EngineMetrics.COUNTERS:
                yield CounterMetricFamily(f"torch_quartz_{name}", name.replace("_", " "), value=value)
        for name, text in _TIMES.items():
            histogram = self._metrics.times[name]
            total, buckets = 0, []
            for bound, count in zip([*map(str, _BUCKETS), "+Inf"], histogram.counts, strict=True):
                total += count
                buckets.append((bound, total))
            yield HistogramMetricFamily(f"torch_quartz_{name}_seconds", text, buckets=buckets, sum_value=histogram.sum)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
