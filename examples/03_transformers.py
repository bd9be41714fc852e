"""A chat model through unmodified Transformers code: once on "quartz", once on "cpu", and what both cost.

The model is SmolLM2-135M-Instruct, which needs no network at run time: see smollm2.py in this folder.

    python examples/03_transformers.py
    python examples/03_transformers.py --prompt "Write a haiku about the sea." --max-new-tokens 60 --dtype float32
"""

import argparse
import ctypes
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch_quartz  # noqa: F401  (registers the device "quartz"; a CPU-only PyTorch does it by itself)
from smollm2 import model_folder

MEBIBYTE = 2**20


@dataclass
class Answer:
    """What one device produced and what it cost."""

    tokens: list[int]
    seconds: float
    peak_bytes: int


def answer(
    folder: Path, device: str, prompt: str, max_new_tokens: int, dtype: torch.dtype, stream: bool = True
) -> Answer:
    """Stream the model's answer to the terminal. Nothing here but the device's name knows which device it is."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    memory = PeakMemory(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device, dtype=dtype)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    start = time.perf_counter()
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    return Answer(tokens, time.perf_counter() - start, memory.peak())


class PeakMemory:
    """Peak memory from construction on: the device's allocator on a GPU, resident memory of the process on the host."""

    def __init__(self, device: str):
        self._on_gpu = device == "quartz" and torch.quartz.substrate() == "cuda"
        if self._on_gpu:
            torch.quartz.reset_peak_memory_stats()
            return
        ctypes.CDLL(None).malloc_trim(0)  # give back what an earlier run left in malloc's arenas
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of resident memory
        self._before = self._read("VmRSS")

    @staticmethod
    def _read(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {field}")

    def peak(self) -> int:
        """Return the peak in bytes; on the host, above what was resident before."""
        return torch.quartz.max_memory_allocated() if self._on_gpu else self._read("VmHWM") - self._before


def main() -> None:
    """Answer one prompt on both devices and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="What is the capital of France, and what is it known for?")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    arguments = parser.parse_args()
    folder = model_folder()
    dtype = getattr(torch, arguments.dtype)
    answer(folder, "cpu", "Hi", 1, dtype, stream=False)  # loads code and libraries: neither device should pay for that

    answers = {}
    counts = {}
    for device in ("quartz", "cpu"):
        print(f"--- {device}", flush=True)
        torch.quartz.reset_op_counts()
        answers[device] = answer(folder, device, arguments.prompt, arguments.max_new_tokens, dtype)
        counts[device] = torch.quartz.op_counts()
    own, fallback = (sum(pair[i] for pair in counts["quartz"].values()) for i in (0, 1))
    same = "equal" if answers["quartz"].tokens == answers["cpu"].tokens else "DIFFERENT"
    if same != "equal" and dtype != torch.float32:
        same += f" (the CPU rounds {arguments.dtype} sums in another order: compare with --dtype float32)"
    costs = "; ".join(
        f"{device} {result.peak_bytes / MEBIBYTE:.0f} MiB peak, {len(result.tokens) / result.seconds:.1f} tokens/s"
        for device, result in answers.items()
    )
    print(f"--- tokens {same}; operator calls on quartz: {own} own kernels, {fallback} fallback; {costs}")


if __name__ == "__main__":
    main()
