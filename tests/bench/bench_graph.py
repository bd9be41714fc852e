"""Graphs: what one operator call costs eagerly and in a replay, and a decode step of a small model both ways.

The first table has chains of one operator on 16 elements, in microseconds a call. The second is a step of a Llama with
the dimensions of SmolLM2-135M (random weights, bfloat16, batch 1) over a static cache of Transformers, eagerly and
replayed; the tokens of both are compared before anything is timed, and runs alternate. With one thread on the host the
clock is the CPU time of the thread, so that other programs on the machine do not count; otherwise it is the wall clock.

    python tests/bench/bench_graph.py [--threads 1] [--rounds 30] [--tokens 8] [--skip-model]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import torch_quartz
from torch_quartz import ops

CALLS = 200


def clock() -> float:
    """Return a time in seconds, after all work has finished."""
    if torch.quartz.substrate() == "host" and torch.get_num_threads() == 1:
        return time.thread_time()
    torch.quartz.synchronize()
    return time.perf_counter()


def best(functions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the shortest time of each function; the functions alternate."""
    times = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = clock()
            function()
            times[i] = min(times[i], clock() - start)
    return times


def capture(function: Callable[[], object]) -> tuple[torch.quartz.Graph, object]:
    """Return a graph of a call and the call's result."""
    stream = torch.quartz.Stream()
    with torch.quartz.stream(stream):
        function()
    torch.quartz.synchronize()
    graph = torch.quartz.Graph()
    with torch.quartz.graph(graph, stream=stream):
        result = function()
    return graph, result


def operators(rounds: int) -> None:
    """Print the table of single operators."""
    a, b = torch.ones(16, device="quartz"), torch.ones(16, device="quartz")
    m, i = torch.eye(4, device="quartz"), torch.tensor([0, 3], device="quartz")
    cases = {
        "add": lambda: a + b,
        "add of a number": lambda: a + 1,
        "add_": lambda: a.add_(b),
        "mul, out=": lambda: torch.mul(a, b, out=b),
        "copy_": lambda: a.copy_(b),
        "silu": lambda: F.silu(a),
        "softmax": lambda: torch.softmax(m, -1),
        "linear": lambda: F.linear(m, m),
        "embedding": lambda: F.embedding(i, m),
        "cat of 2": lambda: torch.cat((a, b)),
        "quartz::rms_norm": lambda: ops.rms_norm(a),
        "view and slice": lambda: m.view(2, 8)[1:],
    }
    print(f"{'operator':18} {'eager us':>9} {'replay us':>10}")
    for name, call in cases.items():

        def chain(call: Callable[[], object] = call) -> None:
            for _ in range(CALLS):
                call()

        graph, _ = capture(chain)
        eager, replay = (t / CALLS * 1e6 for t in best([chain, graph.replay], rounds))
        print(f"{name:18} {eager:9.2f} {replay:10.2f}")


def model(rounds: int, tokens: int) -> None:
    """Print the times of a decode step."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(config).to(torch.bfloat16).eval().to("quartz")
    cache = StaticCache(config=config, max_cache_len=256)
    token = torch.zeros(1, 1, dtype=torch.int64, device="quartz")
    position = torch.zeros(1, 1, dtype=torch.int64, device="quartz")

    def step() -> None:
        output = llama(token, position_ids=position, past_key_values=cache, use_cache=True)
        token.copy_(output.logits[:, -1].argmax(-1, keepdim=True))
        position.add_(1)

    def restart() -> None:
        cache.reset()
        token.fill_(5)
        position.zero_()

    def run(one: Callable[[], None]) -> list[int]:
        restart()
        drawn = []
        for _ in range(tokens):
            one()
            drawn.append(token.item())
        return drawn

    step()
    restart()
    graph, _ = capture(step)
    assert run(step) == run(graph.replay), "a replay has drawn other tokens"
    restart()
    eager, replay = (t * 1e3 for t in best([step, graph.replay], rounds))
    print(f"\ndecode step, 30 layers: eager {eager:.2f} ms, replay {replay:.2f} ms")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the kernels")
    parser.add_argument("--rounds", type=int, default=30, help="timed runs of each; the shortest counts")
    parser.add_argument("--tokens", type=int, default=8, help="tokens compared before the model is timed")
    parser.add_argument("--skip-model", action="store_true", help="print only the table of operators")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"torch {torch.__version__}, torch-quartz {torch_quartz.__version__}, {torch.quartz.substrate()} substrate, "
        f"{torch.quartz.get_device_name()}, {arguments.threads} threads"
    )
    with torch.inference_mode():
        operators(10 * arguments.rounds)
        if not arguments.skip_model:
            model(arguments.rounds, arguments.tokens)


if __name__ == "__main__":
    main()
