"""Runs pairs of worker processes, feeds them variants and survives their crashes and hangs."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import typing
from collections.abc import Callable

from .target import python_path
from .worker import SICK_DEVICE

_AHEAD = 3  # variants the reference may be ahead of the other side
_PIPE_BYTES = 1 << 20
_START_SECONDS = 300
_STOP_SECONDS = 60


class Pair:
    """A reference process and the process under test, joined by a pipe."""

    def __init__(self, role: str, substrate: str) -> None:
        read_end, write_end = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.logs: dict[str, typing.IO] = {}
        self.reference = self._start("reference", substrate, write_end, subprocess.DEVNULL)
        self.tested = self._start(role, substrate, read_end, subprocess.PIPE)
        os.close(read_end)
        os.close(write_end)
        self.lines: queue.Queue[list | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _start(self, role: str, substrate: str, pipe: int, output: int) -> subprocess.Popen:
        settings = {
            "PYTHONPATH": python_path(),
            "PYTHONHASHSEED": "0",  # samples that iterate over sets come in the same order on both sides
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # the reference must not load torch_quartz
            "CONFORMANCE_PIPE": str(pipe),
        }
        self.logs[role] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the pair)
        return subprocess.Popen(
            [sys.executable, "-m", "harness.worker", role, substrate],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=self.logs[role],
            env={**os.environ, **settings},
            pass_fds=(pipe,),
            text=True,
            bufsize=1,
        )

    def _read(self) -> None:
        for line in self.tested.stdout:
            self.lines.put(json.loads(line))
        self.lines.put(None)

    def send(self, request: dict) -> None:
        """Hand a variant to both processes; a process that is gone is noticed when its results are missed."""
        for process in (self.reference, self.tested):
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request) + "\n")

    def read(self, seconds: float) -> list | None:
        """The next line of the process under test, or None when it has ended; raises ``queue.Empty`` in time."""
        return self.lines.get(timeout=seconds)

    def stop(self) -> list[int]:
        """Let both processes end; returns the exit statuses that are not zero."""
        statuses = []
        for process in (self.reference, self.tested):
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in (self.reference, self.tested):
            try:
                statuses.append(process.wait(_STOP_SECONDS))
            except subprocess.TimeoutExpired:
                statuses.append(-signal.SIGKILL)
        self.kill()
        return [status for status in statuses if status]

    def kill(self) -> None:
        """End both processes; SIGABRT makes Python write a traceback to the log first."""
        for process in (self.tested, self.reference):
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def is_stopped(self) -> bool:
        """Whether somebody has stopped a process with a signal: that is no hang."""
        with contextlib.suppress(OSError):
            for process in (self.reference, self.tested):
                with open(f"/proc/{process.pid}/stat") as file:
                    if file.read().rpartition(")")[2].split()[0] == "T":
                        return True
        return False

    def last_words(self, role: str) -> str:
        """What a process wrote to standard error at its end, from Python's own report of a fatal error on."""
        log = self.logs[role].fileno()
        size = os.fstat(log).st_size
        text = os.pread(log, 8000, max(0, size - 8000)).decode(errors="replace")
        text = text.partition("\nExtension modules:")[0]
        before, found, after = text.partition("Fatal Python error")
        return f"{before[-200:]}{found}{after[:600]}" if found else text[-600:]


class Shard(threading.Thread):
    """Takes variants until there are none and reports one result for each check.

    Parameters
    ----------
    role, substrate
        See :class:`harness.target.Target`.
    take
        Gives the next request or None.
    report
        Called with (request, check, result).
    patience
        Seconds without progress after which a process counts as hanging.
    """

    def __init__(
        self,
        role: str,
        substrate: str,
        take: Callable[[], dict | None],
        report: Callable[[dict, str, dict], None],
        patience: float,
    ) -> None:
        super().__init__(daemon=True)
        self.role, self.substrate = role, substrate
        self.take, self.report, self.patience = take, report, patience
        self.bad_exits: list[int] = []
        self.failure: str | None = None
        self.restarts = 0
        self._pending: collections.deque[dict] = collections.deque()
        self._unexplained: tuple | None = None
        self._pair: Pair | None = None

    def abandon(self) -> None:
        """End the processes of a shard that has not finished."""
        self.take = lambda: None
        if self.is_alive() and self._pair:
            self._pair.kill()

    def run(self) -> None:
        pair = None
        try:
            while True:
                pair = self._pair = pair or self._start()
                self._fill(pair)
                if not self._pending:
                    self.bad_exits += pair.stop()
                    return
                if not self._serve(pair):
                    self.restarts += 1
                    pair = None
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _start(self) -> Pair:
        pair = Pair(self.role, self.substrate)
        try:
            ready = pair.read(_START_SECONDS)
        except queue.Empty:
            ready = None
        if not ready:
            pair.kill()
            words = "\n".join(pair.last_words(role) for role in ("reference", self.role))
            raise RuntimeError(f"the workers did not start:\n{words}")
        for request in self._pending:
            pair.send(request)
        return pair

    def _fill(self, pair: Pair) -> None:
        while len(self._pending) < _AHEAD and (request := self.take()):
            self._pending.append(request)
            pair.send(request)

    def _serve(self, pair: Pair) -> bool:
        """Read until one variant is done; False when the pair has ended."""
        request = self._pending[0]
        phase, check = "waiting", request["checks"][0] if request["checks"] else ""
        while True:
            try:
                line = pair.read(self.patience)
            except queue.Empty:
                if pair.is_stopped():
                    continue
                self._blame(request, check, phase, "hang", pair)
                return False
            if line is None or line[0] == "reference lost":
                phase = "waiting" if line else phase
                self._blame(request, check, phase, "crash", pair)
                return False
            if line[0] == "result":
                self.report(request, line[2], line[3])
                request["checks"].remove(line[2])
            elif line[0] == "done":
                self._pending.popleft()
                return True
            else:
                phase, check = line[0], line[2]

    def _blame(self, request: dict, check: str, phase: str, what: str, pair: Pair) -> None:
        """Charge the end of a pair to a check, unless a broken CUDA context was the reason."""
        pair.kill()
        role, guilty = ("reference", pair.reference) if phase == "waiting" else (self.role, pair.tested)
        place = (request["id"], check, phase)
        if SICK_DEVICE in (pair.tested.returncode, pair.reference.returncode) and place != self._unexplained:
            self._unexplained = place
        elif check in request["checks"]:
            message = f"exit status {guilty.returncode}: {pair.last_words(role)}"
            status = what if phase == "running" else "no_reference"
            self.report(request, check, {"status": status, "message": message})
            request["checks"].remove(check)
        if not request["checks"]:
            self._pending.popleft()
