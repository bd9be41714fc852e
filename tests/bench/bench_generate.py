"""``generate()`` at batch 1: tokens per second on quartz and on the native device, and their ratio.

Llama-type models with random weights, one of a single layer (where the cost of calls outweighs the arithmetic) and
one of 48. Both devices hold the same weights; the tokens are compared before anything is timed, and runs alternate.
With one thread on the host the clock is the CPU time of the thread, so that other programs on the machine do not count;
otherwise it is the wall clock.

    python tests/bench/bench_generate.py [--hidden 576] [--new-tokens 32] [--rounds 7] [--dtype float32]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch_quartz
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = (1, 48)
HEAD = 64


def make(layers: int, hidden: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a random Llama in the proportions of small chat models."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=max(1, hidden // HEAD // 3),
        head_dim=HEAD,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).eval()


def run(model: LlamaForCausalLM, new_tokens: int) -> tuple[torch.Tensor, float]:
    """Return the generated tokens and the seconds it took."""
    one_thread = torch.quartz.substrate() == "host" and torch.get_num_threads() == 1
    clock = time.thread_time if one_thread else time.perf_counter
    inputs = torch.arange(3, 19, device=model.device)[None]
    start = clock()
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, do_sample=False
    ).cpu()
    return output, clock() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=576, help="width of the models, a multiple of 64")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native = "cpu" if torch.quartz.substrate() == "host" else "cuda"
    print(
        f"torch {torch.__version__}, torch-quartz {torch_quartz.__version__}, {torch.quartz.get_device_name()}, "
        f"hidden {arguments.hidden}, {arguments.dtype}, {arguments.new_tokens} tokens, batch 1, "
        f"{arguments.threads} threads, {arguments.rounds} rounds\n"
    )
    print(f"| layers | {native} tokens/s, best | quartz tokens/s, best | ratio, best | ratio, median |")
    print("|---:|---:|---:|---:|---:|")
    for layers in LAYERS:
        model = make(layers, arguments.hidden, getattr(torch, arguments.dtype))
        sides = {"native": make(layers, arguments.hidden, getattr(torch, arguments.dtype)).to(native)}
        sides["quartz"] = model.to("quartz")
        first = {side: run(model, arguments.new_tokens)[0] for side, model in sides.items()}
        if not torch.equal(first["native"], first["quartz"]):
            raise SystemExit(f"{layers} layers: the tokens differ, so there is nothing to compare")
        seconds: dict[str, list[float]] = {"native": [], "quartz": []}
        for _ in range(arguments.rounds):
            for side, model in sides.items():
                seconds[side].append(run(model, arguments.new_tokens)[1])
        speed = {side: arguments.new_tokens / min(values) for side, values in seconds.items()}
        ratios = [theirs / ours for theirs, ours in zip(seconds["native"], seconds["quartz"], strict=True)]
        print(
            f"| {layers} | {speed['native']:.1f} | {speed['quartz']:.1f} | {speed['quartz'] / speed['native']:.3f} | "
            f"{statistics.median(ratios):.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
