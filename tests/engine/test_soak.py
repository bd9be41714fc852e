"""5,000 random requests with random aborts and failing steps: every finished one has the bytes that it has alone."""

import random

import pytest
from test_faults import bytes_of, make, parameters, prompts, tiny_model
from torch_quartz import SamplingParams

REQUESTS = 5000
DIFFERENT = 150


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def pool(model):
    """Different requests, a third of them with a common beginning, and what each gets alone."""
    chance = random.Random(1)
    found = prompts(DIFFERENT, chance, 30)
    common = found[0]["prompt_token_ids"] * 20
    for prompt in found[::3]:
        prompt["prompt_token_ids"] = common[: chance.randint(9, 40)] + prompt["prompt_token_ids"]
    params = [parameters(i, max_tokens=1 + i % 9, stop_token_ids=[4] if i % 5 == 0 else None) for i in range(DIFFERENT)]
    llm = make(model, overlap=False, enable_prefix_caching=False)
    alone = [bytes_of(llm.generate([p], s, use_tqdm=False)[0]) for p, s in zip(found, params, strict=True)]
    return list(zip(found, params, alone, strict=True))


def test_soak(model, pool):
    llm = make(
        model,
        max_num_seqs=32,
        num_blocks=64,
        max_num_batched_tokens=192,
        max_prefill_tokens_per_request=24,
        speculative={"method": "ngram", "num_speculative_tokens": 2},
    )
    engine, chance = llm.llm_engine, random.Random(9)
    execute = engine.runner.execute

    def sometimes_fails(plan, sequences):
        if chance.random() < 0.004:
            raise RuntimeError("the device hiccuped")
        return execute(plan, sequences)

    engine.runner.execute = sometimes_fails
    running: dict[str, int] = {}
    added = finished = aborted = failed = 0
    while added < REQUESTS or engine.has_unfinished_requests():
        while added < REQUESTS and len(running) < chance.randint(0, 120):
            number = chance.randrange(len(pool))
            engine.add_request(str(added), *pool[number][:2])
            running[str(added)] = number
            added += 1
        while running and chance.random() < 0.4:
            aborted += engine.abort_request(chance.choice(list(running)))
        for output in engine.step():
            if not output.finished:
                continue
            number = running.pop(output.request_id)
            reasons = {sample.finish_reason for sample in output.outputs}
            if "abort" in reasons:
                continue
            if "error" in reasons:
                failed += 1
                assert "hiccuped" in output.error
                continue
            assert bytes_of(output) == pool[number][2]
            finished += 1
        if chance.random() < 0.02:
            engine.scheduler.check()
        if chance.random() < 0.005:
            llm.reset_prefix_cache()
    llm.check()
    metrics = llm.metrics()
    assert finished + aborted + failed == REQUESTS and finished > REQUESTS // 2 and aborted > 100 and failed < 100
    assert metrics["preemptions"] > 0 and metrics["prefix_cache_hits"] > 0 and metrics["accepted_tokens"] > 0
    assert metrics["failed_steps"] > 0
    # Nothing of it stays: the next request has the bytes of a fresh engine.
    engine.runner.execute = execute
    prompt, params, alone = pool[5]
    assert bytes_of(llm.generate([prompt], params, use_tqdm=False)[0]) == alone
    assert llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)[0].error is None
