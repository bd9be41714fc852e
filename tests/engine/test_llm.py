"""`LLM`: one result a prompt, in order; what concerns text; conversations. On a runner without a model."""

import pytest
from fake_runner import expected, make_engine
from torch_quartz import LLM, SamplingParams
from torch_quartz.engine.chat import INVALID, for_template
from words import word_tokenizer


@pytest.fixture
def llm():
    llm = LLM.from_engine(make_engine(tokenizer=word_tokenizer()))
    yield llm
    llm.check()


def text(tokens):
    return " ".join(f"w{token}" for token in tokens if token > 1)


PARAMS = SamplingParams(max_tokens=6, seed=3)


def test_one_result_a_prompt_in_order(llm):
    prompts = ["w3 w4", [5, 6], {"prompt": "w7"}, {"prompt_token_ids": [8], "prompt": "eight"}]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    ids = [[3, 4], [5, 6], [7], [8]]
    assert [output.prompt_token_ids for output in outputs] == ids
    assert [output.prompt for output in outputs] == ["w3 w4", None, "w7", "eight"]
    for output, prompt in zip(outputs, ids, strict=True):
        tokens, reason = expected(prompt, PARAMS, 3, 0)
        sample = output.outputs[0]
        assert output.finished and output.error is None
        assert (sample.token_ids, sample.finish_reason, sample.text) == (tokens, reason, text(tokens))


@pytest.mark.parametrize("prompts", ["w3 w4", [3, 4], {"prompt": "w3 w4"}, ["w3 w4"], [[3, 4]], ("w3 w4",)])
def test_one_prompt_in_any_form(llm, prompts):
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert len(outputs) == 1 and outputs[0].prompt_token_ids == [3, 4]


def test_arrays_and_tensors_are_prompts_as_lists_are(llm):
    import numpy as np
    import torch

    expected = [output.outputs[0].token_ids for output in llm.generate([[5, 6], [7, 8]], PARAMS, use_tqdm=False)]
    rows = [[5, 6], [7, 8]]
    for prompts in (np.array(rows), torch.tensor(rows), [np.array(r) for r in rows], [torch.tensor(r) for r in rows]):
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len(llm.generate(np.array([5, 6]), PARAMS, use_tqdm=False)) == 1
    assert len(llm.generate([torch.tensor([5]), torch.tensor([7])], PARAMS, use_tqdm=False)) == 2
    assert "token ids" in llm.generate([b"w3", "w3"], PARAMS, use_tqdm=False)[0].error


@pytest.mark.parametrize("priority", [2**70, None, 1.5])
def test_priorities_that_are_none_fail_alone(llm, priority):
    outputs = llm.generate(["w3", "w4"], PARAMS, use_tqdm=False, priority=[0, priority])
    assert outputs[0].error is None and "priority must be an integer" in outputs[1].error


def test_no_prompts(llm):
    assert llm.generate([], PARAMS) == []


def test_bad_prompts_fail_alone(llm):
    prompts = ["w3", "", [99], [3] * 64, "w4", {"x": 1}, ["w3"]]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    errors = [output.error for output in outputs]
    assert errors[0] is None and errors[4] is None
    for error, named in zip(
        errors[1:4] + errors[5:], ["at least one token", "got 99", "got 64 tokens", "keys", "token ids"], strict=True
    ):
        assert named in error
    assert all(output.finished and output.outputs[0].finish_reason in ("stop", "length", "error") for output in outputs)


def test_parameters_for_each_prompt(llm):
    params = [SamplingParams(max_tokens=n, seed=1, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate(["w3"] * 3, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(ValueError, match="sampling_params must be one for all prompts or one for each of the 2, got 3"):
        llm.generate(["w3"] * 2, params)
    with pytest.raises(ValueError, match="priority"):
        llm.generate(["w3"] * 2, PARAMS, priority=[1])


def test_parameters_of_a_wrong_type_fail_alone(llm):
    outputs = llm.generate(["w3", "w3"], [PARAMS, {"n": 1}], use_tqdm=False)
    assert outputs[0].error is None and "params must be a SamplingParams, got dict" in outputs[1].error


def test_validate_raises_before_anything_runs(llm):
    llm.validate(["w3", [4]], PARAMS)
    with pytest.raises(ValueError, match="at least one token"):
        llm.validate(["w3", ""], PARAMS)
    assert llm.metrics()["requests"] == 0


def test_unseeded_prompts_differ_and_seeded_ones_do_not(llm):
    outputs = llm.generate(["w3"] * 4, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4
    outputs = llm.generate(["w3"] * 4, PARAMS, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_progress_is_shown(llm, capsys):
    llm.generate(["w3"] * 3, PARAMS)
    assert "3/3" in capsys.readouterr().err


def test_stop_texts(llm):
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    tokens, _ = expected([3], params, 3, 0)
    stop = f"w{tokens[4]} w{tokens[5]}"
    first = next(i for i in range(20) if text(tokens[i : i + 2]).startswith(stop))
    for include in (False, True):
        changed = params.clone(stop=["never", stop], include_stop_str_in_output=include)
        sample = llm.generate(["w3"], changed, use_tqdm=False)[0].outputs[0]
        assert sample.token_ids == tokens[: first + 2]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        assert sample.text == text(tokens[: first + 2])[: None if include else -len(stop)]
    late = llm.generate(["w3"], params.clone(stop=stop, min_tokens=first + 2), use_tqdm=False)[0].outputs[0]
    assert len(late.token_ids) > first + 2  # complete before min_tokens: does not count


def test_stop_tokens_leave_no_text_unless_asked(llm):
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    tokens, _ = expected([3], params, 3, 0)
    stop = tokens[3]
    end = tokens.index(stop) + 1
    for include in (False, True):
        changed = params.clone(stop_token_ids=[stop], include_stop_str_in_output=include)
        sample = llm.generate(["w3"], changed, use_tqdm=False)[0].outputs[0]
        assert (sample.token_ids, sample.stop_reason) == (tokens[:end], stop)
        assert sample.text == text(tokens[: end if include else end - 1])


def test_log_probabilities_have_words(llm):
    sample = llm.generate(["w3"], PARAMS.clone(logprobs=0), use_tqdm=False)[0].outputs[0]
    assert len(sample.logprobs) == len(sample.token_ids)
    for token, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        assert list(entry) == [token] and entry[token].rank is None
        assert entry[token].decoded_token == llm.tokenizer.decode([token])


def test_without_text(llm):
    sample = llm.generate(["w3"], PARAMS.clone(detokenize=False), use_tqdm=False)[0].outputs[0]
    assert sample.text == "" and sample.token_ids


def test_bad_words_become_tokens(llm):
    request = llm.llm_engine.make_request("a", "w3", SamplingParams(bad_words=["w4", "w5 w6"]))
    assert request.bad_words_token_ids == ((4,), (5, 6))
    with pytest.raises(ValueError, match="allowed_token_ids must have a token that bad_words do not ban"):
        llm.llm_engine.make_request("a", "w3", SamplingParams(bad_words=["w4", "w5"], allowed_token_ids=[4, 5]))


def test_another_callers_requests_are_not_swallowed(llm):
    llm.llm_engine.add_request("mine", "w3", PARAMS)
    with pytest.raises(RuntimeError, match="1 unfinished requests of another caller"):
        llm.generate(["w3"], PARAMS)
    llm.llm_engine.abort_request("mine")
    assert llm.generate(["w3"], PARAMS, use_tqdm=False)[0].error is None


def test_interrupt_ends_what_was_asked(llm):
    def interrupt(plan):
        raise KeyboardInterrupt

    llm.llm_engine.runner.faults["execute"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["w3"] * 20, PARAMS, use_tqdm=False)
    llm.llm_engine.runner.faults.clear()
    assert [output.error for output in llm.generate(["w3"] * 3, PARAMS, use_tqdm=False)] == [None] * 3


# ---- conversations ----


def test_conversations(llm):
    one = [{"role": "user", "content": "w5 w6"}]
    assert llm.chat(one, PARAMS, use_tqdm=False)[0].prompt_token_ids == [5, 6, 63]
    two = [one, [{"role": "system", "content": "w9"}, {"role": "user", "content": "w10"}]]
    assert [output.prompt_token_ids for output in llm.chat(two, PARAMS, use_tqdm=False)] == [[5, 6, 63], [9, 10, 63]]
    output = llm.chat(one, PARAMS, use_tqdm=False, add_generation_prompt=False)[0]
    assert output.prompt_token_ids == [5, 6]


def test_tools_reach_the_template(llm):
    tools = [{"type": "function", "function": {"name": "w7", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "w7", "arguments": '{"w8": 3, "w9": 4}'}}
    messages = [
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "w6"},
    ]
    output = llm.chat(messages, PARAMS, tools=tools, use_tqdm=False)[0]
    assert output.prompt_token_ids == [7, 5, 8, 9, 6, 63]
    assert call["function"]["arguments"] == '{"w8": 3, "w9": 4}'  # the caller's own is not touched


def test_bad_conversations_fail_alone(llm):
    good = [{"role": "user", "content": "w5"}]
    outputs = llm.chat([good, [{"role": "bad", "content": ""}], [], [{"content": "w5"}], good], PARAMS, use_tqdm=False)
    errors = [output.error for output in outputs]
    assert errors[0] is errors[4] is None
    assert "no such role" in errors[1] and "not empty" in errors[2] and "'role'" in errors[3]


def test_no_template():
    llm = LLM.from_engine(make_engine(tokenizer=word_tokenizer(None)))
    messages = [{"role": "user", "content": "w5"}]
    assert "chat_template must be given" in llm.chat(messages, PARAMS, use_tqdm=False)[0].error
    output = llm.chat(messages, PARAMS, use_tqdm=False, chat_template="{{ messages[0].content }}")[0]
    assert output.prompt_token_ids == [5]
    llm = LLM.from_engine(make_engine())
    assert "no tokenizer" in llm.chat(messages, PARAMS, use_tqdm=False)[0].error


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ('{"a":3}', {"a": 3}),
        ({"a": 3}, {"a": 3}),
        ("", {}),
        ("  ", {}),
        (None, {}),
        ("null", {}),
        ('"{\\"a\\": 3}"', {"a": 3}),
        ('{"a":', {INVALID: '{"a":'}),
        ("[1, 2]", {INVALID: "[1, 2]"}),
        ([1, 2], {INVALID: "[1, 2]"}),
        ("[" * 100_000, {INVALID: "[" * 100_000}),
        ("3", {INVALID: "3"}),
    ],
)
def test_arguments_of_tool_calls(given, right):
    """Case J2: templates want a mapping, whatever came over the wire."""
    call = {"function": {"name": "f", "arguments": given}}
    message = for_template([{"role": "assistant", "tool_calls": [call]}])[0]
    assert message["tool_calls"][0]["function"]["arguments"] == right
    assert message["content"] == ""
