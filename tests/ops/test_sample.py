"""quartz::sample: bits against plain loops, what must not change a row. Distributions: test_sample_statistics.py."""

import math

import numpy as np
import pytest
import sample_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

DEVICES = ["quartz", "cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def tensor(values, dtype=None):
    return torch.tensor(values, dtype=dtype, device="quartz")


def draws(logits, count, seed=0, **arguments):
    """Return `count` draws from one row, at positions 0, 1, ..."""
    rows = logits.to("quartz").expand(count, -1)
    return ops.sample(
        rows, seeds=seed, positions=torch.arange(count, device="quartz"), logprobs=False, **arguments
    ).tokens


# ---- bits ------------------------------------------------------------------------------------------------------------


def test_philox_known_answers():
    assert reference.philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert reference.philox((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert reference.philox(pi, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@st.composite
def requests(draw):
    vocabulary = draw(st.integers(1, 70))
    scale = draw(st.sampled_from([0.0, 1.0, 4.0, 40.0, 1e-39, 1e37]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = (generator.standard_normal(vocabulary) * scale).astype(np.float32)
    special = draw(st.sampled_from(["none", "integers", "nan", "all nan", "-inf", "+inf", "zeros"]))
    if special == "integers":
        logits = np.round(logits)
    elif special == "zeros":
        logits[::2] = -0.0
    elif special == "all nan":
        logits[:] = np.nan
    elif special != "none":
        logits[generator.random(vocabulary) < 0.4] = float(special)
    rules = {
        "temperature": draw(st.sampled_from([1.0, 0.0, 0.3, 2.5, 1e-4, 1e-12, 50.0])),
        "top_k": draw(st.sampled_from([0, 1, 3, 20, 1000, -1])),
        "top_p": draw(st.sampled_from([1.0, 0.9, 0.5, 1e-8, 0.0, 0.999])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "position": draw(st.integers(0, 2**32 - 1)),
        "sample_index": draw(st.integers(0, 100)),
    }
    extras = {}
    if draw(st.booleans()):
        extras["bitmask"] = generator.random(vocabulary) < 0.7
    if draw(st.booleans()):
        ids = generator.integers(-1, vocabulary + 1, 4)
        extras["bias"] = [
            (int(i), float(np.float32(v))) for i, v in zip(ids, generator.standard_normal(4) * 3, strict=True)
        ]
        if draw(st.booleans()):
            extras["bias"][1] = (extras["bias"][1][0], -math.inf)
    if draw(st.booleans()):
        extras["count"] = generator.integers(0, 4, vocabulary) * (generator.random(vocabulary) < 0.5)
        extras["prompt"] = generator.random(vocabulary) < 0.3
        extras |= {"repetition": 1.3, "frequency": 0.2, "presence": draw(st.sampled_from([0.0, 0.7]))}
    return logits, rules, extras


def keywords(logits, rules, extras):
    """Return the arguments of `ops.sample` for one row."""
    vocabulary = len(logits)
    arguments = {name: rules[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    arguments |= {"seeds": rules["seed"], "positions": rules["position"], "sample_indices": rules["sample_index"]}
    if "bitmask" in extras:
        arguments["bitmask"] = ops.token_bits(
            tensor([np.flatnonzero(extras["bitmask"]).tolist()], torch.int64), vocabulary
        )
    if "bias" in extras:
        ids, values = zip(*extras["bias"], strict=True)
        arguments |= {"bias_ids": tensor([ids]), "bias_values": tensor([values], torch.float32)}
    if "count" in extras:
        arguments["counts"] = tensor(extras["count"][None].tolist(), torch.int32)
        prompt = np.flatnonzero(extras["prompt"]).tolist()
        arguments["prompt_mask"] = ops.token_bits(tensor([prompt], torch.int64), vocabulary)
        for name in ("repetition", "frequency", "presence"):
            arguments[f"{name}_penalty"] = extras[name]
    return arguments


@settings(max_examples=250, deadline=None)
@given(requests())
def test_bits_equal_plain_loops(request_):
    logits, rules, extras = request_
    got = ops.sample(tensor(logits[None].tolist(), torch.float32), **keywords(*request_))
    token, raw, logprob = reference.sample(logits, **rules, **extras)
    assert got.tokens.item() == token
    assert reference.bits(got.raw_logprobs.item()) == reference.bits(raw)
    assert reference.bits(got.logprobs.item()) == reference.bits(logprob)


def batch_arguments(rows, vocabulary, generator):
    """Return arguments of every kind for a batch, on the CPU."""

    def number(choices, dtype):
        return torch.tensor(choices, dtype=dtype)[torch.randint(len(choices), (rows,), generator=generator)]

    tokens = torch.randint(-1, vocabulary, (rows, 12), generator=generator)
    return {
        "temperature": number([0.0, 0.6, 1.0, 1.0, 3.0], torch.float32),
        "top_k": number([0, 1, 5, 40, 700], torch.int64),
        "top_p": number([1.0, 0.95, 0.3, 0.0], torch.float32),
        "min_p": number([0.0, 0.0, 0.1], torch.float32),
        "seeds": torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        "positions": torch.randint(0, 5000, (rows,), generator=generator),
        "sample_indices": number([0, 1, 2], torch.int64),
        "bitmask": torch.randint(-(2**31), 2**31, (rows, (vocabulary + 31) // 32), generator=generator).int(),
        "bias_ids": tokens[:, :3],
        "bias_values": torch.randn(rows, 3, generator=generator),
        "repetition_penalty": number([1.0, 1.2], torch.float32),
        "frequency_penalty": number([0.0, 0.3], torch.float32),
        "presence_penalty": number([0.0, 0.5], torch.float32),
        "counts": ops.count_tokens(tokens, vocabulary),
        "prompt_mask": ops.token_bits(tokens.flip(0), vocabulary),
        "pending": tokens[:, 5:7],
    }


def equal(first, second):
    return all(same_bits(a, b) for a, b in zip(first, second, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_row_depends_on_itself_alone(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    rows, vocabulary = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([3, 64, 130, 1000]))
    dtype, place = data.draw(st.sampled_from(FLOATS)), data.draw(st.integers(0, rows - 1))
    logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype)
    arguments = batch_arguments(rows, vocabulary, generator)
    everything = {name: value.to("quartz") for name, value in arguments.items()}
    alone = ops.sample(
        logits[place : place + 1].to("quartz"), **{k: v[place : place + 1] for k, v in everything.items()}, top_n=3
    )
    logits[torch.arange(rows) != place] = math.nan
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.sampled_from([1, 3])))
        for layout in (logits.to("quartz"), surrounded(logits.to("quartz")), logits.to("quartz").t().contiguous().t()):
            batch = ops.sample(layout, **everything, top_n=3)
            assert equal([part[place : place + 1] for part in batch], alone)
    finally:
        torch.set_num_threads(threads)


def test_instruction_sets_and_devices_agree(instruction_sets):
    generator = torch.Generator().manual_seed(3)
    logits, arguments = torch.randn(40, 777, generator=generator) * 4, batch_arguments(40, 777, generator)
    results = []
    for _ in instruction_sets():
        for device in DEVICES:
            on_device = {name: value.to(device) for name, value in arguments.items()}
            results.append(ops.sample(logits.to(device), **on_device, top_n=5))
            assert results[-1].tokens.device.type == device
    assert all(equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", FLOATS)
def test_arguments_are_not_changed(dtype):
    generator = torch.Generator().manual_seed(4)
    logits, arguments = torch.randn(5, 100, generator=generator).to(dtype), batch_arguments(5, 100, generator)
    on_device = {name: value.to("quartz") for name, value in arguments.items()}
    there = logits.to("quartz")
    ops.sample(there, **on_device, top_n=2)
    assert same_bits(there, logits) and all(same_bits(on_device[name], arguments[name]) for name in arguments)


def test_slots_choose_the_rows_of_the_tables():
    generator = torch.Generator().manual_seed(5)
    logits, arguments = (torch.randn(4, 90, generator=generator) * 3).to("quartz"), batch_arguments(4, 90, generator)
    arguments = {name: value.to("quartz") for name, value in arguments.items()}
    order = tensor([2, 0, 3, 1])
    want = ops.sample(logits, **arguments)
    tables = {
        name: torch.empty_like(arguments[name]).index_copy(0, order, arguments[name])
        for name in ("counts", "prompt_mask")
    }
    assert equal(ops.sample(logits, **arguments | tables, slots=order), want)
    none = {name: value for name, value in arguments.items() if name not in ("counts", "prompt_mask")}
    assert equal(ops.sample(logits, **arguments, slots=tensor([-1, 4, 99, -7])), ops.sample(logits, **none))


def test_pending_tokens_count_as_generated():
    generator = torch.Generator().manual_seed(6)
    logits, arguments = (torch.randn(6, 50, generator=generator) * 3).to("quartz"), batch_arguments(6, 50, generator)
    arguments = {name: value.to("quartz") for name, value in arguments.items()}
    pending = arguments.pop("pending")
    counts = arguments["counts"] + ops.count_tokens(pending, 50)
    assert equal(ops.sample(logits, **arguments, pending=pending), ops.sample(logits, **arguments | {"counts": counts}))


# ---- reported cases and bad input ------------------------------------------------------------------------------------


def test_a_token_of_probability_zero_is_never_drawn():  # E1
    one = torch.full((32_000,), -math.inf)
    one[1] = 0
    assert (draws(one, 1000, top_k=2**30, top_p=1.0) == 1).all()
    tokens = draws(torch.tensor([0.33, 0.34, 0, 0.33]).log(), 300_000)
    assert set(tokens.unique().tolist()) == {0, 1, 3}
    runs = torch.full((1000,), -math.inf)
    runs[300:303] = 0
    for arguments in ({}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 0.5}):
        assert set(draws(runs, 2000, **arguments).unique().tolist()) <= {300, 301, 302}


@pytest.mark.parametrize(
    "arguments", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9}, {"temperature": 0.0}]
)
def test_a_nan_row_among_good_rows(arguments):  # E3
    good = torch.randn(4, 32_000, generator=torch.Generator().manual_seed(0)) * 3
    bad, one, nothing = good.clone(), good.clone(), good.clone()
    bad[1], nothing[1], one[1, 77] = math.nan, -math.inf, math.nan
    want = ops.sample(good.to("quartz"), seeds=3, top_n=4, **arguments)
    for logits in (bad, nothing):
        got = ops.sample(logits.to("quartz"), seeds=3, top_n=4, **arguments)
        assert all(same_bits(a[[0, 2, 3]], b[[0, 2, 3]]) for a, b in zip(got, want, strict=True))
        assert got.tokens[1] == -1 and got.raw_logprobs[1] == -math.inf and got.logprobs[1] == -math.inf
        assert (got.top_ids[1] == -1).all() and (got.top_logprobs[1] == -math.inf).all()
    masked = one.clone()
    masked[1, 77] = -math.inf
    assert equal(
        ops.sample(one.to("quartz"), seeds=3, top_n=4, **arguments),
        ops.sample(masked.to("quartz"), seeds=3, top_n=4, **arguments),
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-38, 1e-45, 0.0, -1.0, math.nan])
def test_tiny_temperature_takes_the_largest(dtype, temperature):  # E5
    logits = torch.linspace(-5, 10, 500).to(dtype)
    logits[123] = 11
    assert (draws(logits, 50, temperature=temperature) == 123).all()


def test_minus_infinity_in_a_mixed_batch_and_contradicting_constraints():  # E6
    logits = torch.full((2, 100), -math.inf)
    logits[:, [5, 6]] = torch.tensor([1.0, 2.0])
    tokens = ops.sample(logits.to("quartz"), temperature=tensor([0.0, 1.0])).tokens
    assert tokens[0] == 6 and tokens[1] in (5, 6)
    banned = {"bias_ids": tensor([[5, 6]] * 2), "bias_values": torch.full((2, 2), -math.inf, device="quartz")}
    allowed = ops.token_bits(tensor([[5, 6]] * 2), 100)
    assert (ops.sample(torch.zeros(2, 100, device="quartz"), bitmask=allowed, **banned).tokens == -1).all()
    raised = banned | {"bias_values": torch.full((2, 2), math.inf, device="quartz")}
    assert (ops.sample(logits.to("quartz"), bitmask=~allowed, **raised).tokens == -1).all()  # a bias allows nothing


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("top_p", [0.0, 1e-8, 1e-4, 1e-3, -1.0])
def test_top_p_near_zero_keeps_the_most_likely(dtype, top_k, top_p):  # E7
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1000] = 12
    assert (draws(logits, 20, top_k=top_k, top_p=top_p) == 1000).all()


def test_a_large_vocabulary_of_equal_logits():  # E9
    logits = torch.zeros(1, 131_072, dtype=torch.bfloat16, device="quartz")
    got = ops.sample(logits.expand(400, -1), top_p=0.9, positions=torch.arange(400, device="quartz"))
    kept = 117_965  # the lowest ids
    assert got.tokens.max() < kept and got.tokens.min() >= 0
    assert abs(got.tokens.double().mean().item() - kept / 2) < 5 * kept / math.sqrt(12 * 400)
    torch.testing.assert_close(got.raw_logprobs.cpu(), torch.full((400,), -math.log(131_072)))
    torch.testing.assert_close(got.logprobs.cpu(), torch.full((400,), -math.log(kept)))


def test_equal_logits_go_to_the_lower_id():
    logits = tensor([[1.0, 3.0, 3.0, 3.0, 2.0]] * 64)
    positions = torch.arange(64, device="quartz")
    assert (ops.sample(logits, temperature=0.0).tokens == 1).all()
    assert set(ops.sample(logits, top_k=2, positions=positions).tokens.tolist()) == {1, 2}
    assert set(ops.sample(logits, top_p=0.5, positions=positions).tokens.tolist()) == {1, 2}
    assert ops.sample(logits, top_n=4).top_ids[0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", FLOATS)
def test_logprobs(dtype):  # F6, J4: one a token, no NaN
    generator = torch.Generator().manual_seed(9)
    logits = (torch.randn(7, 5000, generator=generator) * 3).to(dtype)
    got = ops.sample(logits.to("quartz"), top_k=1, top_n=5)
    wide = torch.log_softmax(logits.double(), -1)
    top = wide.topk(5, -1)
    torch.testing.assert_close(
        got.raw_logprobs.cpu().double(), wide.gather(1, got.tokens.cpu()[:, None])[:, 0], rtol=2e-6, atol=2e-6
    )
    torch.testing.assert_close(got.top_logprobs.cpu().double(), top.values, rtol=2e-6, atol=2e-6)
    assert (got.logprobs == 0).all() and not got.top_logprobs.isnan().any()
    cold = ops.sample(logits.to("quartz"), temperature=0.0)
    assert same_bits(cold.raw_logprobs, got.top_logprobs[:, 0].contiguous()) and same_bits(
        cold.logprobs, cold.raw_logprobs
    )
    few = ops.sample(tensor([[0.0, -math.inf, 1.0]]), top_n=5)
    assert few.top_ids.tolist() == [[2, 0, -1, -1, -1]] and few.top_logprobs[0, 2:].tolist() == [-math.inf] * 3
    none = ops.sample(logits.to("quartz"), logprobs=False)
    assert none.raw_logprobs.numel() == none.logprobs.numel() == none.top_ids.numel() == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_token_logprobs_have_the_bits_of_sample(dtype):
    generator = torch.Generator().manual_seed(12)
    logits = (torch.randn(30, 500, generator=generator) * 3).to("quartz", dtype)
    got = ops.sample(logits, 0.7, 40, 0.9, seeds=5, positions=torch.arange(30, device="quartz"), top_n=3)
    assert same_bits(ops.token_logprobs(logits, got.tokens), got.raw_logprobs)
    assert same_bits(ops.token_logprobs(logits, got.top_ids[:, 2]), got.top_logprobs[:, 2].contiguous())
    odd = tensor([[0.0, -math.inf, math.nan, 0.0]] * 4)
    assert ops.token_logprobs(odd, tensor([1, 2, 4, -1])).tolist() == [-math.inf] * 4


@pytest.mark.parametrize("dtype", FLOATS)
def test_token_logprobs_have_a_gradient(dtype):
    generator = torch.Generator().manual_seed(13)
    values, weights = torch.randn(5, 70, generator=generator).to(dtype), torch.randn(5, generator=generator)
    tokens = torch.tensor([3, 69, 0, 70, -1])  # the last two are outside the vocabulary and have no gradient
    logits = values.to("quartz").requires_grad_()
    with torch.enable_grad():
        ops.token_logprobs(logits, tokens.to("quartz")).backward(weights.to("quartz"))
    wide = values.double().requires_grad_()
    torch.log_softmax(wide, -1)[:3].gather(1, tokens[:3, None])[:, 0].backward(weights[:3].double())
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(logits.grad.cpu().double(), wide.grad, rtol=tolerance, atol=tolerance)
    assert not logits.grad[3:].any() and logits.grad.dtype == dtype


def test_nothing_depends_on_the_global_generator():
    logits = torch.randn(3, 100, device="quartz")
    state = torch.quartz.get_rng_state()
    first = ops.sample(logits, seeds=1)
    torch.manual_seed(999)
    torch.quartz.set_rng_state(state)
    assert equal(ops.sample(logits, seeds=1), first)
    assert torch.equal(torch.quartz.get_rng_state(), state)


def test_empty_batches():
    got = ops.sample(torch.zeros(0, 10, device="quartz"), temperature=1.0, top_k=3, top_n=2)
    assert got.tokens.shape == (0,) and got.top_ids.shape == (0, 2)
    one = ops.sample(torch.zeros(2, 1, device="quartz"), top_p=0.1)
    assert one.tokens.tolist() == [0, 0] and one.raw_logprobs.tolist() == [0, 0]


def test_token_tables():
    tokens = tensor([[3, 3, 70, -1], [100, 64, -5, 31]])
    counts = ops.count_tokens(tokens, 71)
    assert counts.dtype == torch.int32 and counts[0, 3] == 2 and counts[0, 70] == 1 and counts.sum() == 5
    bits = ops.token_bits(tokens, 71)
    assert bits.tolist() == [[8, 0, 64], [-(2**31), 0, 1]]


def test_registrations():
    logits = torch.randn(2, 8, device="quartz")
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.quartz.sample.default, (logits,), {"top_n": 2}, test_utils=checks)


@pytest.mark.parametrize(
    ("logits", "arguments", "message"),
    [
        (torch.ones(3), {}, r"logits must have the shape \(rows, vocabulary\), got \[3\]"),
        (torch.ones(1, 3).double(), {}, "logits must be float32, float16 or bfloat16, got Double"),
        (torch.ones(1, 0), {}, "logits must have 1 to 2.24 - 1 columns, got 0"),
        (
            torch.ones(2, 3),
            {"temperature": torch.ones(3)},
            "temperature must have one value for each row of logits, got",
        ),
        (torch.ones(2, 3), {"top_k": torch.ones(2)}, "top_k must be integer, got Float"),
        (torch.ones(2, 3), {"top_p": torch.ones(2).long()}, "top_p must be floating, got Long"),
        (torch.ones(2, 3), {"bitmask": torch.ones(2, 1).long()}, "bitmask must be int32, got Long"),
        (torch.ones(2, 33), {"bitmask": torch.ones(2, 1).int()}, r"bitmask must have the shape \(rows, ceil"),
        (torch.ones(2, 3), {"bias_ids": torch.ones(2, 1).long()}, "bias_ids must be given with bias_values"),
        (torch.ones(2, 3), {"counts": torch.ones(1, 3).int()}, "counts must have the shape"),
        (torch.ones(2, 3), {"top_n": 257}, "top_n must be from 0 to 256, got 257"),
    ],
)
def test_errors(logits, arguments, message):
    arguments = {k: v.to("quartz") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError, match="quartz::sample: " + message):
        ops.sample(logits.to("quartz"), **arguments)
    with pytest.raises(RuntimeError, match="seeds must be on the device of logits, quartz:0, got cpu"):
        ops.sample(torch.ones(1, 2, device="quartz"), seeds=torch.tensor([1]))
