"""The engine's loop on a runner without a model: what requests get, whatever is batched, drafted, aborted or broken."""

import random
import time

import pytest
import torch
from fake_runner import EOS, VOCABULARY, expected, finish, make_engine
from torch_quartz import SamplingParams
from torch_quartz.engine.requests import resolve_seed

WAYS = {
    "overlap": {},
    "no overlap": {"overlap": False},
    "drafts": {"max_drafts": 3},
    "drafts, no overlap": {"max_drafts": 2, "overlap": False},
    "chunks": {"max_num_batched_tokens": 12, "max_prefill_tokens_per_request": 3},
    "few blocks": {"num_blocks": 18},
    "few blocks, swap": {"num_blocks": 18, "host_blocks": 40},
    "few blocks, drafts": {"num_blocks": 18, "max_drafts": 4},
    "no prefix cache": {"enable_prefix_caching": False},
    "two slots": {"max_num_seqs": 2},
}


def prompts(count, chance):
    return [[chance.randrange(2, VOCABULARY) for _ in range(chance.randint(1, 30))] for _ in range(count)]


def parameters(number):
    kinds = ({}, {"min_tokens": 9}, {"stop_token_ids": [5, 9, 33]}, {"ignore_eos": True, "max_tokens": 30}, {"n": 3})
    return SamplingParams(**{"max_tokens": 12, "seed": number, **kinds[number % len(kinds)]})


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_a_plain_loop(way):
    engine = make_engine(**WAYS[way])
    chance = random.Random(1)
    asked = {f"r{i}": (prompt, parameters(i)) for i, prompt in enumerate(prompts(30, chance))}
    names = list(asked)
    done = {}
    while names or engine.has_unfinished_requests():
        for _ in range(chance.randint(0, 2)):
            if names:
                name = names.pop()
                engine.add_request(name, asked[name][0], asked[name][1])
        done |= {output.request_id: output for output in engine.step() if output.finished}
    engine.check()
    assert set(done) == set(asked)
    for name, (prompt, params) in asked.items():
        assert [sample.index for sample in done[name].outputs] == list(range(params.n))
        for sample in done[name].outputs:
            tokens, reason = expected(prompt, params, params.seed, sample.index, 64)
            assert (sample.token_ids, sample.finish_reason) == (tokens, reason), name
            is_eos = tokens[-1] == EOS and EOS not in params.stop_token_ids
            assert sample.stop_reason == (tokens[-1] if reason == "stop" and not is_eos else None)
    metrics = engine.metrics()
    assert metrics["generated_tokens"] == sum(len(s.token_ids) for output in done.values() for s in output.outputs)
    assert metrics["finished_requests"] == len(asked) and metrics["failed_steps"] == 0
    if "few blocks" in way:
        assert metrics["preemptions"] > 0
    if "drafts" in way:
        assert 0 < metrics["accepted_tokens"] < metrics["verified_tokens"]
        assert metrics["accepted_tokens"] == sum(output.metrics.num_accepted_tokens for output in done.values())


def test_unseeded_requests_differ_and_repeat_with_the_engines_seed():
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def run(seed):
        engine = make_engine(seed=seed)
        for i in range(3):
            engine.add_request(str(i), [3, 4, 5], params)
        done = finish(engine)
        return [done[str(i)].outputs[0].token_ids for i in range(3)]

    first = run(7)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert run(7) == first != run(8)
    assert run(None) != run(None)
    assert first[1] == expected([3, 4, 5], params, resolve_seed(None, 7, 1), 0)[0]


def test_identical_seeded_requests_get_identical_outputs_and_samples_differ():
    engine = make_engine()
    params = SamplingParams(n=4, seed=3, max_tokens=8, ignore_eos=True)
    for name in "ab":
        engine.add_request(name, [3, 4, 5], params)
    done = finish(engine)
    samples = [[sample.token_ids for sample in done[name].outputs] for name in "ab"]
    assert samples[0] == samples[1]
    assert len(set(map(tuple, samples[0]))) == 4


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_deltas_join_to_the_whole(max_drafts):
    engine = make_engine(max_drafts=max_drafts)
    for kind in ("delta", "cumulative", "final_only"):
        params = SamplingParams(n=2, seed=5, max_tokens=20, ignore_eos=True, logprobs=0, output_kind=kind)
        engine.add_request(kind, [7, 8], params)
    joined, seen, final = {0: [], 1: []}, {0: [], 1: []}, []
    logprobs = {0: [], 1: []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            for sample in output.outputs:
                if output.request_id == "delta":
                    joined[sample.index] += sample.token_ids
                    logprobs[sample.index] += sample.logprobs
                elif output.request_id == "cumulative":
                    assert sample.token_ids[: len(seen[sample.index])] == seen[sample.index]
                    seen[sample.index] = sample.token_ids
            if output.request_id == "final_only":
                final.append(output)
    assert len(final) == 1 and final[0].finished
    for sample in final[0].outputs:
        assert joined[sample.index] == seen[sample.index] == sample.token_ids
        assert logprobs[sample.index] == sample.logprobs
        values = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
        assert sample.cumulative_logprob == pytest.approx(sum(values))


# ---- refused requests ----


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([], {}, "at least one token"),
        ([3] * 64, {}, "shorter than max_model_len, which is 64"),
        ([VOCABULARY], {}, "between 0 and 63, got 64"),
        ([-1], {}, "between 0 and 63, got -1"),
        ("text", {}, "no tokenizer"),
        ({"prompt": "text"}, {}, "no tokenizer"),
        ({"tokens": [1]}, {}, "keys"),
        ({"cache_salt": "x"}, {}, "'prompt' or 'prompt_token_ids'"),
        ({"prompt_token_ids": [3], "cache_salt": 1}, {}, "cache_salt must be a text"),
        ([1.5], {}, "list of token ids"),
        (None, {}, "list of token ids"),
        ([3], {"stop": "x"}, "stop must not be given where the engine has no tokenizer"),
        ([3], {"bad_words": ["x"]}, "bad_words must not"),
        ([3], {"stop_token_ids": [VOCABULARY]}, "stop_token_ids must be token ids below the vocabulary"),
        ([3], {"allowed_token_ids": [VOCABULARY]}, "allowed_token_ids"),
        ([3], {"logit_bias": {VOCABULARY: 1.0}}, "logit_bias"),
        ([3], {"allowed_token_ids": [EOS], "min_tokens": 1}, "does not end the output"),
        ([3] * 60, {"min_tokens": 5}, "min_tokens must be at most the 4 tokens"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(prompt, params, named):
    engine = make_engine()
    with pytest.raises(ValueError, match=named):
        engine.add_request("a", prompt, SamplingParams(**params))
    assert not engine.has_unfinished_requests()
    engine.add_request("a", [3], SamplingParams(max_tokens=2))
    assert finish(engine)["a"].error is None


def test_request_ids_are_unique_while_they_run():
    engine = make_engine()
    engine.add_request("a", [3], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="request_id"):
        engine.add_request("a", [3])
    finish(engine)
    engine.add_request("a", [3], SamplingParams(max_tokens=2))
    assert finish(engine)["a"].finished


def test_priority_needs_its_policy():
    engine = make_engine()
    with pytest.raises(ValueError, match="priority"):
        engine.add_request("a", [3], priority=1)
    engine = make_engine(policy="priority", max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -1), ("middle", 0)):
        engine.add_request(name, [3], SamplingParams(max_tokens=3), priority=priority)
    assert list(finish(engine)) == ["high", "middle", "low"]


def test_longest_prompts_and_no_limit():
    engine = make_engine()
    engine.add_request("long", [3] * 63, SamplingParams(max_tokens=None, seed=0))
    engine.add_request("short", [3], SamplingParams(max_tokens=None, ignore_eos=True, seed=0))
    done = finish(engine)
    assert len(done["long"].outputs[0].token_ids) == 1
    assert len(done["short"].outputs[0].token_ids) == 63
    assert done["short"].outputs[0].finish_reason == "length"


# ---- aborts ----


def test_abort_says_what_there_is():
    engine = make_engine()
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=2)
    for name in "abc":
        engine.add_request(name, [3, 4], params)
    for _ in range(6):
        engine.step()
    assert engine.abort_request("b") and not engine.abort_request("b") and not engine.abort_request("unknown")
    done = finish(engine)
    assert not engine.abort_request("a")
    sample = done["b"].outputs[0]
    whole = expected([3, 4], params, 2, 0)[0]
    assert sample.finish_reason == "abort" and sample.token_ids == whole[: len(sample.token_ids)]
    assert done["a"].outputs[0].token_ids == done["c"].outputs[0].token_ids == whole
    assert engine.metrics()["aborted_requests"] == 1


@pytest.mark.parametrize("way", ["overlap", "no overlap", "chunks", "few blocks", "few blocks, swap", "drafts"])
def test_aborts_at_random_moments(way):
    """Queued, in prefill, between chunks, in decode, preempted: the others do not notice, no block is lost."""
    engine = make_engine(**WAYS[way])
    chance = random.Random(way)
    total = 0
    for round_ in range(40):
        asked = {f"{round_}-{i}": (prompt, parameters(i)) for i, prompt in enumerate(prompts(8, chance))}
        for name, (prompt, params) in asked.items():
            engine.add_request(name, prompt, params)
        done, aborted = {}, set()
        while engine.has_unfinished_requests():
            if chance.random() < 0.3:
                name = chance.choice(list(asked))
                if engine.abort_request([name, name]):
                    aborted.add(name)
            done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check()
        assert set(done) == set(asked)
        total += len(aborted)
        for name, (prompt, params) in asked.items():
            for sample in done[name].outputs:
                tokens, reason = expected(prompt, params, params.seed, sample.index, 64)
                if sample.finish_reason == "abort":
                    assert name in aborted and sample.token_ids == tokens[: len(sample.token_ids)]
                else:
                    assert (sample.token_ids, sample.finish_reason) == (tokens, reason)
    assert total > 40


# ---- faults ----


class Grammar:
    """Allows the tokens of a list in turn; may break."""

    def __init__(self, tokens, breaks=None):
        self.tokens, self.breaks = tokens, breaks

    def matcher(self):
        return Matcher(self.tokens, self.breaks)


class Matcher:
    def __init__(self, tokens, breaks):
        self.tokens, self.place, self.breaks = tokens, 0, breaks

    def fill(self, row):
        if self.breaks == "fill":
            raise RuntimeError("the grammar broke")
        row.zero_()
        token = self.tokens[self.place]
        row[token // 32] = torch.tensor(1 << (token % 32), dtype=torch.int64).to(torch.int32)

    @staticmethod
    def fill_batch(mask, entries):
        errors = []
        for matcher, first, drafts in entries:
            try:
                matcher.fill_drafts(mask[first:], drafts)
                errors.append(None)
            except RuntimeError as error:
                errors.append(error)
        return errors

    def fill_drafts(self, rows, drafts):
        start = self.place
        for i in range(len(drafts) + 1):
            if self.place == len(self.tokens):
                break
            self.fill(rows[i])
            if i == len(drafts) or drafts[i] != self.tokens[self.place]:
                break
            self.place += 1
        self.place = start

    def accept(self, tokens):
        if self.breaks == "accept" and self.place:
            raise RuntimeError("the grammar broke")
        for token in tokens:
            assert token == self.tokens[self.place]
            self.place += 1

    @property
    def is_finished(self):
        return self.place == len(self.tokens)


@pytest.mark.parametrize("way", ["overlap", "no overlap", "drafts", "few blocks", "few blocks, swap", "chunks"])
def test_grammars_constrain_their_requests_alone(way):
    engine = make_engine(**WAYS[way])
    allowed = [4, 40, 31, 32, 63, 4, 4]
    chance = random.Random(3)
    asked = {f"r{i}": (prompt, parameters(i)) for i, prompt in enumerate(prompts(12, chance))}
    for i, (name, (prompt, params)) in enumerate(asked.items()):
        request = engine.make_request(name, prompt, params)
        if i % 3 == 1:
            request.grammar = Grammar(allowed)
        elif i % 3 == 2 and i > 5:
            request.grammar = Grammar(allowed, breaks="fill" if i % 2 else "accept")
        engine.submit(request)
    done = finish(engine)
    for i, (name, (prompt, params)) in enumerate(asked.items()):
        for sample in done[name].outputs:
            if i % 3 == 1:
                length = 3 if 2 in params.stop_token_ids else len(allowed)
                assert (sample.token_ids, sample.finish_reason) == (allowed[:length], "stop")
            elif i % 3 == 2 and i > 5:
                assert sample.finish_reason == "error" and "the grammar broke" in sample.error
            else:
                assert (sample.token_ids, sample.finish_reason) == expected(prompt, params, params.seed, sample.index)


@pytest.mark.parametrize("way", ["overlap", "no overlap", "drafts", "chunks"])
def test_logits_without_numbers_fail_their_request_alone(way):
    engine = make_engine(nan=2, **WAYS[way])
    for i in range(10):
        engine.add_request(str(i), [3, 2 if i % 4 == 1 else 4, 5 + i], SamplingParams(max_tokens=9, seed=i))
    done = finish(engine)
    for i in range(10):
        sample = done[str(i)].outputs[0]
        prompt = [3, 2 if i % 4 == 1 else 4, 5 + i]
        assert (sample.token_ids, sample.finish_reason) == expected(prompt, SamplingParams(max_tokens=9), i, 0, nan=2)
        assert (sample.error is None) == (sample.finish_reason != "error")
    assert "no token could be drawn" in done["1"].error
    assert engine.metrics()["failed_requests"] == sum(output.error is not None for output in done.values()) >= 2


PLACES = ("execute", "sample", "wait")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["overlap", "no overlap", "drafts", "few blocks", "few blocks, swap", "chunks"])
def test_steps_that_fail_now_and_then_change_nothing(way, place):
    engine = make_engine(**WAYS[way])
    chance = random.Random(5)
    failed = []

    def fault(plan):
        # Seldom enough: three failures without a token between them give a sequence up.
        if plan.step_id % 4 == 2 and (not failed or plan.step_id > failed[-1] + 20):
            failed.append(plan.step_id)
            raise RuntimeError("the device hiccuped")

    engine.runner.faults[place] = fault
    asked = {f"r{i}": (prompt, parameters(i)) for i, prompt in enumerate(prompts(20, chance))}
    for name, (prompt, params) in asked.items():
        engine.add_request(name, prompt, params)
    done = finish(engine)
    assert len(failed) > 1
    for name, (prompt, params) in asked.items():
        for sample in done[name].outputs:
            assert (sample.token_ids, sample.finish_reason) == expected(prompt, params, params.seed, sample.index)
    metrics = engine.metrics()
    assert metrics["failed_steps"] == len(failed) and metrics["last_error"] == "RuntimeError: the device hiccuped"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["overlap", "no overlap", "chunks"])
def test_a_request_that_breaks_every_step_fails_alone(way, place):
    """Out of memory in prefill is of this kind: whoever works already is not given up for a newcomer."""
    engine = make_engine(**WAYS[way])
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    for i in range(4):
        engine.add_request(f"old{i}", [3, 4, 5 + i], params)
    for _ in range(8):
        engine.step()
    engine.add_request("bad", [9] * 20, params)
    bad = engine.find(4).key

    def fault(plan):
        if bad in plan.key.tolist():
            raise MemoryError("out of memory: 3.0 GiB asked, 1.0 GiB free")

    engine.runner.faults[place] = fault
    done = finish(engine)
    assert done["bad"].outputs[0].finish_reason == "error" and "3.0 GiB asked" in done["bad"].error
    for i in range(4):
        sample = done[f"old{i}"].outputs[0]
        assert (sample.token_ids, sample.finish_reason) == expected([3, 4, 5 + i], params, 1, 0)
    engine.add_request("later", [3], SamplingParams(max_tokens=3))
    assert finish(engine)["later"].error is None


@pytest.mark.parametrize("place", PLACES)
def test_a_device_that_always_fails_fails_every_request(place):
    engine = make_engine()
    engine.runner.faults[place] = lambda plan: 1 / 0
    for i in range(20):
        engine.add_request(str(i), [3, 4], SamplingParams(n=2))
    done = finish(engine, limit=500)
    assert len(done) == 20 and all("ZeroDivisionError" in sample.error for o in done.values() for sample in o.outputs)
    engine.runner.faults.clear()
    engine.add_request("after", [3, 4], SamplingParams(max_tokens=4))
    assert finish(engine)["after"].error is None


def test_a_broken_scheduler_is_replaced(monkeypatch):
    engine = make_engine()
    engine.add_request("a", [3, 4], SamplingParams())
    engine.add_request("b", [3, 4], SamplingParams())
    engine.step()

    class Broken:
        def __getattr__(self, name):
            raise RuntimeError("lost")

    engine.scheduler = Broken()
    done = {output.request_id: output for output in engine.step()}
    assert set(done) == {"a", "b"} and "lost" in done["a"].error
    engine.runner = type(engine.runner)(engine.runner.groups)
    engine.add_request("c", [3, 4], SamplingParams(max_tokens=3))
    assert finish(engine)["c"].error is None


@pytest.mark.parametrize("place", PLACES)
def test_interrupts_leave_a_working_engine(place):
    engine = make_engine()

    def interrupt(plan):
        raise KeyboardInterrupt

    engine.add_request("a", [3, 4], SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    engine.runner.faults[place] = interrupt
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            engine.step()
    engine.runner.faults.clear()
    engine.add_request("b", [3, 4], SamplingParams(max_tokens=3))
    done = finish(engine)
    assert "interrupted" in done["a"].error and done["b"].error is None


def test_ten_thousand_requests_in_the_queue():
    engine = make_engine(max_num_seqs=64, max_num_batched_tokens=256, num_blocks=256)
    for i in range(10_000):
        engine.add_request(str(i), [2 + i % 60, 3], SamplingParams(max_tokens=1, seed=i))
    assert engine.metrics()["num_waiting"] == 10_000
    assert engine.abort_request([str(i) for i in range(0, 10_000, 2)])
    done = finish(engine)
    assert len(done) == 10_000
    for i in range(1, 10_000, 2):
        assert done[str(i)].outputs[0].token_ids == expected([2 + i % 60, 3], SamplingParams(max_tokens=1), i, 0)[0]


def test_prometheus_text():
    pytest.importorskip("prometheus_client")
    engine = make_engine()
    engine.add_request("a", [3, 4], SamplingParams(max_tokens=5, ignore_eos=True))
    finish(engine)
    text = engine.prometheus()
    assert "torch_quartz_generated_tokens_total 5.0" in text
    assert "torch_quartz_num_running 0.0" in text
    assert 'torch_quartz_time_to_first_token_seconds_bucket{le="+Inf"} 1.0' in text


def test_queue_time_ends_when_the_first_step_is_launched():
    engine = make_engine()
    engine.runner.faults["execute"] = lambda plan: time.sleep(0.3)
    engine.add_request("a", [3, 4], SamplingParams(max_tokens=2, ignore_eos=True))
    metrics = finish(engine)["a"].metrics
    assert metrics.time_to_first_token >= 0.3 > metrics.queue_time


def test_request_metrics():
    engine = make_engine()
    for name in "ab":
        engine.add_request(name, [3] * 20, SamplingParams(max_tokens=5, ignore_eos=True))
        done = finish(engine)
    metrics = done["b"].metrics
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens, metrics.num_cached_tokens) == (20, 5, 16)
    assert done["b"].num_cached_tokens == 16
    assert 0 <= metrics.queue_time <= metrics.time_to_first_token <= metrics.e2e_latency
    assert metrics.time_per_output_token > 0 and metrics.acceptance_rate is None
    assert engine.metrics()["prefix_cache_hits"] == engine.metrics()["cached_tokens"] == 16
