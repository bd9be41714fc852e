#!/usr/bin/env python
"""Products of the host substrate against torch on the CPU (MKL, oneDNN): our time divided by theirs.

The shapes are those of the prototype: projections of a small model (576, 1536, a vocabulary of 49152) and of a larger
one (2048, 8192). Weights rotate through 120 MB, so that they come from memory as in a model. The two are timed in turn,
several rounds; the ratio is that of the best times of each, since other processes only add. Results are checked first.

Examples
--------
python tests/bench/bench_matmul.py                     (all: several minutes)
python tests/bench/bench_matmul.py --rows 1 8 --dtypes bfloat16 --rounds 9
python tests/bench/bench_matmul.py --layout kn         (weights stored as k x n)
python tests/bench/bench_matmul.py --threads 1 --cpu-time   (on a busy machine: one thread, its processor time)
"""

import argparse
import math
import os
import time

for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE"):
    os.environ.pop(name, None)  # nothing may hold the peer back

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torch_quartz  # noqa: E402, F401

SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576), (2048, 2048), (8192, 2048), (2048, 8192)]


def interleaved(calls, rounds, clock, seconds):
    """Return the best time of one call of each, timed in turn."""
    repeats, best = [], [math.inf] * len(calls)
    for call in calls:
        call()
        start = clock()
        call()
        repeats.append(max(1, min(2000, int(seconds / max(clock() - start, 1e-7)))))
    for turn in range(rounds):
        for i in range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls))):
            calls[i]()
            start = clock()
            for _ in range(repeats[i]):
                calls[i]()
            best[i] = min(best[i], (clock() - start) / repeats[i])
    return best


def rotating(x, weights):
    turn = iter(range(1 << 62))
    return lambda: F.linear(x, weights[next(turn) % len(weights)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 256, 1024])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--shapes", type=int, nargs="+", default=range(len(SHAPES)), help="numbers of the list of shapes"
    )
    parser.add_argument("--layout", choices=("nk", "kn"), default="nk")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.01, help="of one timing")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time of the calling thread; needs --threads 1"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    print(
        f"torch {torch.__version__}, {options.threads} threads, weights {options.layout}, "
        f"{torch.quartz.get_device_name()}"
    )
    for dtype in (getattr(torch, name) for name in options.dtypes):
        for rows in options.rows:
            ratios = []
            for n, k in (SHAPES[i] for i in options.shapes):
                size = n * k * dtype.itemsize
                weights = [(torch.randn(n, k) / k**0.5).to(dtype) for _ in range(max(1, int(1.2e8 // size)))]
                if options.layout == "kn":
                    weights = [w.t().contiguous().t() for w in weights]
                x = torch.randn(rows, k).to(dtype)
                ours, theirs = rotating(x.to("quartz"), [w.to("quartz") for w in weights]), rotating(x, weights)
                with torch.inference_mode():
                    torch.testing.assert_close(ours().cpu(), theirs(), rtol=2e-2, atol=2e-2)
                    mine, peer = interleaved([ours, theirs], options.rounds, clock, options.seconds)
                ratios.append(mine / peer)
                print(
                    f"{str(dtype)[6:]} M={rows} N={n} K={k}: {mine * 1e6:.0f} us, torch {peer * 1e6:.0f} us, "
                    f"{size / mine / 1e9:.1f} GB/s, {2e-9 * rows * n * k / mine:.0f} GFLOP/s, ratio {mine / peer:.2f}",
                    flush=True,
                )
            mean = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
            print(f"{str(dtype)[6:]} M={rows}: geometric mean {mean:.2f}, worst {max(ratios):.2f}", flush=True)


if __name__ == "__main__":
    main()
