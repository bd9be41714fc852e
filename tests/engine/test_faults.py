"""What goes wrong in one place stays there: a tiny random model on the device, and everything that can happen to it.

After each test the scheduler's own check runs and no block is in use.
"""

import random

import numpy as np
import pytest
import torch
from model_zoo import VOCABULARY, build
from torch_quartz import LLM, SamplingParams

LIMIT = 96


def tiny_model(seed=3):
    torch.manual_seed(seed)
    return build("llama", max_position_embeddings=LIMIT).to("quartz", torch.bfloat16).eval()


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def make(model, **options):
    return LLM(model, **{"max_model_len": LIMIT, "block_size": 8, "num_blocks": 80, "max_num_seqs": 16, **options})


@pytest.fixture
def llm(model):
    llm = make(model)
    yield llm
    llm.check()


def prompts(count, chance, longest=40):
    return [
        {"prompt_token_ids": [chance.randrange(3, VOCABULARY) for _ in range(chance.randint(1, longest))]}
        for _ in range(count)
    ]


def parameters(number, **fields):
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.0, "n": 2},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.2, "repetition_penalty": 1.1},
    )
    return SamplingParams(**{"max_tokens": 10, "seed": number, "logprobs": 1, **kinds[number % len(kinds)], **fields})


def bytes_of(output):
    """Tokens and the bits of their log probabilities."""
    return [
        (
            sample.token_ids,
            np.array([entry[t].logprob for t, entry in zip(sample.token_ids, sample.logprobs, strict=True)]).tobytes(),
        )
        for sample in output.outputs
    ]


@pytest.fixture(scope="module")
def asked():
    chance = random.Random(2)
    return prompts(16, chance), [parameters(i) for i in range(16)]


@pytest.fixture(scope="module")
def right(model, asked):
    """What each request gets alone, on an engine that nothing happens to."""
    llm = make(model, overlap=False, enable_prefix_caching=False)
    return [bytes_of(llm.generate([p], [s], use_tqdm=False)[0]) for p, s in zip(*asked, strict=True)]


WAYS = {
    "plain": {},
    "no overlap": {"overlap": False},
    "few blocks": {"num_blocks": 20},
    "swapped": {"num_blocks": 20, "preemption": "swap", "swap_bytes": 2**20},
    "chunks": {"max_num_batched_tokens": 24, "max_prefill_tokens_per_request": 7},
    "drafts": {"speculative": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize("way", WAYS)
def test_batches_have_the_bytes_of_single_requests(model, asked, right, way):
    llm = make(model, **WAYS[way])
    outputs = llm.generate(*asked, use_tqdm=False)
    assert [bytes_of(output) for output in outputs] == right
    llm.check()


@pytest.mark.parametrize("way", WAYS)
def test_aborts_at_any_moment(model, asked, right, way):
    llm = make(model, **WAYS[way])
    engine, chance = llm.llm_engine, random.Random(4)
    for _ in range(6):
        for i, (prompt, params) in enumerate(zip(*asked, strict=True)):
            engine.add_request(str(i), prompt, params)
        victims = chance.sample(range(16), 8)
        done = {}
        while engine.has_unfinished_requests():
            if victims and chance.random() < 0.5:
                engine.abort_request(str(victims.pop()))
            done |= {output.request_id: output for output in engine.step() if output.finished}
        llm.check()
        for i in range(16):
            if all(sample.finish_reason != "abort" for sample in done[str(i)].outputs):
                assert bytes_of(done[str(i)]) == right[i]
    assert llm.metrics()["aborted_requests"] > 20


@pytest.mark.parametrize("way", WAYS)
def test_exceptions_inside_a_step(model, asked, right, way, monkeypatch):
    """The forward pass raises now and then, in the middle of the layers."""
    llm = make(model, enforce_eager=True, **WAYS[way])  # a graph would not call the layer
    layer, calls = model.model.layers[1].mlp, 0
    forward = layer.forward

    def fails(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls % 14 == 5:
            raise RuntimeError("the device hiccuped")
        return forward(*args, **kwargs)

    monkeypatch.setattr(layer, "forward", fails)
    outputs = llm.generate(*asked, use_tqdm=False)
    assert llm.metrics()["failed_steps"] > 1
    assert [bytes_of(output) for output in outputs] == right
    llm.check()


def test_out_of_memory_in_prefill(model, asked, right, monkeypatch):
    """Prompts that do not fit fail alone, with the numbers, though all arrive at the same time."""
    llm = make(model, enforce_eager=True)
    prompts_, params = asked
    used = {token for output in right for tokens, _ in output for token in tokens}
    used = used.union(*(prompt["prompt_token_ids"] for prompt in prompts_))
    bad = next(token for token in range(VOCABULARY) if token not in used)
    forward = model.model.embed_tokens.forward

    def fails(ids):
        if bad in ids.cpu().flatten().tolist():
            raise torch.OutOfMemoryError("quartz: 3.00 GiB asked, 1.00 GiB free of 80.00 GiB")
        return forward(ids)

    monkeypatch.setattr(model.model.embed_tokens, "forward", fails)
    batch, given = list(prompts_), list(params)
    for place in (2, 9):
        batch.insert(place, {"prompt_token_ids": [bad] * 30})
        given.insert(place, SamplingParams(n=2))
    outputs = llm.generate(batch, given, use_tqdm=False)
    for place in (9, 2):
        failed = outputs.pop(place)
        assert all("3.00 GiB asked" in sample.error for sample in failed.outputs)
    assert [bytes_of(output) for output in outputs] == right
    llm.check()


def test_logits_that_are_no_numbers(asked, right):
    """The prompt with a poisoned token fails alone; the next users of its blocks see nothing of it (case G6)."""
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[2] = torch.nan
    llm = make(model)
    prompts_, params = asked
    clean = [i for i in range(16) if not any(2 in tokens for tokens, _ in right[i])]
    for place in (0, 7, 16):
        batch = [prompts_[i] for i in range(16)]
        given = list(params)
        batch.insert(place, {"prompt_token_ids": [5, 2, 7] * 8})
        given.insert(place, SamplingParams(n=2, seed=1))
        outputs = llm.generate(batch, given, use_tqdm=False)
        failed = outputs.pop(place)
        assert all("no token could be drawn" in sample.error for sample in failed.outputs)
        for i in clean:
            assert bytes_of(outputs[i]) == right[i]
        llm.check()


@pytest.mark.parametrize("length", [0, 1, LIMIT - 1, LIMIT, LIMIT + 1])
def test_lengths_of_prompts(llm, length):
    output = llm.generate({"prompt_token_ids": [5] * length}, SamplingParams(max_tokens=3), use_tqdm=False)[0]
    if length in (1, LIMIT - 1):
        assert output.error is None and len(output.outputs[0].token_ids) == min(3, LIMIT - length)
        assert output.outputs[0].finish_reason == "length"
    else:
        assert ("at least one token" if length == 0 else f"max_model_len, which is {LIMIT}") in output.error


def test_ten_thousand_in_the_queue(llm):
    engine = llm.llm_engine
    params = parameters(0, max_tokens=2)
    for i in range(10_000):
        engine.add_request(str(i), [3 + i % 90], params)
    assert llm.metrics()["num_waiting"] == 10_000
    keep = set(range(0, 10_000, 100))
    engine.abort_request([str(i) for i in range(10_000) if i not in keep])
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step()}
    assert len(done) == 10_000
    tokens = sorted({3 + i % 90 for i in keep})
    alone = llm.generate([[token] for token in tokens], params, use_tqdm=False)
    right = dict(zip(tokens, map(bytes_of, alone), strict=True))
    assert all(bytes_of(done[str(i)]) == right[3 + i % 90] for i in keep)


# ---- caches ----


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("chunk", [0, 5])
def test_prompt_logprobs_with_a_warm_cache(model, block_size, chunk):
    """Case G4: one entry a token, the same ones however much of the prompt is cached already."""
    llm = make(model, block_size=block_size, max_prefill_tokens_per_request=chunk)
    ids = [3 + i * 7 % 90 for i in range(33)]
    llm.generate([ids], SamplingParams(max_tokens=1), use_tqdm=False)  # warms the cache
    params = SamplingParams(max_tokens=2, prompt_logprobs=1, logprobs=1, temperature=0.0)
    with torch.no_grad():
        logits = model(torch.tensor([ids], device="quartz"), use_cache=False).logits[0]
    from torch_quartz.ops import token_logprobs

    scores = token_logprobs(logits[:-1], torch.tensor(ids[1:], device="quartz")).tolist()
    for length in (33, 33, 31, 1):
        output = llm.generate([ids[:length]], params, use_tqdm=False)[0]
        entries = output.prompt_logprobs
        assert len(entries) == length and entries[0] is None
        assert [entry[token].logprob for entry, token in zip(entries[1:], ids[1:length], strict=True)] == scores[
            : length - 1
        ]
        for entry, row in zip(entries[1:], logits, strict=False):
            best = int(row.float().argmax())
            assert entry[best].rank == 1 and len(entry) in (1, 2)
    llm.check()


def test_salts_do_not_share_blocks(llm):
    """Case G5: equal prompts of two tenants; each finds its own blocks only, and gets the same bytes."""
    ids, params = list(range(3, 40)), parameters(0)
    outputs = []
    for salt in ("x", "y", "x", "", "", b"x"):
        prompt = {"prompt_token_ids": ids, "cache_salt": salt}
        outputs += llm.generate([prompt], params, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 32, 0, 32, 32]
    assert len({str(bytes_of(output)) for output in outputs}) == 1


def test_a_prefix_again_after_eviction(model):
    """Cases D4, G5: a prompt, a longer one, the first again under pressure and after a flush."""
    llm = make(model, num_blocks=16)
    chance = random.Random(8)
    short = prompts(1, chance)[0]["prompt_token_ids"][:20] * 2
    long, params = [*short, 5, 6, 7, 8] * 2, parameters(2)
    first = [bytes_of(output) for output in llm.generate([short, long], params, use_tqdm=False)]
    for _ in range(3):
        assert [bytes_of(output) for output in llm.generate([short, long], params, use_tqdm=False)] == first
        llm.generate(prompts(6, chance), parameters(0), use_tqdm=False)
        assert [bytes_of(output) for output in llm.generate([long, short], params, use_tqdm=False)] == first[::-1]
        llm.reset_prefix_cache()
    assert llm.metrics()["evictions"] > 0
    llm.check()


def test_constraints_that_exclude_everything(llm):
    """Case E6: an allow-list that is banned by its biases ends with an error, never with a token outside of it."""
    allowed = llm.generate([[5]], SamplingParams(allowed_token_ids=[5, 6], seed=1), use_tqdm=False)[0]
    assert set(allowed.outputs[0].token_ids) <= {5, 6}
    greedy, random_ = llm.generate(
        [[5], [5]],
        [
            SamplingParams(temperature=0.0, allowed_token_ids=[7]),
            SamplingParams(temperature=1.0, allowed_token_ids=[7, 8], logit_bias={8: -100.0}, seed=2),
        ],
        use_tqdm=False,
    )
    assert set(greedy.outputs[0].token_ids) == {7} == set(random_.outputs[0].token_ids)
