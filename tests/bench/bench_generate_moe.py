"""``generate()`` of a mixture of experts: tokens per second on quartz and on plain "cuda", each in its own process.

The model has the shape of Qwen3-30B-A3B (57 GB in bfloat16) and weights made from a formula, the same on both sides.
The process of plain "cuda" never imports torch_quartz. Before anything is timed the logits of a prompt are compared: as
random weights give many nearly equal logits, tokens may differ, so the logits must agree within rounding, and the share
of equal tokens is printed.

    python tests/bench/bench_generate_moe.py [--batches 1,8,64] [--prompt 128] [--new-tokens 33] [--layers 48]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch

BATCH_OF_LOGITS = 2


def fill(tensor: torch.Tensor, salt: int, scale: float) -> None:
    """Uniform numbers in (-scale, scale) from a hash of the position: the same on every device."""
    flat, piece = tensor.view(-1), 1 << 26
    for start in range(0, flat.numel(), piece):
        part = flat[start : start + piece]
        x = torch.arange(start, start + part.numel(), device=tensor.device)
        x = ((x + salt * 0x9E3779B1) * 0x85EBCA6B) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0xC2B2AE35) & 0xFFFFFFFF
        part.copy_(((x ^ (x >> 13)) & 0xFFFF).float().sub_(32767.5).mul_(scale / 32768.0))


def make(device: str, layers: int) -> torch.nn.Module:
    """Return the model, its weights on the device from the start."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        dtype=torch.bfloat16,
        eos_token_id=None,
        pad_token_id=0,
    )
    return of_shape(Qwen3MoeForCausalLM, config, device)


def of_shape(model_class: type, config: Any, device: str) -> torch.nn.Module:
    """Return a bfloat16 model whose weights are made on the device, from the same formula on every device."""
    with torch.device("meta"):
        model = model_class(config).to(torch.bfloat16)
    rotary = type(model.model.rotary_emb)(config)
    model = model.to_empty(device=device).eval()
    model.model.rotary_emb = rotary.to(device)
    with torch.no_grad():
        for salt, (name, parameter) in enumerate(model.named_parameters()):
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                fill(parameter.data, salt, 0.035)
    return model


def side(device: str, arguments: argparse.Namespace, logits_file: Path) -> None:
    """One process: write the logits of a prompt, then print the times and tokens as one line of JSON."""
    if device == "quartz":
        import torch_quartz  # noqa: F401
    module = getattr(torch, device)
    start = time.perf_counter()
    model = make(device, arguments.layers)
    result: dict = {"seconds to make": time.perf_counter() - start, "times": {}, "tokens": {}}
    with torch.no_grad():
        ids = (torch.arange(BATCH_OF_LOGITS * arguments.prompt) * 7919 % 150000).view(BATCH_OF_LOGITS, -1).to(device)
        torch.save(model(ids).logits.cpu(), logits_file)
    for batch in arguments.batches:
        ids = (torch.arange(batch * arguments.prompt) * 7919 % 150000).view(batch, -1).to(device)
        times = []
        for _ in range(arguments.rounds + 1):  # the first warms up
            module.synchronize()
            start = time.perf_counter()
            tokens = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=arguments.new_tokens,
                min_new_tokens=arguments.new_tokens,
                do_sample=False,
            )
            module.synchronize()
            times.append(time.perf_counter() - start)
        result["times"][batch] = min(times[1:])
        result["tokens"][batch] = tokens[:, arguments.prompt :].tolist()
    if device != "cpu":
        result["GiB"] = module.max_memory_allocated() / 2**30
    print(json.dumps(result), flush=True)


def main() -> None:
    """Run both sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=lambda text: [int(b) for b in text.split(",")], default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=33)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--native", default="cuda", help='"cpu" on a machine without a GPU, with few layers')
    parser.add_argument("--side", nargs=2, metavar=("DEVICE", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        return side(arguments.side[0], arguments, Path(arguments.side[1]))
    results, logits = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for device in (arguments.native, "quartz"):
            file = Path(folder, device)
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--side", device, str(file)],
                stdout=subprocess.PIPE,
                text=True,
            )
            if done.returncode:
                raise SystemExit(f"{device}: the process ended with status {done.returncode}")
            results[device], logits[device] = json.loads(done.stdout.splitlines()[-1]), torch.load(file).float()
    native, ours = results[arguments.native], results["quartz"]
    difference = (logits["quartz"] - logits[arguments.native]).square().mean().sqrt() / logits["quartz"].std()
    print(f"logits: root mean square of the difference / standard deviation {difference:.4f}")
    if not difference < 0.1:
        raise SystemExit("the logits differ by more than rounding, so there is nothing to compare")
    print(f"memory {native.get('GiB', 0):.1f} and {ours['GiB']:.1f} GiB\n")
    print(f"| batch | {arguments.native} tokens/s | quartz tokens/s | ratio | equal tokens |")
    print("|---:|---:|---:|---:|---:|")
    for batch in map(str, arguments.batches):
        count = int(batch) * arguments.new_tokens
        rows = zip(native["tokens"][batch], ours["tokens"][batch], strict=True)
        equal = sum(a == b for row in rows for a, b in zip(*row, strict=True)) / count
        slow, fast = count / native["times"][batch], count / ours["times"][batch]
        print(f"| {batch} | {slow:.1f} | {fast:.1f} | {fast / slow:.2f} | {equal:.0%} |")
    return None


if __name__ == "__main__":
    main()
