"""quartz::sample against PyTorch's operators (sort, softmax, multinomial) and, where it is installed, FlashInfer.

The calls of a row alternate within one process; the table has the median of our time and of its ratio to each peer.
Before it is timed, every case is checked: the tokens must be among those that the truncation leaves, by float64.

    python tests/bench/bench_sample.py [--rows 1 8 64 256] [--vocabulary 151936] [--rounds 20]
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch_quartz  # noqa: F401, registers the device
from torch import Tensor
from torch_quartz import ops

CASES: dict[str, dict[str, float]] = {
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "no truncation": {},
    "greedy": {"temperature": 0.0},
}


def with_torch(logits: Tensor, rules: dict[str, float]) -> Tensor:
    """Return a token a row as the logits processors of Transformers and torch.multinomial would draw it."""
    if "temperature" in rules:
        return logits.argmax(-1)
    if "top_k" in rules:
        logits = logits.masked_fill(logits < logits.topk(int(rules["top_k"])).values[:, -1:], -math.inf)
    if "top_p" in rules:
        ordered, order = logits.sort(descending=False)
        removed = ordered.softmax(-1).cumsum(-1) <= 1 - rules["top_p"]
        removed[:, -1] = False
        logits = logits.masked_fill(removed.scatter(1, order, removed), -math.inf)
    p = logits.softmax(-1)
    if "min_p" in rules:
        p = p * (p >= rules["min_p"] * p.amax(-1, keepdim=True))
    return torch.multinomial(p, 1)[:, 0]


def with_flashinfer(logits: Tensor, rules: dict[str, float]) -> Tensor | None:
    """Return a token a row from FlashInfer (a CUDA tensor), None for what it has no operator for."""
    sampling = importlib.import_module("flashinfer.sampling")
    if "top_k" in rules:
        return sampling.top_k_top_p_sampling_from_logits(logits, int(rules["top_k"]), rules["top_p"])
    if "top_p" in rules:
        return sampling.top_p_sampling_from_probs(torch.softmax(logits, -1), rules["top_p"])
    if "min_p" in rules:
        return sampling.min_p_sampling_from_probs(torch.softmax(logits, -1), rules["min_p"])
    return None if rules else sampling.sampling_from_logits(logits)


def allowed(logits: Tensor, rules: dict[str, float]) -> Tensor:
    """Return which tokens are left, in float64, with a margin for rounding at the limits."""
    wide = logits.cpu().double()
    p = wide.softmax(-1)
    if "temperature" in rules:
        return wide == wide.amax(-1, keepdim=True)
    left = torch.ones_like(p, dtype=torch.bool)
    if "min_p" in rules:
        left &= p >= rules["min_p"] * p.amax(-1, keepdim=True) * (1 - 1e-5)
    if "top_k" in rules:
        left &= wide >= wide.topk(int(rules["top_k"])).values[:, -1:]
        p = (p * left) / (p * left).sum(-1, keepdim=True)
    if "top_p" in rules:
        ordered, order = p.sort(descending=True)
        kept = ordered.cumsum(-1) - ordered < rules["top_p"] + 1e-5
        left &= torch.zeros_like(left).scatter(1, order, kept)
    return left


def microseconds(call: Callable[[], object]) -> float:
    """Return the time of one call with the device idle before and after."""
    torch.accelerator.synchronize()
    start = time.perf_counter()
    call()
    torch.accelerator.synchronize()
    return (time.perf_counter() - start) * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    native = torch.quartz.native_device(0)
    peers: dict[str, Callable[[Tensor, dict[str, float]], Tensor | None]] = {"torch": with_torch}
    if native.type == "cuda" and importlib.util.find_spec("flashinfer"):
        peers["flashinfer"] = with_flashinfer
    print(f"torch {torch.__version__}, {native}, vocabulary {options.vocabulary}, {torch.get_num_threads()} threads")
    print(f"{'case':24} {'rows':>5} {'us':>10}" + "".join(f" {'/ ' + name:>12}" for name in peers))
    for case, rules in CASES.items():
        for rows in options.rows:
            generator = torch.Generator().manual_seed(rows)
            logits = (torch.randn(rows, options.vocabulary, generator=generator) * 4).to(native)
            ours = logits.to("quartz")
            arguments = {
                name: torch.full(
                    (rows,), value, device="quartz", dtype=torch.int64 if name == "top_k" else torch.float32
                )
                for name, value in rules.items()
            }
            arguments["seeds"] = torch.arange(rows, device="quartz")

            def quartz_call(ours: Tensor = ours, arguments: dict[str, Tensor] = arguments) -> Tensor:
                return ops.sample(ours, **arguments, logprobs=False).tokens

            assert allowed(logits, rules).gather(1, quartz_call().cpu()[:, None]).all(), "a token that is not left"
            times: dict[str, list[float]] = {"quartz": []}
            for _ in range(options.rounds + 2):
                times["quartz"].append(microseconds(quartz_call))
                for name, peer in peers.items():
                    times.setdefault(name, []).append(microseconds(lambda p=peer, x=logits, r=rules: p(x, r)))
            medians = {name: statistics.median(values[2:]) for name, values in times.items()}
            ratios = "".join(f" {medians['quartz'] / medians[name]:12.3f}" for name in peers)
            print(f"{case:24} {rows:5} {medians['quartz']:10.1f}{ratios}", flush=True)


if __name__ == "__main__":
    main()
