"""spec_verify, spec_schedule, markov_draft, ngram_propose, apply_token_bitmask_: against plain loops, and together."""

import math
from fractions import Fraction
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

DEVICES = ["quartz", "cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def tensor(values, dtype=None):
    return torch.tensor(values, dtype=dtype, device="quartz")


# ---- spec_verify -----------------------------------------------------------------------------------------------------


def verify_reference(target, drafts, position, ends):
    """Return (accepted, committed tokens, next token, next position) of one request."""
    out = []
    for j, token in enumerate(target):
        if token < 0:
            return sum(a == b for a, b in zip(out, drafts, strict=False)), out, -1, position + len(out)
        out.append(token)
        if j == len(drafts) or drafts[j] != token or token in ends:
            break
    return sum(a == b for a, b in zip(out, drafts, strict=False)), out, out[-1], position + len(out)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_verify_equals_a_plain_loop(data):
    token = st.integers(0, 3)
    requests = data.draw(st.lists(st.lists(token | st.just(-1), max_size=9), min_size=0, max_size=6))
    targets = [data.draw(st.lists(token | st.just(-1), min_size=len(d) + 1, max_size=len(d) + 1)) for d in requests]
    for drafts, target in zip(requests, targets, strict=True):
        same = data.draw(st.integers(0, len(drafts)))
        drafts[:same] = target[:same]
    ends = [data.draw(st.lists(st.integers(-1, 4), min_size=2, max_size=2)) for _ in requests]
    positions = [data.draw(st.integers(0, 10**6)) for _ in requests]
    cu = [0]
    for drafts in requests:
        cu.append(cu[-1] + len(drafts))
    arguments = [
        torch.tensor(list(chain(*targets)), dtype=torch.int64),
        torch.tensor(list(chain(*requests)), dtype=data.draw(st.sampled_from([torch.int64, torch.int32]))),
        torch.tensor(cu),
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(ends, dtype=torch.int64).view(-1, 2),
    ]
    for device in DEVICES:
        got = ops.spec_verify(*(a.to(device) for a in arguments))
        for r, (drafts, target) in enumerate(zip(requests, targets, strict=True)):
            accepted, out, following, position = verify_reference(target, drafts, positions[r], ends[r])
            assert [got.accepted[r], got.committed[r]] == [accepted, len(out)]
            assert [got.next_tokens[r], got.next_positions[r]] == [following, position]
            rows = got.tokens[cu[r] + r : cu[r + 1] + r + 1].tolist()
            assert rows == out + [-1] * (len(target) - len(out))


def test_end_token_in_the_middle_of_a_draft():  # F2
    eos = 9
    chunk = [1, 2, eos, 4, 5, 6]
    arguments = tensor(chunk), tensor(chunk[:5]), tensor([0, 5])
    got = ops.spec_verify(*arguments, end_tokens=tensor([[eos]]))
    assert (
        got.committed.item() == 3 and got.tokens.tolist() == [1, 2, eos, -1, -1, -1] and got.next_tokens.item() == eos
    )
    ignoring = ops.spec_verify(*arguments, end_tokens=tensor([[-1]]))
    assert ignoring.committed.item() == 6 and ignoring.accepted.item() == 5 and ignoring.tokens.tolist() == chunk


def test_bad_bounds_stay_inside():
    got = ops.spec_verify(tensor([1, 2, 3, 4]), tensor([1, 2]), tensor([-5, 10**12, 0]))
    assert got.tokens.shape == (4,) and (got.committed >= 1).all()


def test_nan_in_the_verifier():  # F3
    vocabulary = 129_280
    logits = torch.full((4, vocabulary), -50.0)
    logits[0] = math.nan
    logits[2, 7] = 0.0
    target = ops.sample(logits.to("quartz"), seeds=1, positions=torch.arange(4, device="quartz")).tokens
    assert target[0] == -1 and target[2] == 7
    got = ops.spec_verify(target, tensor([-1, 0]), tensor([0, 1, 2]))
    assert got.committed.tolist() == [0, 1] and got.next_tokens.tolist() == [-1, 7]  # -1 does not accept -1


def test_always_the_same_draft_keeps_the_target_distribution():  # F4
    p = torch.tensor([0.1, 0.6, 0.3])
    trials = 100_000
    for k in (1, 4):
        logits = p.log().to("quartz").expand(trials * (k + 1), -1)
        before = logits.clone()
        position = torch.arange(trials * (k + 1), device="quartz")
        target = ops.sample(logits, seeds=3, positions=position, logprobs=False).tokens
        cu = torch.arange(trials + 1, device="quartz") * k
        got = ops.spec_verify(target, torch.zeros(trials * k, dtype=torch.int64, device="quartz"), cu)
        assert same_bits(logits, before)
        first = (got.accepted > 0).double().mean().item()
        assert abs(first - 0.1) < 5 * math.sqrt(0.09 / trials)
        tokens = got.tokens[got.tokens >= 0].cpu()
        frequencies = torch.bincount(tokens, minlength=3).double() / len(tokens)
        torch.testing.assert_close(frequencies, p.double(), rtol=0, atol=5 * math.sqrt(0.25 / trials))


class Bigram:
    """A language model whose logits depend on the last token, so that decoding can be followed exactly."""

    def __init__(self, vocabulary=50, noise=0.0):
        generator = torch.Generator().manual_seed(1)
        table = torch.randn(vocabulary, vocabulary, generator=generator) * 2
        self.table = (table + noise * torch.randn(vocabulary, vocabulary, generator=generator)).to("quartz")

    def __call__(self, tokens):
        return self.table[tokens]


RULES = {"temperature": 0.9, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize("rules", [RULES, {"temperature": 0.0}, {"temperature": 1.0}])
@pytest.mark.parametrize("drafter_noise", [0.0, 0.5, 5.0])
def test_speculation_gives_the_tokens_of_plain_decoding(rules, drafter_noise):
    target, drafter, seed, length = Bigram(), Bigram(noise=drafter_noise), 11, 60

    def step(model, token, position):
        return ops.sample(model(tensor([token])), seeds=seed, positions=position, **rules).tokens.item()

    plain = [3]
    while len(plain) < length:
        plain.append(step(target, plain[-1], len(plain)))
    tokens, steps = [3], 0
    while len(tokens) < length:
        drafts = []
        for j in range(1 + steps % 5):
            drafts.append(step(drafter, (tokens + drafts)[-1], len(tokens) + j))
        inputs = tensor([tokens[-1], *drafts])
        positions = torch.arange(len(inputs), device="quartz") + len(tokens)
        drawn = ops.sample(target(inputs), seeds=seed, positions=positions, **rules).tokens
        got = ops.spec_verify(drawn, tensor(drafts), tensor([0, len(drafts)]), tensor([len(tokens)]))
        tokens += got.tokens[got.tokens >= 0].tolist()
        assert tokens[-1] == got.next_tokens.item() and len(tokens) == got.next_positions.item()
        steps += 1
    assert tokens[:length] == plain
    if drafter_noise == 0:
        assert steps < length / 2  # every draft accepted


# ---- spec_schedule ---------------------------------------------------------------------------------------------------


def schedule_reference(confidences, times, available):
    chances = []
    for r, row in enumerate(confidences.tolist()):
        chance = torch.tensor(1.0)
        for j, c in enumerate(row):
            chance = chance * torch.tensor(min(max(c, 0.0), 1.0) if c == c else 0.0)
            if j < available[r]:
                chances.append((-chance.item(), r * len(row) + j))
    chances.sort()
    unit, best, count, mass = 2**40, None, 0, 0

    def gain(number, total):
        rows = len(confidences) + number
        time = times[rows].item() if rows < len(times) else 0.0
        return float(len(confidences) * unit + total) / time if time > 0 else -1.0

    best = gain(0, 0)
    for i, (chance, _) in enumerate(chances):
        mass += math.floor(Fraction(-chance) * unit)
        if gain(i + 1, mass) > best:
            best, count = gain(i + 1, mass), i + 1
    lengths = [0] * len(confidences)
    for _, index in chances[:count]:
        lengths[index // confidences.shape[1]] += 1
    return lengths


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_schedule_equals_a_plain_loop(data):
    requests, drafts = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
    value = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, -1.0, math.nan]) | st.floats(0, 1, width=32)
    confidences = torch.tensor(data.draw(st.lists(value, min_size=requests * drafts, max_size=requests * drafts)))
    confidences = confidences.view(requests, drafts)
    steps = data.draw(st.integers(1, requests * (drafts + 1) + 2))
    slope, jump = data.draw(st.sampled_from([0.0, 0.01, 0.1, 1.0])), data.draw(st.integers(0, 30))
    times = torch.tensor([1 + slope * n + (n > jump) * 0.5 for n in range(steps)])
    available = torch.tensor(data.draw(st.lists(st.integers(0, drafts + 1), min_size=requests, max_size=requests)))
    want = schedule_reference(confidences, times, available.tolist())
    for device in DEVICES:
        got = ops.spec_schedule(confidences.to(device), times.to(device), available.to(device))
        assert got.tolist() == want


def test_schedule_special_cases():
    flat = torch.ones(100, device="quartz")
    sure = torch.ones(3, 4, device="quartz")
    assert ops.spec_schedule(sure, flat).tolist() == [4, 4, 4]  # time does not grow
    assert ops.spec_schedule(sure, flat[:9]).tolist() == [4, 1, 0]  # 3 + 5 rows at most; ties by index
    assert ops.spec_schedule(sure * 0, flat).tolist() == [0, 0, 0]
    assert ops.spec_schedule(sure, flat[:2]).tolist() == [0, 0, 0]
    assert ops.spec_schedule(torch.zeros(0, 4, device="quartz"), flat).tolist() == []
    assert ops.spec_schedule(torch.zeros(2, 0, device="quartz"), flat).tolist() == [0, 0]


# ---- markov_draft ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_markov_draft_is_the_loop_over_its_steps(dtype):
    generator = torch.Generator().manual_seed(2)
    requests, drafts, vocabulary, rank = 4, 3, 60, 8
    base = torch.randn(requests, drafts, vocabulary, generator=generator).to("quartz", dtype)
    w1, w2 = (torch.randn(vocabulary, rank, generator=generator).to("quartz", dtype) for _ in range(2))
    seeds, positions = tensor([5, 6, 7, 8]), tensor([10, 20, 30, 40])
    first = tensor([1, 2, 3, -1])
    got, logits = ops.markov_draft(base, w1, w2, first, 0.8, 20, 0.9, seeds=seeds, positions=positions)
    previous = first
    for j in range(drafts):
        step = base[:, j].float() + torch.mm(w1[previous.clamp(min=0)], w2.t())
        assert same_bits(logits[:, j].contiguous(), step.contiguous())
        wide = base[:, j].double() + w1[previous.clamp(min=0)].double() @ w2.double().t()
        torch.testing.assert_close(
            logits[:, j].double(), wide, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-4
        )
        previous = ops.sample(step, 0.8, 20, 0.9, seeds=seeds, positions=positions + j).tokens
        assert torch.equal(got[:, j], previous)
    assert torch.equal(base, base.clone())


def test_markov_draft_of_nothing():
    w = torch.zeros(5, 2, device="quartz")
    tokens, logits = ops.markov_draft(torch.zeros(2, 0, 5, device="quartz"), w, w, tensor([0, 1]), temperature=1.0)
    assert tokens.shape == (2, 0) and logits.shape == (2, 0, 5)


# ---- ngram_propose ---------------------------------------------------------------------------------------------------


def ngram_reference(tokens, drafts, shortest, longest, earliest):
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        suffix = tokens[len(tokens) - n :]
        ends = [e for e in range(n - 1, len(tokens) - 1) if tokens[e - n + 1 : e + 1] == suffix]
        if ends:
            return tokens[(ends[0] if earliest else ends[-1]) + 1 :][:drafts]
    return []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_ngram_equals_a_plain_loop(data):
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 40))
    values = data.draw(st.lists(st.integers(0, 2), min_size=rows * width, max_size=rows * width))
    tokens = torch.tensor(values, dtype=data.draw(st.sampled_from([torch.int64, torch.int32]))).view(rows, width)
    lengths = torch.tensor(data.draw(st.lists(st.integers(-1, width + 2), min_size=rows, max_size=rows)))
    drafts, shortest, earliest = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 4)), data.draw(st.booleans())
    longest = shortest + data.draw(st.integers(0, 4))
    for device in DEVICES:
        proposed, counts = ops.ngram_propose(
            tokens.to(device), drafts, shortest, longest, lengths.to(device), earliest=earliest
        )
        for r in range(rows):
            row = tokens[r, : max(0, min(width, lengths[r].item()))].tolist()
            want = ngram_reference(row, drafts, shortest, longest, earliest)
            assert counts[r] == len(want) and proposed[r].tolist() == want + [-1] * (drafts - len(want))


# ---- apply_token_bitmask_ --------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bitmask_changes_forbidden_tokens_alone(data):
    rows, vocabulary = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 200))
    dtype = data.draw(st.sampled_from(FLOATS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = torch.randn(rows, vocabulary, generator=generator).to(dtype)
    logits[:, ::7] = math.nan
    masks = data.draw(st.integers(0, rows))
    words = (vocabulary + 31) // 32 + data.draw(st.integers(0, 1))
    bitmask = torch.randint(-(2**31), 2**31, (masks, words), generator=generator).int()
    bitmask[:, ::2] = data.draw(st.sampled_from([0, -1, 0x5555]))
    indices = torch.randperm(rows, generator=generator)[:masks]
    if masks and data.draw(st.booleans()):
        indices[0] = data.draw(st.sampled_from([-1, rows, 10**9]))
    want = logits.clone()
    for mask, row in enumerate(indices.tolist()):
        for token in range(vocabulary):
            if 0 <= row < rows and not (bitmask[mask, token // 32].item() >> (token % 32)) & 1:
                want[row, token] = -math.inf
    for device in DEVICES:
        for layout in (logits.to(device), surrounded(logits.to(device))):
            got = ops.apply_token_bitmask_(layout, bitmask.to(device), indices.to(device))
            assert got is layout and same_bits(got, want)


def test_bitmask_of_every_row():
    logits, mask = torch.zeros(2, 40, device="quartz"), tensor([[-1, 0], [0, -1]], torch.int32)
    ops.apply_token_bitmask_(logits, mask)
    assert logits[0].isinf().tolist() == [False] * 32 + [True] * 8
    assert logits[1].isinf().tolist() == [True] * 32 + [False] * 8
    assert torch.equal(ops.sample(logits, temperature=0.0).tokens, tensor([0, 32]))


# ---- registrations and errors ----------------------------------------------------------------------------------------


def test_registrations():
    checks = ("test_schema", "test_faketensor")
    q = torch.ops.quartz
    calls = [
        (q.spec_verify.default, (tensor([1, 2, 3]), tensor([1]), tensor([0, 1, 1]))),
        (q.spec_schedule.default, (torch.rand(2, 3, device="quartz"), torch.ones(9, device="quartz"))),
        (q.ngram_propose.default, (tensor([[1, 2, 1]]), 3)),
        (q.apply_token_bitmask_.default, (torch.zeros(1, 8, device="quartz"), tensor([[3]], torch.int32))),
        (
            q.markov_draft.default,
            (torch.zeros(1, 2, 5, device="quartz"), *[torch.ones(5, 2, device="quartz")] * 2, tensor([0])),
        ),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=checks)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.spec_verify(tensor([1]), tensor([1]), tensor([0, 1])),
            "target_tokens must have one token for each",
        ),
        (lambda: ops.spec_verify(tensor([1.0]), tensor([1])[:0], tensor([0, 0])), "target_tokens must be integer"),
        (
            lambda: ops.spec_verify(tensor([1]), torch.tensor([1])[:0], tensor([0, 0])),
            "draft_tokens must be on the device",
        ),
        (lambda: ops.spec_schedule(tensor([[1]]), tensor([1.0])), "confidences must be floating"),
        (lambda: ops.spec_schedule(torch.ones(200, 100, device="quartz"), tensor([1.0])), "at most 16384 elements"),
        (lambda: ops.ngram_propose(tensor([1]), 3), r"tokens must be integer, of shape \(rows, width\)"),
        (lambda: ops.ngram_propose(tensor([[1]]), 3, 0), "shortest must be at least 1, got 0"),
        (lambda: ops.ngram_propose(tensor([[1]]), 3, 3, 2), "longest must be from shortest"),
        (lambda: ops.apply_token_bitmask_(tensor([[1.0]]), tensor([[1]])), "bitmask must be int32, got Long"),
        (
            lambda: ops.apply_token_bitmask_(torch.ones(1, 33, device="quartz"), tensor([[1]], torch.int32)),
            "bitmask must have a row of ceil",
        ),
        (
            lambda: ops.apply_token_bitmask_(torch.ones(2, 3, device="quartz").t(), tensor([[1]] * 3, torch.int32)),
            "logits must have contiguous rows",
        ),
        (
            lambda: ops.markov_draft(*[torch.ones(1, 1, 3, device="quartz")] * 2, tensor([[1.0]]), tensor([0])),
            "w1 must be floating",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(RuntimeError, match="quartz::.*" + message):
        call()
