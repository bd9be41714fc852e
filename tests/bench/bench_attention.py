#!/usr/bin/env python
"""Attention on the host against PyTorch's scaled_dot_product_attention: decoding (contiguous and paged) and prompts.

Every result is checked before it is timed. Calls alternate; keys and values are rotated through more memory than the
caches hold, as the layers of a model would. The time is the median (``--cpu-time``: the lower quartile of the calling
thread's processor time, with one thread, for a machine that others use).

python tests/bench/bench_attention.py [--threads 2] [--rounds 25] [--cpu-time] [--only decode|prefill]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch
import torch_quartz
from torch.nn.functional import scaled_dot_product_attention

HEADS, SIZES, LENGTHS, BATCHES, PROMPTS = ((9, 3), (32, 8)), (64, 128), (256, 1024, 4096), (1, 8), (256, 1024)
ROTATED_BYTES = 120e6
BLOCK = 16


def alternate(calls: dict, rounds: int, cpu_time: bool) -> dict[str, float]:
    """Return seconds a call, by name."""
    clock = time.thread_time if cpu_time else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name, call in calls.items():
            begin = clock()
            call(i)
            times[name].append(clock() - begin)
    pick = (lambda t: sorted(t)[len(t) // 4]) if cpu_time else statistics.median
    return {name: pick(t) for name, t in times.items()}


def reference(q, k, v, causal: bool):
    """Attention in float64 of the first sequence."""
    q, k, v = (t[0].cpu().double() for t in (q, k, v))
    group = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 0)


def check(name: str, got, want, dtype) -> None:
    """Compare with float64."""
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    difference = (got.cpu().double() - want).abs().max().item()
    if not difference < tolerance:
        raise SystemExit(f"{name} is wrong by {difference}")


def decode(batch, heads, kv_heads, size, length, dtype, options) -> None:
    """One token for each sequence."""
    each = batch * kv_heads * length * size * 2 * dtype.itemsize
    sets = max(1, min(16, int(ROTATED_BYTES // each)))
    shape = (batch, kv_heads, length, size)
    keys, values = ([torch.randn(shape).to(dtype) for _ in range(sets)] for _ in range(2))
    q = torch.randn(batch, heads, 1, size).to(dtype)
    ours = [[t.to("quartz") for t in tensors] for tensors in (keys, values)]
    # The same keys in shuffled blocks, one cache for each set.
    blocks = batch * length // BLOCK
    order = torch.randperm(blocks)
    table = order.view(batch, -1).to("quartz", torch.int32)
    paged = []
    for tensors in (keys, values):
        caches = []
        for tensor in tensors:
            rows = tensor.transpose(1, 2).reshape(blocks, BLOCK, kv_heads, size)
            caches.append(torch.empty_like(rows).index_copy_(0, order, rows).to("quartz"))
        paged.append(caches)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="quartz")
    counts = torch.full((batch,), length, dtype=torch.int32, device="quartz")
    on_quartz, rows = q.to("quartz"), q.view(batch, kv_heads, heads // kv_heads, size)
    flat = on_quartz.squeeze(2)
    attend = torch_quartz.ops.paged_attention
    calls = {
        "ours": lambda i: scaled_dot_product_attention(
            on_quartz, ours[0][i % sets], ours[1][i % sets], enable_gqa=True
        ),
        "paged": lambda i: attend(flat, paged[0][i % sets], paged[1][i % sets], table, starts, counts),
        "torch": lambda i: scaled_dot_product_attention(q, keys[i % sets], values[i % sets], enable_gqa=True),
        "rows": lambda i: scaled_dot_product_attention(rows, keys[i % sets], values[i % sets]),
    }
    want = reference(q, keys[0], values[0], False)
    check("sdpa", calls["ours"](0)[0], want, dtype)
    check("paged", calls["paged"](0)[0].unsqueeze(1), want, dtype)
    times = alternate(calls, options.rounds, options.cpu_time)
    label = f"decode {batch} x {length:5}, {heads}/{kv_heads} heads of {size}"
    report(label, dtype, times, ("torch", "rows"), each)


def prefill(batch, heads, kv_heads, size, length, dtype, options) -> None:
    """A causal prompt."""
    q, k, v = (torch.randn(batch, h, length, size).to(dtype) for h in (heads, kv_heads, kv_heads))
    ours = [t.to("quartz") for t in (q, k, v)]
    wide = [t.repeat_interleave(heads // kv_heads, 1) for t in (k, v)]
    calls = {
        "ours": lambda i: scaled_dot_product_attention(*ours, is_causal=True, enable_gqa=True),
        "torch": lambda i: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        "expanded": lambda i: scaled_dot_product_attention(q, *wide, is_causal=True),
    }
    check("sdpa", calls["ours"](0)[0], reference(q, k, v, True), dtype)
    times = alternate(calls, max(5, options.rounds // 3), options.cpu_time)
    label = f"prefill {batch} x {length:4}, {heads}/{kv_heads} heads of {size}"
    report(label, dtype, times, ("torch", "expanded"), None)


RATIOS: dict[str, list[float]] = {}


def report(label: str, dtype, times, peers, bytes_read) -> None:
    """Print a row: our time, and its ratio to each peer's."""
    cells = [f"{times['ours'] * 1e6:9.0f} us"]
    for name in ("ours", "paged"):
        if name in times:
            ratios = [times[name] / times[peer] for peer in peers]
            cells.append(f"{name} " + " ".join(f"{r:.2f} x {p}" for r, p in zip(ratios, peers, strict=True)))
            RATIOS.setdefault(f"{label.split()[0]} {str(dtype)[6:]} {name} / {peers[0]}", []).append(ratios[0])
    if bytes_read:
        cells.append(f"{bytes_read / times['ours'] / 1e9:.1f} GB/s")
    print(f"{label:42} {str(dtype)[6:]:8} " + "   ".join(cells), flush=True)


def main() -> None:
    """Run all shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--only", choices=("decode", "prefill"))
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for heads in HEADS:
            for size in SIZES:
                if options.only != "prefill":
                    for batch in BATCHES:
                        for length in LENGTHS:
                            decode(batch, *heads, size, length, dtype, options)
                if options.only != "decode":
                    for length in PROMPTS:
                        prefill(1, *heads, size, length, dtype, options)
    for name, ratios in RATIOS.items():
        mean = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
        print(f"{name}: geometric mean {mean:.2f}, worst {max(ratios):.2f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
