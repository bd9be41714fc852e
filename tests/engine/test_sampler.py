"""Sampling in the engine: every parameter does what a plain loop over single rows does, with drafts and without."""

import numpy as np
import pytest
import torch
from driver import Driver
from model_zoo import VOCABULARY, build
from torch_quartz.engine.sampling_params import SamplingParams
from torch_quartz.ops import count_tokens, sample, token_bits

PROMPT = [5, 9, 5, 7, 20, 33, 5, 9]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
STOP = (11, 12)

CASES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 1.5},
    "bias": {"temperature": 0.9, "logit_bias": {5: 3.0, 7: -4.0, 40: 2.5}},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [5, 7, 9, 20, 95]},
    "no early end": {"temperature": 1.0, "min_tokens": 6, "logit_bias": {11: 9.0}},
    "bad words": {"temperature": 0.0, "logit_bias": {30: 50.0, 31: 49.0}},
}
BAD_WORDS = {"bad words": ((30, 30), (31, 30, 31), (40,))}


@pytest.fixture(scope="module")
def model():
    return build("llama").to("quartz", torch.float32).eval()


def bias_of(case, params, ids, position):
    """Return ids and values that are added to the logits of the token at a position."""
    entries = list((params.logit_bias or {}).items())
    if position < len(PROMPT) + params.min_tokens:
        entries += [(token, -np.inf) for token in STOP]
    for word in BAD_WORDS.get(case, ()):
        if tuple(ids[len(ids) - len(word) + 1 :]) == word[:-1]:
            entries.append((word[-1], -np.inf))
    return entries


def plainly(model, case, params, index, count):
    """Draw token after token with a whole forward pass each."""
    ids = list(PROMPT)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids], device="quartz"), use_cache=False).logits[0, -1:]
        entries = bias_of(case, params, ids, len(ids))
        options = {}
        if entries:
            options["bias_ids"] = torch.tensor([[e[0] for e in entries]], device="quartz")
            options["bias_values"] = torch.tensor([[e[1] for e in entries]], device="quartz")
        if params.allowed_token_ids is not None:
            options["bitmask"] = token_bits(torch.tensor([params.allowed_token_ids], device="quartz"), VOCABULARY)
        output = torch.tensor([ids[len(PROMPT) :] or [-1]], device="quartz")
        drawn = sample(
            logits,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.seed,
            len(ids),
            sample_indices=index,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            counts=count_tokens(output, VOCABULARY),
            prompt_mask=token_bits(torch.tensor([PROMPT], device="quartz"), VOCABULARY),
            **options,
        )
        ids.append(int(drawn.tokens))
        if ids[-1] in STOP:
            break
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["plain", "drafts"])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_parameters(model, together, speculative):
    made = {
        case: SamplingParams(**{"seed": 40 + i, "max_tokens": 14, "logprobs": 1, **changes})
        for i, (case, changes) in enumerate(CASES.items())
    }
    driver = Driver(model, speculative=speculative)
    keys = {}
    for case, params in made.items():
        keys[case] = driver.add(PROMPT, params, STOP, BAD_WORDS.get(case, ()))
        if not together:
            driver.run()
    found = driver.run()
    for case, params in made.items():
        assert found[keys[case], 0]["tokens"] == plainly(model, case, params, 0, 14), case
    assert len(found[keys["no early end"], 0]["tokens"]) >= 7
    assert set(found[keys["allowed"], 0]["tokens"]) <= {5, 7, 9, 20, 95}
    if speculative is not None:
        assert driver.scheduler.stats()["drafts_accepted"] > 0


def test_samples_of_a_request(model):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=3, logprobs=0, frequency_penalty=0.3)
    driver = Driver(model)
    key = driver.add(PROMPT, params)
    found = driver.run()
    outputs = [found[key, index]["tokens"] for index in range(3)]
    assert outputs == [plainly(model, "seeded", params, index, 8) for index in range(3)]
    assert len({tuple(output) for output in outputs}) == 3


def test_nothing_left_ends_one_sequence(model):
    driver = Driver(model)
    # The only token that is allowed would end the output too early.
    params = SamplingParams(temperature=1.0, max_tokens=4, allowed_token_ids=[11], min_tokens=2, logprobs=0)
    bad = driver.add(PROMPT, params, STOP)
    good = driver.add(PROMPT, SamplingParams(temperature=0.0, max_tokens=4, logprobs=0))
    found = driver.run()
    assert found[bad, 0]["tokens"] == []
    assert len(found[good, 0]["tokens"]) == 4
