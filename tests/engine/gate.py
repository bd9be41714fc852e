"""The determinism gate's tools: requests on real prompts, the ways to serve them, and a digest of what came out.

A *variation* is a set of engine options and a way in which the requests arrive; nothing of it may change a byte. The
digest is SHA-256 over token ids and the bits of the raw log probabilities, of all samples of all requests in order.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch_quartz as tq

# Questions a user may ask; the second half shares long beginnings, which is what a prefix cache is for.
QUESTIONS = (
    "What is the capital of France?",
    "Name three rivers in Europe.",
    "Write one sentence about the sea.",
    "Why is the sky blue?",
    "Explain what a prime number is to a child of ten.",
    "Translate 'good morning' into Spanish and German.",
    "def fibonacci(n):\n    # complete this function\n",
    "List the planets of the solar system in order, separated by commas.",
)
_INSTRUCTIONS = (
    "You are a careful assistant of a library. Answer in one short sentence, name no sources, and keep to what is "
    "asked. If a question cannot be answered, say that you do not know. Opening hours are from nine to five on "
    "working days, and from ten to two on Saturdays. The reading room holds forty people. Books are lent for four "
    "weeks, films for one week, and both can be renewed twice unless somebody waits for them. "
)
_READERS = (
    "When is the library open on Saturday?",
    "How long may I keep a film?",
    "How many people fit into the reading room?",
    "Can I renew a book three times?",
    "Is the library open on Sunday?",
    "Where is the nearest bakery?",
    "Recite the opening hours, then the number of weeks a book is lent, then the number of times it can be renewed.",
    "Summarise the rules.",
)


def prompts() -> list[str]:
    """Return sixteen texts of 5 to 120 tokens."""
    return [*QUESTIONS, *(_INSTRUCTIONS + question for question in _READERS)]


def sampling(number: int, tokens: int, grammar: bool = True) -> tq.SamplingParams:
    """Return the parameters of request `number`: eight kinds in turn, greedy and seeded.

    Parameters
    ----------
    number : int
        Of the request; also its seed.
    tokens : int
        The most tokens of an answer.
    grammar : bool
        Whether two of the kinds are constrained; tokenizers of tiny models know no text to constrain.
    """
    common: dict[str, Any] = {"max_tokens": tokens, "logprobs": 2, "seed": 1000 + number}
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.3, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 40, "n": 4},
        {"temperature": 1.0},
        {"temperature": 1.5, "min_p": 0.05, "frequency_penalty": 0.4},
        {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"temperature": 1.0, "regex": r"(yes|no|perhaps), because [a-z ]{5,60}\."},
        {"temperature": 0.0, "repetition_penalty": 1.1, "min_tokens": 5, "json": True},
    )
    chosen = dict(kinds[number % len(kinds)])
    regex, json = chosen.pop("regex", None), chosen.pop("json", None)
    if grammar and regex:
        chosen["structured_outputs"] = tq.StructuredOutputsParams(regex=regex)
    if grammar and json:
        chosen["structured_outputs"] = tq.StructuredOutputsParams(json=_SCHEMA)
    return tq.SamplingParams(**common, **chosen)


_SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Request:
    """A prompt (text or token ids) with its parameters."""

    prompt: Any
    params: tq.SamplingParams


@dataclass(frozen=True)
class Variation:
    """One way to serve the requests.

    Attributes
    ----------
    options : dict
        Of `torch_quartz.LLM`, beside those that all variations share.
    batch : int
        So many requests are given at a time, and finished before the next; 0 gives all at once.
    arrivals : int or None
        The seed of a random order and of random steps at which requests arrive.
    rounds : int
        How often everything is served by one engine; each round must give the same.
    flush : bool
        Whether the prefix cache is emptied between rounds.
    """

    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 0
    arrivals: int | None = None
    rounds: int = 1
    flush: bool = False


def serve(llm: tq.LLM, requests: list[Request], variation: Variation) -> list[tq.RequestOutput]:
    """Serve the requests once and return their outputs in order."""
    if variation.arrivals is not None:
        return _arriving(llm.llm_engine, requests, random.Random(variation.arrivals))
    size = variation.batch or len(requests)
    outputs: list[tq.RequestOutput] = []
    for first in range(0, len(requests), size):
        some = requests[first : first + size]
        outputs += llm.generate([r.prompt for r in some], [r.params for r in some], use_tqdm=False)
    return outputs


def _arriving(engine: tq.LLMEngine, requests: list[Request], chance: random.Random) -> list[tq.RequestOutput]:
    waiting = list(range(len(requests)))
    chance.shuffle(waiting)
    finished: dict[str, tq.RequestOutput] = {}
    while waiting or engine.has_unfinished_requests():
        for _ in range(chance.randint(0, 3)):
            if waiting:
                number = waiting.pop()
                engine.add_request(f"arriving-{number}", requests[number].prompt, requests[number].params)
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    return [finished[f"arriving-{number}"] for number in range(len(requests))]


def chosen_logprobs(output: tq.CompletionOutput) -> np.ndarray:
    """Return the log probabilities of a sample's own tokens, float32."""
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return np.array([entry[token].logprob for token, entry in pairs], np.float32)


def digest(outputs: list[tq.RequestOutput]) -> str:
    """Return SHA-256 over token ids (int32) and log probabilities (float32) of all samples."""
    total = hashlib.sha256()
    for output in outputs:
        for sample in output.outputs:
            assert sample.finish_reason in ("stop", "length"), (output.request_id, sample.finish_reason)
            total.update(np.array([sample.index, len(sample.token_ids)], np.int32).tobytes())
            total.update(np.array(sample.token_ids, np.int32).tobytes())
            total.update(chosen_logprobs(sample).tobytes())
    return total.hexdigest()


def differing(got: list[tq.RequestOutput], expected: list[tq.RequestOutput]) -> str:
    """Name the first samples that differ, for a failing test's message."""
    found = []
    for one, other in zip(got, expected, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            if a.token_ids != b.token_ids:
                place = next(
                    (i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), "the end"
                )
                found.append(f"request {other.request_id} sample {a.index}: tokens differ from {place}")
            elif chosen_logprobs(a).tobytes() != chosen_logprobs(b).tobytes():
                found.append(f"request {other.request_id} sample {a.index}: logprobs differ")
    return f"{len(found)} samples differ: " + "; ".join(found[:4])


def model_folder() -> Path:
    """Return the folder of SmolLM2, converted once from its package."""
    import sys

    examples = str(Path(__file__).parents[2] / "examples")
    if examples not in sys.path:
        sys.path.insert(0, examples)
    import smollm2

    return smollm2.model_folder()
