"""What one operator call costs on quartz beyond the native device, in nanoseconds of CPU time per call.

Native ("cpu" or "cuda", by substrate) and quartz calls alternate within one process, so that a change of clock speed
meets both. The clock is the CPU time of the calling thread, so that other programs on the machine do not count; the
loops are short, so that most of them run undisturbed. On the cuda substrate this is the cost of the launch: the queue
is emptied between the loops.

    python tests/bench/bench_dispatch.py [--calls 200] [--rounds 200]
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from typing import Any

import torch
import torch_quartz

# name: (statement, whether gradients are recorded)
CASES = {
    "add": ("torch.add(a, b)", False),
    "add_": ("a.add_(b)", False),
    "add, out=": ("torch.add(a, b, out=c)", False),
    "add, grad mode": ("torch.add(g, b)", True),
    "mul by a number": ("a * 2.0", False),
    "view": ("m.view(16)", False),
    "slice": ("m[1:3]", False),
    "transpose": ("m.t()", False),
    "cat of 4": ("torch.cat(four)", False),
    "_foreach_add of 4": ("torch._foreach_add(four, 1.0)", False),
    "_foreach_add_ of 4": ("torch._foreach_add_(four, 1.0)", False),
    "empty": ("torch.empty(1, device=device)", False),
    "copy_": ("a.copy_(b)", False),
    "item": ("a.item()", False),
    "sum": ("m.sum()", False),
    "softmax": ("torch.softmax(m, -1)", False),
    "mm 4x4": ("torch.mm(m, m)", False),
    "linear 4x4": ("torch.nn.functional.linear(m, m)", False),
    "embedding": ("torch.nn.functional.embedding(i, m)", False),
    "index_select": ("torch.index_select(m, 0, i)", False),
}


def timers(device: str) -> dict[str, timeit.Timer]:
    """Return one timer per case with tensors on the device."""
    names: dict[str, Any] = {
        "torch": torch,
        "device": torch.device(device),
        "a": torch.ones(1, device=device),
        "b": torch.zeros(1, device=device),
        "c": torch.zeros(1, device=device),
        "g": torch.ones(1, device=device, requires_grad=True),
        "m": torch.eye(4, device=device),
        "i": torch.tensor([0, 3], device=device),
        "four": [torch.ones(1, device=device) for _ in range(4)],
    }
    return {
        case: timeit.Timer(statement, globals=names, timer=time.thread_time) for case, (statement, _) in CASES.items()
    }


def measure(native: str, calls: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return nanoseconds per call of each round: ``{case: {"native": [...], "quartz": [...]}}``."""
    sides = {"native": timers(native), "quartz": timers("quartz")}
    times: dict[str, dict[str, list[float]]] = {case: {"native": [], "quartz": []} for case in CASES}
    for _ in range(rounds + 1):  # the first round warms up
        for case, (_, recorded) in CASES.items():
            for side, timer in sides.items():
                with torch.set_grad_enabled(recorded):
                    seconds = timer[case].timeit(calls)
                torch.accelerator.synchronize()
                times[case][side].append(seconds / calls * 1e9)
    return {case: {side: values[1:] for side, values in row.items()} for case, row in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200, help="calls in one timed loop")
    parser.add_argument("--rounds", type=int, default=200, help="timed loops of each case and device")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    native = "cpu" if torch.quartz.substrate() == "host" else "cuda"
    times = measure(native, arguments.calls, arguments.rounds)
    print(
        f"torch {torch.__version__}, torch-quartz {torch_quartz.__version__}, {torch.quartz.get_device_name()}, "
        f"native device {native}, {arguments.rounds} rounds of {arguments.calls} calls\n"
    )
    print(f"| call | {native} ns, best | quartz ns, best | difference, best | difference, median |")
    print("|---|---:|---:|---:|---:|")
    for case, row in times.items():
        best = {side: min(values) for side, values in row.items()}
        median = {side: statistics.median(values) for side, values in row.items()}
        differences = [value["quartz"] - value["native"] for value in (best, median)]
        print(
            f"| {case} | {best['native']:.0f} | {best['quartz']:.0f} | {differences[0]:+.0f} | {differences[1]:+.0f} |"
        )


if __name__ == "__main__":
    main()
