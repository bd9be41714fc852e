#!/usr/bin/env python
"""Conformance sweep: PyTorch's own operator, module and optimizer databases against the quartz device.

Every variant (entry x dtype x check) runs twice: on the plain native device in a process that never imports
torch_quartz, and on quartz in another process. What differs is a failure; what plain PyTorch cannot do either has no
reference and is not counted. Processes that crash or hang are charged to the check they were in, and the sweep goes on.

Examples
--------
python tests/upstream/conformance.py --out build/conformance              (the whole sweep)
python tests/upstream/conformance.py --profile slice                      (what CI runs)
python tests/upstream/conformance.py --ops '^add$' --checks forward,out   (some checks of one operator)
python tests/upstream/conformance.py --substrate cuda --jobs 8 --slice 1/3 --deadline 540 --out out1
python tests/upstream/conformance.py --merge out1 out2 out3 --update docs/conformance.md   (joins slices)
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # this process only reads PyTorch's databases

from harness import report
from harness.exclusions import excluded
from harness.shard import Shard
from harness.target import provide_expecttest, python_path

# What the slice of CI covers: every check of every entry, with the first dtype of this list that the entry has.
SLICE_DTYPES = ("float32", "int64", "complex64", "bool")
SLICE_SAMPLES = 2
_GRACE_SECONDS = 20  # after the deadline, for the variants that have been started


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--substrate", choices=("auto", "host", "cuda"), default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="pairs of processes (default 1)")
    parser.add_argument("--slice", default="1/1", metavar="K/N", help="every N-th variant, starting with the K-th")
    parser.add_argument("--profile", choices=("full", "slice"), default="full")
    parser.add_argument("--databases", default="", help="comma-separated (default all)")
    parser.add_argument("--ops", default="", help="regular expression searched in entry names")
    parser.add_argument("--dtypes", default="", help="comma-separated (default all)")
    parser.add_argument("--checks", "--kinds", default="", help="comma-separated (default all)")
    parser.add_argument("--samples", type=int, default=6, help="samples a check takes at most (default 6)")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds after which a check hangs")
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds after which no variant is started")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="folder for conformance.json and .md")
    parser.add_argument("--update", type=pathlib.Path, help="Markdown document whose section of this sweep is replaced")
    parser.add_argument("--control", action="store_true", help="plain PyTorch in the place of quartz")
    parser.add_argument("--show-no-reference", action="store_true", help="say why plain PyTorch fails")
    parser.add_argument("--merge", type=pathlib.Path, nargs="+", help="join the results in these folders")
    return parser.parse_args(arguments)


def substrate_of(choice: str) -> str:
    """Resolve ``auto`` in a process of its own, because this one must not import torch_quartz."""
    if choice != "auto":
        return choice
    code = "import torch_quartz; print(torch_quartz._C.substrate())"
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


def requests_of(options: argparse.Namespace, substrate: str) -> list[dict]:
    """The variants to run, in a fixed order."""
    from harness.databases import SWEPT, variants

    names = options.databases.split(",") if options.databases else SWEPT
    dtypes, checks = (set(filter(None, text.split(","))) for text in (options.dtypes, options.checks))
    chosen = []
    for database in names:
        taken: set[str] = set()
        found = [v for v in variants(database, substrate) if re.search(options.ops, v.name)]
        if options.profile == "slice":
            rank = {dtype: number for number, dtype in enumerate(SLICE_DTYPES)}
            found.sort(key=lambda v: rank.get(v.dtype, len(rank)))
        for variant in found:
            if dtypes and variant.dtype not in dtypes:
                continue
            kept = [check for check in variant.checks if not checks or check in checks]
            if options.profile == "slice":
                kept = kept if variant.name not in taken else []
            if kept:
                taken.add(variant.name)
                chosen.append({"database": database, "name": variant.name, "dtype": variant.dtype, "checks": kept})
    first, every = (int(part) for part in options.slice.split("/"))
    chosen = chosen[first - 1 :: every]
    samples = SLICE_SAMPLES if options.profile == "slice" else options.samples
    return [{"id": number, "samples": samples, **request} for number, request in enumerate(chosen)]


class Sweep:
    """Hands requests to shards and keeps their results."""

    def __init__(self, requests: list[dict], deadline: float, substrate: str) -> None:
        self.results: list[dict] = []
        self._lock = threading.RLock()
        self._closed = False
        self._open: set[tuple[int, str]] = set()
        self._started = time.monotonic()
        self._deadline = deadline
        self._queue = []
        for request in requests:
            checks = []
            for check in request["checks"]:
                cause = excluded(request["database"], request["name"], request["dtype"], check, substrate)
                if cause:
                    self.report(request, check, {"status": "skipped", "message": cause})
                else:
                    checks.append(check)
            if checks:
                self._queue.append({**request, "checks": checks})
        self._queue.reverse()
        self._open = {(request["id"], check) for request in self._queue for check in request["checks"]}
        self._count = len(self._queue)
        self._told = self._started

    def take(self) -> dict | None:
        """The next request; None when there are none left or the time is up."""
        with self._lock:
            now = time.monotonic()
            if now - self._told > 60:
                self._told = now
                bad = len(report.bad(self.results))
                print(f"{now - self._started:5.0f} s: {len(self._queue)} of {self._count} left, {bad} bad", flush=True)
            if self._closed or self.overdue(0):
                return None
            return self._queue.pop() if self._queue else None

    def overdue(self, grace: float) -> bool:
        """Whether the deadline has passed by more than `grace` seconds."""
        return bool(self._deadline) and time.monotonic() - self._started > self._deadline + grace

    def report(self, request: dict, check: str, result: dict) -> None:
        """Keep one result; a check that has no sample at all does not apply and is dropped."""
        with self._lock:
            if self._closed:
                return
            self._open.discard((request["id"], check))
        if result["status"] == "no_reference" and not result.get("without_reference") and not result.get("message"):
            return
        kept = {key: value for key, value in result.items() if value or key == "status"}
        if result["status"] in report.BAD:
            print(report.line({**request, "check": check, **result}), flush=True)
        with self._lock:
            self.results.append(
                {"database": request["database"], "name": request["name"], "dtype": request["dtype"], "check": check}
                | kept
            )

    def finish(self, requests: list[dict]) -> None:
        """Count what was not reached as skipped and take no more results."""
        for request in requests:
            for check in request["checks"]:
                if (request["id"], check) in self._open:
                    self.report(request, check, {"status": "skipped", "message": "not reached in the time given"})
        self._closed = True


def command_line(arguments: list[str]) -> str:
    """The command for the report, without the folders of whoever ran it."""
    kept = list(arguments)
    for option in ("--out", "--update"):
        if option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
    return shlex.join(["python", "tests/upstream/conformance.py", *kept])


def run(options: argparse.Namespace) -> tuple[dict, list[dict], list[str]]:
    """Run a sweep; returns (facts about the run, results, problems of the harness)."""
    import torch

    substrate = substrate_of(options.substrate)
    started = time.monotonic()
    requests = requests_of(options, substrate)
    sweep = Sweep(requests, options.deadline, substrate)
    role = "control" if options.control else "quartz"
    shards = [Shard(role, substrate, sweep.take, sweep.report, options.patience) for _ in range(options.jobs)]
    for shard in shards:
        shard.start()
    try:
        while any(shard.is_alive() for shard in shards) and not sweep.overdue(_GRACE_SECONDS):
            time.sleep(0.2)
    except KeyboardInterrupt:
        print("interrupted: what was not reached counts as skipped")
    sweep.finish(requests)
    for shard in shards:
        shard.abandon()
    meta = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "substrate": substrate + (" (control: plain PyTorch on both sides)" if options.control else ""),
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name() if substrate == "cuda" else platform.machine(),
        "command": command_line(sys.argv[1:]),
        "jobs": options.jobs,
        "seconds": time.monotonic() - started,
        "restarts": sum(shard.restarts for shard in shards),
    }
    problems = [shard.failure for shard in shards if shard.failure]
    problems += [f"a worker ended with status {status}" for shard in shards for status in shard.bad_exits]
    return meta, sweep.results, problems


def main(arguments: list[str] | None = None) -> int:
    """Run or merge, print the counts, write the files; returns the exit status (0: nothing failed)."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    provide_expecttest()
    meta, results, problems = (*report.merge(options.merge), []) if options.merge else run(options)
    for result in report.bad(results) if options.merge else ():  # a run has printed them as they came
        print(report.line(result))
    if options.show_no_reference:
        for result in results:
            if result["status"] == "no_reference":
                print(report.line(result))
    for problem in problems:
        print(f"PROBLEM {problem}")
    summary = report.tally(results)
    for database, checks in summary["checks"].items():
        for check, counter in checks.items():
            print(f"{database:11} {check:23} " + " ".join(f"{k}={v}" for k, v in sorted(counter.items())))
        found = summary["entries"].get(database, {"all pass": 0, "of": 0})
        print(f"{database:11} entries of which everything passes: {found['all pass']} of {found['of']}")
    print(f"{meta['substrate']}, torch {meta['torch']}, {meta['seconds']:.0f} s: {report.one_line(summary)}")
    if options.out:
        report.write(options.out, meta, results)
    if options.update:
        report.update_document(options.update, meta, results)
    return 1 if report.bad(results) or problems or not results else 0


if __name__ == "__main__":
    sys.exit(main())
