"""`SamplingParams`: defaults, what is refused and how, immutability."""

import dataclasses
import math

import pytest
from torch_quartz import OutputKind, SamplingParams


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert params.skip_special_tokens and not params.ignore_eos and not params.include_stop_str_in_output
    assert params.output_kind is OutputKind.CUMULATIVE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("seed", 2**64),
        ("seed", 1.0),
        ("stop", [""]),
        ("stop", ""),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 12),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("logprobs", 257),
        ("prompt_logprobs", -1),
        ("logprobs_mode", "cooked"),
        ("ignore_eos", 1),
        ("detokenize", None),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [2**31]),
        ("structured_outputs", "json"),
        ("output_kind", "all"),
    ],
)
def test_refused_values_are_named(field, value):
    with pytest.raises(ValueError, match=field) as caught:
        SamplingParams(**{field: value})
    shown = value[0] if isinstance(value, list) and value else value
    if not isinstance(value, dict):
        assert repr(shown) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2, "temperature": 0}, "n must be 1 where temperature is 0"),
        ({"logprobs": 3, "logprobs_mode": "processed"}, "logprobs must be 0 where logprobs_mode"),
        ({"stop": "x", "detokenize": False}, "detokenize must be True"),
        ({"bad_words": ["x"], "detokenize": False}, "detokenize must be True"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens must be at most max_tokens, which is 3, got 4"),
    ],
)
def test_contradictions_are_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        SamplingParams(**fields)


def test_forms_of_values():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(output_kind="delta").output_kind is OutputKind.DELTA
    assert SamplingParams(logprobs=0, logprobs_mode="processed").logprobs == 0
    assert SamplingParams(max_tokens=None, min_tokens=1000).max_tokens is None
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1
    for tiny in (0, 1e-40, 1e-31):
        assert SamplingParams(temperature=tiny).greedy
    assert not SamplingParams(temperature=1e-12).greedy


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_immutable_with_changed_copies():
    params = SamplingParams(stop="x", logit_bias={1: 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    copy = params.clone(n=3, temperature=0.5)
    assert (copy.n, copy.stop, copy.logit_bias, params.n) == (3, ("x",), {1: 2.0}, 1)
    with pytest.raises(ValueError, match="n must be"):
        params.clone(n=0)


def test_lists_are_taken_once():
    bias, stops = {1: 2.0}, iter(["a"])
    params = SamplingParams(logit_bias=bias, stop=stops)
    bias[2] = 1.0
    assert params.logit_bias == {1: 2.0} and params.stop == ("a",)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 65537},
        {"top_k": 2**63},
        {"temperature": 10**400},
        {"stop": 5},
        {"stop_token_ids": 5.0},
        {"allowed_token_ids": 5.0},
        {"structured_outputs": {"jsn": 1}},
    ],
    ids=str,
)
def test_what_no_engine_takes_is_a_value_error(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(**fields)


def test_arrays_and_numbers_of_numpy():
    import numpy as np

    params = SamplingParams(temperature=np.float32(0.5), stop_token_ids=np.array([1, 2]), top_k=np.int64(3))
    assert params.stop_token_ids == (1, 2) and params.temperature == 0.5
