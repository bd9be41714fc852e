"""The scheduler's host work a step: schedule() and update(), without a model.

Every running request decodes with drafts (0 to all of them accepted, by chance) and prefix caching. Rows of the table:

- `decode`: all requests decode; requests that end are replaced by new ones, which share the beginning of their prompts;
- `adaptive`: the same, with a step-time table and the choice of drafts by it;
- `cold queue`: the first steps of as many requests with long prompts and nothing cached;
- `10,000 queued`: the same as `decode`, with 10,000 requests in the queue behind the running ones;
- `small pool`: so few blocks that requests are preempted all the time.

The step N + 1 is planned before the tokens of N are taken, as in the engine. `arrays` is what reading all arrays of a
plan costs on top.

    python tests/bench/bench_scheduler.py [--requests 256] [--steps 2000] [--drafts 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch_quartz  # noqa: F401, loads the library
from torch_quartz._C import engine

VOCABULARY = 50000
BLOCK = 16
ARRAYS = (
    *("key", "index", "slot", "query_len", "start", "drafts", "samples", "kind", "max_length", "logits_from"),
    *("released", "table_updates", "copies", "swap_out", "swap_in", "state_ops", "new", "forked"),
)


@dataclass
class Times:
    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    arrays: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def line(self, name: str, extra: str) -> str:
        both = [a + b for a, b in zip(self.schedule, self.update, strict=True)]
        ordered = sorted(both)
        return (
            f"| {name} | {statistics.median(both):.0f} | {statistics.median(self.schedule):.0f} |"
            f" {statistics.median(self.update):.0f} | {ordered[int(len(ordered) * 0.99)]:.0f} | {ordered[-1]:.0f} |"
            f" {statistics.median(self.arrays):.0f} | {statistics.median(self.rows):.0f} | {extra} |"
        )


class Load:
    """Requests without end: prompts of 128 to 512 tokens, half of them a common beginning; 256 new tokens."""

    def __init__(self, scheduler: engine.Scheduler, drafts: int, seed: int = 0) -> None:
        self.scheduler, self.drafts = scheduler, drafts
        self.random = np.random.default_rng(seed)
        self.common = self.random.integers(0, VOCABULARY, 512, dtype=np.int32)
        self.key = 0
        self.in_flight: deque[tuple[int, np.ndarray]] = deque()

    def add(self, count: int, shared: bool = True, length: int | None = None) -> None:
        for _ in range(count):
            size = int(self.random.integers(128, 513)) if length is None else length
            prompt = self.random.integers(0, VOCABULARY, size, dtype=np.int32)
            if shared:
                prompt[: size // 2] = self.common[: size // 2]
            output = int(self.random.integers(64, 449))
            self.scheduler.add_request(self.key, prompt, max_tokens=output, stop_ids=[VOCABULARY])
            self.key += 1

    def step(self, times: Times) -> int:
        """Plan a step, take the tokens of the one before; return how many requests ended."""
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        middle = time.perf_counter()
        if plan is not None:
            for name in ARRAYS:
                getattr(plan, name)
            times.arrays.append((time.perf_counter() - middle) * 1e6)
            times.rows.append(plan.num_rows)
            tokens = self.random.integers(0, VOCABULARY, (plan.num_seqs, 1 + self.drafts), dtype=np.int32)
            accepted = self.random.integers(0, plan.drafts + 1)
            tokens[np.arange(1 + self.drafts)[None, :] > accepted[:, None]] = -1
            tokens[plan.samples == 0] = -1
            self.in_flight.append((plan.step_id, tokens))
        ended, spent = 0, 0.0
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            step_id, tokens = self.in_flight.popleft()
            available = np.full(len(tokens), self.drafts, dtype=np.int32)
            start = time.perf_counter()
            output = self.scheduler.update(step_id, tokens, available)
            spent = time.perf_counter() - start
            ended = int(((output.finished == 1) | (output.finished == 2)).sum())
        times.schedule.append((middle - begin) * 1e6)
        times.update.append(spent * 1e6)
        return ended


def scheduler_for(args: argparse.Namespace, *, blocks: int, adaptive: bool = False) -> engine.Scheduler:
    config = engine.SchedulerConfig(
        block_size=BLOCK,
        max_num_seqs=args.requests,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        groups=[engine.GroupSpec("full", num_blocks=blocks)],
        max_drafts=args.drafts,
        adaptive_drafts=adaptive,
    )
    scheduler = engine.Scheduler(config)
    if adaptive:
        rows = np.arange(args.requests * (1 + args.drafts) + 1, dtype=np.float32)
        scheduler.set_step_times((5.0 + 0.004 * rows).tolist())  # ms, a memory-bound model
    return scheduler


def steady(args: argparse.Namespace, *, blocks: int, adaptive: bool = False, queued: int = 0) -> tuple[Times, dict]:
    scheduler = scheduler_for(args, blocks=blocks, adaptive=adaptive)
    load = Load(scheduler, args.drafts)
    load.add(args.requests + queued)
    warm = Times()
    for _ in range(100):
        load.add(load.step(warm))
    times = Times()
    for _ in range(args.steps):
        load.add(load.step(times))
    return times, scheduler.stats()


def cold(args: argparse.Namespace) -> tuple[Times, dict]:
    scheduler = scheduler_for(args, blocks=args.requests * 100)
    load = Load(scheduler, args.drafts)
    load.add(args.requests, shared=False, length=1024)
    times = Times()
    while scheduler.num_waiting > 0:
        load.step(times)
    return times, scheduler.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--drafts", type=int, default=5)
    args = parser.parse_args()
    plenty = args.requests * 100
    cases = {
        "decode": lambda: steady(args, blocks=plenty),
        "adaptive": lambda: steady(args, blocks=plenty, adaptive=True),
        "10,000 queued": lambda: steady(args, blocks=plenty, queued=10_000),
        "small pool": lambda: steady(args, blocks=args.requests * 20),
        "cold queue": lambda: cold(args),
    }
    print(f"{args.requests} requests, {args.drafts} drafts; microseconds a step\n")
    print("| case | median | schedule | update | 99 % | most | arrays | rows | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, run in cases.items():
        times, stats = run()
        extra = f"{stats['preemptions']} preemptions, {stats['prefix_hits'] / max(1, stats['prefix_queries']):.0%} hits"
        print(times.line(name, extra), flush=True)


if __name__ == "__main__":
    main()
