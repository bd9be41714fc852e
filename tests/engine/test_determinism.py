"""The gate: the bytes of a request are the same whatever is batched, chunked, cached, preempted, drafted or overlapped.

64 requests on real prompts (greedy and seeded, truncation, penalties, grammar, n = 4) are served once in the plainest
way, one after the other; every other way of serving must give the digest of that. The texts are then scored again with
a plain forward pass of the model. Tiny random models of every family go through the main rows.
"""

import functools
import math
import subprocess
import sys
from pathlib import Path

import gate
import pytest
import torch
import torch_quartz as tq
from gate import Request, Variation

REQUESTS = 64
TOKENS = 12
PLAIN = Variation({"enable_prefix_caching": False, "overlap": False}, batch=1)
# Blocks for about a tenth of what all requests together need.
FEW_BLOCKS = {"num_blocks": 64}

VARIATIONS = {
    "alone, overlap": Variation({"enable_prefix_caching": False}, batch=1),
    "batches of 2": Variation(batch=2),
    "batches of 7": Variation(batch=7),
    "batches of 16": Variation(batch=16),
    "all at once": Variation(),
    "all at once without overlap": Variation({"overlap": False}),
    "shuffled arrivals": Variation(arrivals=1),
    "other shuffled arrivals": Variation(arrivals=2),
    "chunks of 16": Variation({"max_num_batched_tokens": 80, "max_prefill_tokens_per_request": 16}),
    "chunks of 64": Variation({"max_num_batched_tokens": 128, "max_prefill_tokens_per_request": 64}),
    "512 tokens a step": Variation({"max_num_batched_tokens": 512}),
    "no prefix cache": Variation({"enable_prefix_caching": False}),
    "prefix cache cold and warm": Variation(rounds=2, batch=16),
    "prefix cache flushed": Variation(rounds=2, flush=True),
    "blocks of 32": Variation({"block_size": 32}),
    "preempted, computed again": Variation({**FEW_BLOCKS, "preemption": "recompute"}),
    "preempted, swapped": Variation({**FEW_BLOCKS, "preemption": "swap", "swap_bytes": 2**26}),
    "no graphs": Variation({"enforce_eager": True}),
    "three at a time": Variation({"max_num_seqs": 4}),
    "n-gram drafts": Variation({"speculative": {"method": "ngram", "num_speculative_tokens": 5}}),
    "n-gram drafts, depth 1, alone": Variation(
        {"speculative": {"method": "ngram", "num_speculative_tokens": 1}}, batch=1
    ),
    "n-gram drafts, depth 7, chunks, preempted": Variation(
        {
            "block_size": 4,
            "num_blocks": 140,
            "speculative": {"method": "ngram", "num_speculative_tokens": 7},
            "max_num_batched_tokens": 128,
            "max_prefill_tokens_per_request": 32,
        }
    ),
    "draft model, depth 3": Variation({"speculative": {"method": "draft_model", "num_speculative_tokens": 3}}),
    "n-gram drafts, adaptive": Variation(
        {
            "speculative": {
                "method": "ngram",
                "num_speculative_tokens": 5,
                "adaptive": True,
                # Step times without sense: they may change what is verified, and nothing else.
                "step_times": [1.0 + (i * 7919 % 13) / 4 for i in range(512)],
            }
        },
        arrivals=3,
    ),
}


@pytest.fixture(scope="module")
def smollm2():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = gate.model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="quartz").eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def requests(smollm2):
    texts = gate.prompts()
    # Each text is asked with every kind of parameters in the course of the 64 requests.
    return [Request(texts[(i * 5 + i // 16) % len(texts)], gate.sampling(i, TOKENS)) for i in range(REQUESTS)]


@functools.cache
def draft_model():
    """A drafter with the vocabulary of SmolLM2 and random weights; what it proposes may change nothing."""
    from model_zoo import build

    return build("llama", vocab_size=49152, max_position_embeddings=512).to("quartz", torch.bfloat16).eval()


def engine(smollm2, variation, **options):
    model, tokenizer = smollm2
    options = {"max_model_len": 512, "kv_cache_bytes": 2**28, **variation.options, **options}
    if (options.get("speculative") or {}).get("method") == "draft_model":
        options["speculative"] = {**options["speculative"], "model": draft_model()}
    return tq.LLM(model, tokenizer=tokenizer, **options)


@pytest.fixture(scope="module")
def plain(smollm2, requests):
    """What the plainest way gives: one request after the other, no prefix cache, no overlap."""
    return gate.serve(engine(smollm2, PLAIN), requests, PLAIN)


def test_requests_are_answered(plain, requests):
    """The digest below is of something: each sample has tokens, seeds matter, samples of a request differ."""
    assert [len(output.outputs) for output in plain] == [request.params.n for request in requests]
    assert all(sample.token_ids for output in plain for sample in output.outputs)
    assert all(math.isfinite(x) for o in plain for s in o.outputs for x in gate.chosen_logprobs(s))
    assert any(len({tuple(sample.token_ids) for sample in output.outputs}) > 1 for output in plain)


@pytest.mark.parametrize("name", VARIATIONS)
def test_same_bytes(smollm2, requests, plain, name):
    variation = VARIATIONS[name]
    llm = engine(smollm2, variation)
    for _ in range(variation.rounds):
        outputs = gate.serve(llm, requests, variation)
        assert gate.digest(outputs) == gate.digest(plain), gate.differing(outputs, plain)
        if variation.flush:
            llm.reset_prefix_cache()
    metrics = llm.metrics()
    assert 0 < metrics["last_layer_rows_saved"] < metrics["computed_rows"]
    # The variation did happen.
    if "preempted" in name:
        assert metrics["preemptions"] > 0
    if name.startswith("n-gram") and "adaptive" not in name:
        assert metrics["accepted_tokens"] > 0
    if "warm" in name:
        assert metrics["prefix_cache_hits"] > 0
    llm.check()  # no block is lost


def test_another_process(plain, tmp_path):
    """Two processes give one digest."""
    code = (
        "import sys, torch, gate, test_determinism as t; from transformers import AutoModelForCausalLM, AutoTokenizer;"
        "torch.set_num_threads(2); folder = gate.model_folder();"
        "model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map='quartz').eval();"
        "pair = model, AutoTokenizer.from_pretrained(folder); texts = gate.prompts();"
        "requests = [gate.Request(texts[(i * 5 + i // 16) % len(texts)], gate.sampling(i, t.TOKENS))"
        " for i in range(t.REQUESTS)];"
        "v = gate.Variation(); print(gate.digest(gate.serve(t.engine(pair, v), requests, v)))"
    )
    import os

    paths = [str(Path(__file__).parent), str(Path(tq.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == gate.digest(plain)


def scored(model, prompt_ids, output_ids):
    """The log probabilities of a text's end by a plain forward pass, with gradients enabled."""
    from torch_quartz.ops import token_logprobs

    ids = torch.tensor([[*prompt_ids, *output_ids]], device="quartz")
    with torch.enable_grad():
        logits = model(ids, use_cache=False).logits[0]
    assert logits.requires_grad
    rows = logits.detach()[len(prompt_ids) - 1 : -1]
    return token_logprobs(rows, ids[0, len(prompt_ids) :]).cpu().numpy()


def test_scores_of_a_plain_forward_pass(smollm2, plain):
    model = smollm2[0].requires_grad_()
    for output in plain[:24]:
        for sample in output.outputs:
            expected = scored(model, output.prompt_token_ids, sample.token_ids)
            assert gate.chosen_logprobs(sample).tobytes() == expected.tobytes(), output.request_id
    model.requires_grad_(False)


def test_the_gate_notices_a_broken_rule(smollm2, requests, plain, monkeypatch):
    """With a product whose order of sums depends on the number of rows, the digest changes."""
    linear = torch.nn.functional.linear

    def split_when_many(x, weight, bias=None):
        if x.shape[:-1].numel() < 8 or x.shape[-1] % 2:
            return linear(x, weight, bias)
        half = x.shape[-1] // 2
        return linear(x[..., :half], weight[:, :half], bias) + linear(x[..., half:], weight[:, half:])

    some = requests[:16]
    monkeypatch.setattr(torch.nn.functional, "linear", split_when_many)
    broken = gate.serve(engine(smollm2, PLAIN, validate_model=False), some, Variation())
    assert gate.digest(broken) != gate.digest(plain[:16])


# ---- tiny models of every family ----

FAMILIES = {
    "dense": "llama",
    "dense, query norms": "qwen3",
    "mixture of experts": "qwen3_moe",
    "mixture, two experts": "mixtral",
    "mixture, shared experts": "glm4_moe",
    "sliding window, soft cap": "gemma2",
    "sliding window": "gemma3",
    "sliding window, sinks": "gpt_oss",
    "latent attention": "deepseek_v3",
    "hybrid": "qwen3_next",
    "recurrent": "mamba",
}
ROWS = {
    "all at once": Variation(),
    "shuffled arrivals": Variation(arrivals=1),
    "chunks of 5": Variation({"max_num_batched_tokens": 40, "max_prefill_tokens_per_request": 5}),
    "warm": Variation(rounds=2),
    "preempted": Variation({"num_blocks": 24}),
    "drafts": Variation({"speculative": {"method": "ngram", "num_speculative_tokens": 3}}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    from model_zoo import VOCABULARY, available, build

    name = FAMILIES[request.param]
    if name not in available():
        pytest.fail(f"{name} is not in this Transformers")
    generator = torch.Generator().manual_seed(len(name))
    model = build(name).to("quartz", torch.bfloat16).eval()
    # Small alphabets repeat themselves: n-gram drafts are proposed, and some are right.
    prompts = [torch.randint(3, VOCABULARY, (5 + 3 * i,), generator=generator).tolist() for i in range(10)]
    prompts += [prompts[-1] + [7, 8, 9], prompts[-1][:20]]
    requests = [Request({"prompt_token_ids": p}, gate.sampling(i, 10, grammar=False)) for i, p in enumerate(prompts)]
    return model, requests


def test_a_model_without_a_pool_for_its_cache_is_refused():
    """Compressed attention keeps a cache of a length of its own: no wrong numbers, but a refusal that names it."""
    from model_zoo import build

    model = build("deepseek_v4").to("quartz", torch.bfloat16).eval()
    with pytest.raises(NotImplementedError, match="heavily_compressed_attention"):
        tiny_engine(model, Variation())


def tiny_engine(model, variation):
    return tq.LLM(model, **{"max_model_len": 64, "kv_cache_bytes": 2**22, "block_size": 8, **variation.options})


@pytest.fixture(scope="module")
def family_plain(family):
    model, requests = family
    outputs = gate.serve(tiny_engine(model, PLAIN), requests, PLAIN)
    for output in outputs:
        for sample in output.outputs:
            scores = scored(model, output.prompt_token_ids, sample.token_ids)
            assert gate.chosen_logprobs(sample).tobytes() == scores.tobytes()
    return outputs


@pytest.mark.parametrize("row", ROWS)
def test_families(family, family_plain, row):
    model, requests = family
    llm = tiny_engine(model, ROWS[row])
    for _ in range(ROWS[row].rounds):
        outputs = gate.serve(llm, requests, ROWS[row])
        assert gate.digest(outputs) == gate.digest(family_plain), gate.differing(outputs, family_plain)
    llm.check()
