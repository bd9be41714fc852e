"""What the Transformers tests compare: named jobs that run on any device, and the reference they are compared with.

A job is a function of a device name that returns CPU tensors by name. On the host substrate the reference is the same
job on ``"cpu"``. On the cuda substrate it is the same job on plain ``"cuda"``, in its own process without torch_quartz:
this file, run as a program, is that worker and writes its results with ``torch.save``. Every job runs twice there;
tensors whose two runs differ (float atomics) are recorded, since no device can be asked to equal those bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import model_zoo
import torch
from model_zoo import SEED, build, case, to_cpu

NEW_TOKENS = 10
Results = dict[str, torch.Tensor]


def prompt(device: str, rows: int = 2) -> dict[str, torch.Tensor]:
    """Return a batch of prompts, the first one padded on the left."""
    ids = torch.randint(3, 96, (rows, 9), generator=torch.Generator().manual_seed(SEED))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def generate(device: str, name: str = "llama", rows: int = 2, **options: Any) -> Results:
    """Generate with one set of options and return the tokens and, where the mode has them, the scores."""
    model = build(name).to(device)
    torch.manual_seed(SEED)  # building drew from the CPU's generator only
    inputs = prompt(device, rows) if case(name).head == "AutoModelForCausalLM" else _first_inputs(name, device)
    with drawing_on_the_cpu():
        output = model.generate(
            **inputs,
            **{"max_new_tokens": NEW_TOKENS, "do_sample": False, **options},
            return_dict_in_generate=True,
            output_scores=True,
        )
    results = {"tokens": to_cpu(output.sequences)}
    for step, score in enumerate(output.scores or ()):
        results[f"score.{step}"] = to_cpu(score)
    return results


@contextlib.contextmanager
def drawing_on_the_cpu():
    """Let every device draw the CPU's tokens: its own numbers are those of another generator."""
    native = torch.multinomial

    def multinomial(input, num_samples, replacement=False):
        return native(input.cpu(), num_samples, replacement).to(input.device)

    with mock.patch.object(torch, "multinomial", multinomial):
        yield


def _first_inputs(name: str, device: str) -> dict[str, torch.Tensor]:
    inputs = case(name).inputs()
    return {key: inputs[key].to(device) for key in case(name).prompt}


def streamed(device: str) -> Results:
    """Generate with a streamer and return what it was given, token by token."""
    from transformers.generation.streamers import BaseStreamer

    class Collector(BaseStreamer):
        def __init__(self) -> None:
            self.parts: list[torch.Tensor] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.parts.append(value.flatten())

        def end(self) -> None:
            self.ended = True

    collector = Collector()
    results = generate(device, rows=1, streamer=collector)
    assert collector.ended
    return {**results, "streamed": torch.cat([part.cpu() for part in collector.parts])}


def assisted(device: str) -> Results:
    """Generate with a smaller model of the same vocabulary that drafts tokens."""
    return generate(device, rows=1, assistant_model=build("llama", num_hidden_layers=1).to(device))


def constrained(device: str) -> Results:
    """Generate with the logits processors that look at the tokens so far."""
    return generate(
        device, repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=4, bad_words_ids=[[5], [7, 9]]
    )


def continuous(device: str) -> Results:
    """Generate through continuous batching: a paged cache, and requests of different lengths in one batch."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = build("llama").to(device)
    requests = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15] * 20]
    outputs = model.generate_batch(
        inputs=requests,
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64, use_cuda_graph=False),
        progress_bar=False,
    )
    answers = sorted(outputs.values(), key=lambda output: len(output.prompt_ids))
    assert len(answers) == len(requests) and not any(answer.error for answer in answers)
    return {f"tokens.{i}": torch.tensor(answer.generated_tokens) for i, answer in enumerate(answers)}


def trained(device: str, checkpointing: bool = False, **options: Any) -> Results:
    """Train GPT-2 with ``Trainer`` and return its losses and parameters.

    Without dropout: on the CPU it would draw from the generator that also orders the data.
    """
    trainer = make_trainer(device, **_NO_DROPOUT, **options)
    if checkpointing:
        trainer.model.gradient_checkpointing_enable()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        **{f"parameter.{name}": to_cpu(value) for name, value in trainer.model.named_parameters()},
    }


_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def make_trainer(device: str, folder: str | Path | None = None, **options: Any) -> Any:
    """Return a ``Trainer`` of four steps on a tiny GPT-2 for the device that it chooses by itself (or the CPU)."""
    from transformers import Trainer, TrainingArguments

    model = build("gpt2", **{key: options.pop(key) for key in _NO_DROPOUT if key in options})

    defaults = {
        "output_dir": str(folder or tempfile.mkdtemp()),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": SEED,
        "use_cpu": device == "cpu",
    }
    arguments = TrainingArguments(**{**defaults, **options})
    return Trainer(model=model, args=arguments, train_dataset=rows_of_text())


def rows_of_text(count: int = 16) -> list[dict[str, torch.Tensor]]:
    """Return a data set of random token rows."""
    ids = torch.randint(3, 96, (count, 12), generator=torch.Generator().manual_seed(SEED))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def trained_by_hand(device: str) -> Results:
    """Train with accelerate's own loop on the device that ``Accelerator`` chooses (or the CPU)."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=device == "cpu")
    assert accelerator.device.type == device
    torch.manual_seed(SEED)
    model = build("gpt2", **_NO_DROPOUT).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(rows_of_text(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    AcceleratorState._reset_state(reset_partial_state=True)
    return {name: to_cpu(value) for name, value in model.named_parameters()}


GENERATION: dict[str, Callable[[str], Results]] = {
    "greedy": generate,
    "sampling": functools.partial(generate, do_sample=True, top_k=20, top_p=0.9, temperature=0.8),
    "beams": functools.partial(generate, num_beams=3, num_return_sequences=2),
    "beam sampling": functools.partial(generate, num_beams=3, do_sample=True),
    "static cache": functools.partial(generate, cache_implementation="static", disable_compile=True),
    "no cache": functools.partial(generate, use_cache=False),
    "sliding window": functools.partial(generate, name="gemma3"),
    "sliding window, static cache": functools.partial(
        generate, name="gemma3", cache_implementation="static", disable_compile=True
    ),
    "experts": functools.partial(generate, name="qwen3_moe"),
    "recurrent": functools.partial(generate, name="mamba"),
    "encoder-decoder beams": functools.partial(generate, name="t5", num_beams=2),
    "prompt lookup": functools.partial(generate, rows=1, prompt_lookup_num_tokens=3),
    "constrained": constrained,
    "streamed": streamed,
    "assisted": assisted,
    "continuous batching": continuous,
}

TRAINING: dict[str, Callable[[str], Results]] = {
    "trainer": trained,
    "trainer, accumulation": functools.partial(trained, gradient_accumulation_steps=2),
    "trainer, checkpointing": functools.partial(trained, checkpointing=True),
    "accelerator": trained_by_hand,
}


def jobs() -> dict[str, Callable[[str], Results]]:
    """Return every job by name."""
    models = {f"model {name}": functools.partial(model_zoo.run_case, name) for name in model_zoo.available()}
    halves = {
        f"model {name}, bfloat16": functools.partial(model_zoo.run_case, name, dtype=torch.bfloat16)
        for name in ("llama", "qwen3_moe", "gemma3", "bert")
    }
    generation = {f"generate {name}": job for name, job in GENERATION.items()}
    training = {f"train {name}": job for name, job in TRAINING.items()}
    return {**models, **halves, **generation, **training}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two CPU tensors have the same type, shape and bits."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.is_floating_point():
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
        left, right = left.contiguous().view(integers), right.contiguous().view(integers)
    return torch.equal(left, right)


def lies_in_file(tensor: torch.Tensor, path: Path) -> bool:
    """Return whether the tensor's memory is a mapping of the file."""
    address = torch.quartz.native_alias(tensor).data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line.endswith(path.name)
    return False


@contextlib.contextmanager
def ties_to_the_lower_index():
    """Let the native ``topk`` choose among equal values as quartz does: the indexer of deepseek_v4 has some."""
    native = torch.topk

    def topk(input, k, dim=-1, largest=True, sorted=True):
        if not sorted:
            return native(input, k, dim, largest, sorted)
        values, indices = torch.sort(input, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    with mock.patch.object(torch, "topk", topk), mock.patch.object(torch.Tensor, "topk", topk):
        yield


def run_reference(name: str, device: str) -> tuple[Results, set[str]]:
    """Run a job twice on a native device; return the first results and the names of those that differed."""
    job = jobs()[name]
    with ties_to_the_lower_index():
        first, second = job(device), job(device)
    return first, {key for key, value in first.items() if not same_bits(value, second[key])}


@functools.cache
def expected(name: str) -> tuple[Results, set[str]]:
    """Return the reference of a job: its results on the native device and the names that no run reproduces."""
    if torch.quartz.substrate() == "host":
        return run_reference(name, "cpu")
    return _cuda_reference()[name]


@functools.cache
def _cuda_reference() -> dict[str, tuple[Results, set[str]]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reference.pt"
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        subprocess.run([sys.executable, __file__, "--device", "cuda", "--out", str(file)], check=True, env=environment)
        return torch.load(file, weights_only=False)


def compare(name: str, device: str = "quartz") -> None:
    """Run a job on quartz and assert that it agrees with its reference.

    Tokens and other integers are equal. Floating-point results are close: quartz computes products (and more) with own
    kernels, whose order of sums is not that of the native device (docs/ops/matmul.md). The distance of a whole tensor
    counts, since single gradients may cancel to nothing.

    Parameters
    ----------
    name : str
        A key of `jobs`.
    device : str
        The quartz device.
    """
    results = jobs()[name](device)
    reference, unstable = expected(name)
    assert results.keys() == reference.keys()
    different = [key for key in results if not _agree(results[key], reference[key], name)]
    assert not different, f"{name}: not the values of the native device: {different}"
    for key in unstable:
        torch.testing.assert_close(results[key], reference[key])


# dtype -> (relative to the norm of the tensor, absolute for each element). Measured: 6e-6 and 2e-2.
_TOLERANCES = {torch.float32: (5e-5, 1e-8), torch.float64: (5e-5, 1e-8), torch.bfloat16: (6e-2, 1e-6)}


def _agree(got: torch.Tensor, reference: torch.Tensor, name: str) -> bool:
    if not reference.is_floating_point():
        return same_bits(got, reference)
    if got.dtype != reference.dtype or got.shape != reference.shape:
        return False
    relative, absolute = _TOLERANCES[torch.bfloat16 if "bfloat16" in name else got.dtype]  # scores are always float32
    if name.startswith("train "):
        relative = 2e-3  # Adam makes whole steps of gradients that are zero but for rounding; measured: 3e-4
    a, b = got.double(), reference.double()
    finite = a.isfinite() & b.isfinite()
    if not ((a == b) | (a.isnan() & b.isnan()))[~finite].all():
        return False
    distance, norm = (a - b)[finite].norm(), b[finite].norm()
    return bool(distance <= relative * norm + absolute * finite.sum().sqrt())


def main() -> None:
    """Write the reference of every job on a native device to a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: run_reference(name, arguments.device) for name in jobs()}
    if "torch_quartz" in sys.modules:
        raise RuntimeError("the reference must run without torch_quartz")
    torch.save(results, arguments.out)


if __name__ == "__main__":
    main()
