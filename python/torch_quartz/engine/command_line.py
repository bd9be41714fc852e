"""The commands ``generate``, ``chat`` and ``bench`` of ``python -m torch_quartz``."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any


def add_commands(commands: Any) -> None:
    """Add the parsers of the three commands; each sets `run` to its function."""
    generate = commands.add_parser("generate", help="complete prompts")
    _add_engine(generate)
    _add_sampling(generate)
    generate.add_argument("--prompt", action="append", help="may be repeated; without it each line of stdin is one")
    generate.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    _add_engine(chat)
    _add_sampling(chat, max_tokens=512)
    chat.add_argument("--system", help="the system message")
    chat.set_defaults(run=_chat)

    bench = commands.add_parser("bench", help="measure throughput and latency on random tokens")
    _add_engine(bench)
    bench.add_argument("--num-prompts", type=_positive, default=16)
    bench.add_argument("--input-len", type=_positive, default=128, help="tokens of a prompt")
    bench.add_argument("--output-len", type=_positive, default=64, help="tokens generated for each")
    bench.add_argument("--prompt-seed", type=int, default=0, help="of the random tokens")
    bench.set_defaults(run=_bench)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder or a name of the hub")
    group = parser.add_argument_group("engine", "see help(torch_quartz.EngineConfig)")
    group.add_argument("--tokenizer")
    group.add_argument("--device", default="quartz")
    group.add_argument("--dtype", default="auto")
    for name in ("max-model-len", "max-num-seqs", "max-num-batched-tokens", "kv-cache-bytes", "block-size"):
        group.add_argument(f"--{name}", type=int)
    group.add_argument("--memory-fraction", type=float)
    group.add_argument("--engine-seed", type=int, help="of the seeds of requests without one")
    group.add_argument("--no-prefix-caching", action="store_true")
    group.add_argument("--no-overlap", action="store_true")
    group.add_argument("--enforce-eager", action="store_true")
    group.add_argument("--speculative", type=json.loads, help='JSON: {"method": "ngram", "num_speculative_tokens": 5}')


def _add_sampling(parser: argparse.ArgumentParser, max_tokens: int = 128) -> None:
    group = parser.add_argument_group("sampling", "see help(torch_quartz.SamplingParams)")
    group.add_argument("--max-tokens", type=int, default=max_tokens)
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--repetition-penalty", type=float, default=1.0)
    group.add_argument("--seed", type=int)
    group.add_argument("--stop", action="append", help="a text that ends the output; may be repeated")


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("tokenizer", "device", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    names += ("kv_cache_bytes", "block_size", "memory_fraction", "speculative")
    options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.engine_seed is not None:
        options["seed"] = arguments.engine_seed
    if arguments.no_prefix_caching:
        options["enable_prefix_caching"] = False
    if arguments.no_overlap:
        options["overlap"] = False
    if arguments.enforce_eager:
        options["enforce_eager"] = True
    return options


def _sampling(arguments: argparse.Namespace, **fields: Any) -> Any:
    from torch_quartz import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")
    return SamplingParams(**{name: getattr(arguments, name) for name in names}, **fields)


def _generate(arguments: argparse.Namespace) -> int:
    from torch_quartz import LLM

    params = _sampling(arguments)
    prompts = arguments.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    llm = LLM(arguments.model, **_engine_options(arguments))
    failed = 0
    for output, prompt in zip(llm.generate(prompts, params, use_tqdm=sys.stderr.isatty()), prompts, strict=True):
        failed += output.error is not None
        sample = output.outputs[0]
        if arguments.json:
            row = {"prompt": prompt, "text": sample.text, "token_ids": sample.token_ids}
            row |= {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason, "error": output.error}
            print(json.dumps(row, ensure_ascii=False))
        elif output.error is not None:
            print(f"{prompt}: {output.error}", file=sys.stderr)
        else:
            print(prompt + sample.text)
    return 1 if failed else 0


def _chat(arguments: argparse.Namespace) -> int:
    from torch_quartz import LLM
    from torch_quartz.engine.llm import chat_prompt

    params = _sampling(arguments, output_kind="delta")
    llm = LLM(arguments.model, **_engine_options(arguments))
    engine = llm.llm_engine
    start = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(start)
    print("/new begins again, /quit or the end of input leaves", file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return 0
        if line.strip() == "/quit":
            return 0
        if line.strip() == "/new":
            messages = list(start)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        text = ""
        try:
            prompt = chat_prompt(engine.factory, messages, {"add_generation_prompt": True})
            engine.add_request("chat", prompt, params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    piece = "".join(sample.text for sample in output.outputs)
                    text += piece
                    print(piece, end="", flush=True)
                    if output.error is not None:
                        print(f"[{output.error}]", end="")
        except ValueError as error:
            print(error, file=sys.stderr)
            messages.pop()
            continue
        except KeyboardInterrupt:  # ends this answer, not the conversation
            engine.abort_request("chat")
            while engine.has_unfinished_requests():
                engine.step()
        print()
        messages.append({"role": "assistant", "content": text})


def _bench(arguments: argparse.Namespace) -> int:
    from torch_quartz import LLM, SamplingParams

    llm = LLM(arguments.model, **_engine_options(arguments))
    vocabulary = llm.llm_engine.runner.vocab_size
    chance = random.Random(arguments.prompt_seed)
    prompts = [
        {"prompt_token_ids": [chance.randrange(vocabulary) for _ in range(arguments.input_len)]}
        for _ in range(arguments.num_prompts)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=arguments.output_len, ignore_eos=True, detokenize=False)
    llm.generate(prompts[:1], params.clone(max_tokens=2), use_tqdm=False)  # loads code and libraries
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    wrong = [output.error for output in outputs if output.error is not None]
    if wrong:
        print(f"{len(wrong)} requests failed: {wrong[0]}", file=sys.stderr)
        return 1
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    rows = {
        "requests": len(outputs),
        "seconds": seconds,
        "prompt_tokens_per_second": len(outputs) * arguments.input_len / seconds,
        "generated_tokens_per_second": generated / seconds,
    }
    for name in ("queue_time", "time_to_first_token", "time_per_output_token"):
        values = sorted(value for output in outputs if (value := getattr(output.metrics, name)) is not None)
        if values:
            rows[f"{name}_median"] = values[len(values) // 2]
            rows[f"{name}_max"] = values[-1]
    if arguments.speculative:
        rows["acceptance_rate"] = llm.metrics()["acceptance_rate"]
    for name, value in rows.items():
        print(f"{name + ': ':36}{value:.4g}" if isinstance(value, float) else f"{name + ': ':36}{value}")
    return 0
