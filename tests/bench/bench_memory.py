"""Peak memory of a Transformers forward pass and of a training step: quartz against the native device.

Each measurement is a process of its own. On the cuda substrate the figure is the peak of the caching allocator. On the
host it is the peak of resident memory (VmHWM) above what was resident before the work; malloc is told to return freed
blocks at once, so that resident memory follows what is allocated. A first, small step loads libraries before the count.

    python tests/bench/bench_memory.py [--hidden 512] [--layers 6]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

WORK = ("forward", "training step")
# glibc: one arena, a fixed threshold above which blocks come from mmap and go back with munmap
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def native() -> str:
    """Return the device that quartz is measured against."""
    import torch
    import torch_quartz  # noqa: F401

    return "cpu" if torch.quartz.substrate() == "host" else "cuda"


def peak(work: str, device: str, hidden: int = 512, layers: int = 6) -> int:
    """Return the peak in bytes of one piece of work on one device, measured in a process of its own.

    Parameters
    ----------
    work : str
        One of `WORK`.
    device : str
        ``"quartz"``, or what `native` returns.
    hidden, layers : int
        Size of the model.
    """
    arguments = ["--worker", work, device, "--hidden", str(hidden), "--layers", str(layers)]
    environment = {**os.environ, **_MALLOC, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring {work} on {device} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _model(hidden: int, layers: int):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def _do(work: str, device: str, hidden: int, layers: int, length: int) -> None:
    import torch

    model = _model(hidden, layers).to(device)
    ids = torch.arange(4 * length, device=device).reshape(4, length) % 8192
    if work == "forward":
        with torch.no_grad():
            model(input_ids=ids).logits.sum().item()
        return
    # fused, the default of Trainer: PyTorch's own default would be foreach on quartz but a loop on the CPU, and foreach
    # needs temporaries of the parameters' size on any device.
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):  # the second step has the optimiser's state and the gradients in memory
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _worker(work: str, device: str, hidden: int, layers: int) -> int:
    import torch

    if device != "cuda":  # backward passes of plain cuda tensors want a process without torch_quartz
        import torch_quartz  # noqa: F401

    torch.set_num_threads(1)
    on_host = device == "cpu" or (device == "quartz" and torch.quartz.substrate() == "host")
    _do(work, device, 64, 1, 8)
    if not on_host:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        _do(work, device, hidden, layers, 128)
        return torch.cuda.max_memory_allocated()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    _do(work, device, hidden, layers, 128)
    return _resident("VmHWM") - before


def main() -> None:
    """Print the table, or measure one cell of it (``--worker``)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512, help="width of the model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--worker", nargs=2, metavar=("WORK", "DEVICE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(_worker(*arguments.worker, arguments.hidden, arguments.layers)))
        return
    reference = native()
    print(f"Llama, hidden {arguments.hidden}, {arguments.layers} layers, float32, 4 x 128 tokens\n")
    print(f"| work | {reference} MiB | quartz MiB | ratio |")
    print("|---|---:|---:|---:|")
    for work in WORK:
        theirs, ours = (peak(work, device, arguments.hidden, arguments.layers) for device in (reference, "quartz"))
        print(f"| {work} | {theirs / 2**20:.1f} | {ours / 2**20:.1f} | {ours / theirs:.3f} |", flush=True)


if __name__ == "__main__":
    main()
