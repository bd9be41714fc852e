"""quartz::sample as a distribution: chi-square against float64 for every truncation, and what shared noise accepts.

Seeds are fixed, so a run is the same every time. Bounds are those that chance exceeds once in a million tests.
"""

import itertools
import math

import pytest
import torch
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits

VOCABULARY, COUNT = 60, 60_000
# Values at which each truncation takes away some of the tokens that the others leave.
TRUNCATIONS = {"top_k": 14, "top_p": 0.85, "min_p": 0.02}
COMBINATIONS = [c for n in range(4) for c in itertools.combinations(TRUNCATIONS, n)]
CONSTRAINTS = ["none", "bitmask", "bias", "penalties", "all"]


def chi_square_bound(degrees):
    """Return what chi-square exceeds with a chance of about 1e-6 (Wilson and Hilferty, 1931)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3


def draws(logits, count, seed=0, vary="positions", **arguments):
    """Return `count` draws from one row, at positions (or seeds, or sample indices) 0, 1, ..."""
    rows, index = logits.to("quartz").expand(count, -1), torch.arange(count, device="quartz")
    arguments = {"seeds": seed} | arguments | {vary: index}
    for name in ("bitmask", "bias_ids", "bias_values", "counts", "prompt_mask"):
        if name in arguments:
            arguments[name] = arguments[name].to("quartz").expand(count, -1)
    return ops.sample(rows, logprobs=False, **arguments).tokens.cpu()


def constraint(name, scale):
    """Return arguments of `ops.sample` for one row, and what they mean: allowed, bias, counts, prompt, penalties."""
    generator = torch.Generator().manual_seed(5)
    allowed, bias = torch.ones(VOCABULARY, dtype=torch.bool), torch.zeros(VOCABULARY, dtype=torch.float64)
    counts, prompt = torch.zeros(VOCABULARY, dtype=torch.int32), torch.zeros(VOCABULARY, dtype=torch.bool)
    arguments, penalties = {}, {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}
    if name in ("bitmask", "all"):
        allowed = torch.rand(VOCABULARY, generator=generator) < 0.6
        arguments["bitmask"] = ops.token_bits(allowed.nonzero().t(), VOCABULARY)
    if name in ("bias", "all"):
        ids = torch.tensor([3, 7, 7, 40, 59])
        values = torch.tensor([1.5, -2.0, 0.5, 2.25, -math.inf]) * scale
        bias = bias.index_add(0, ids, values.double())
        arguments |= {"bias_ids": ids[None], "bias_values": values[None]}
    if name in ("penalties", "all"):
        counts = torch.randint(0, 3, (VOCABULARY,), generator=generator).int()
        prompt = torch.rand(VOCABULARY, generator=generator) < 0.3
        penalties = {"repetition": 1.25, "frequency": 0.25 * scale, "presence": 0.5 * scale}
        arguments |= {f"{key}_penalty": value for key, value in penalties.items()}
        arguments |= {"counts": counts[None], "prompt_mask": ops.token_bits(prompt.nonzero().t(), VOCABULARY)}
    return arguments, (allowed, bias, counts, prompt, penalties)


def true_distribution(logits, meaning=None, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return the probabilities in float64, by the definition of each step and sorted softmaxes."""
    x = logits.double()
    if meaning is not None:
        allowed, bias, counts, prompt, penalties = meaning
        x = torch.where(allowed, x + bias, -math.inf)
        repeated = torch.where(x > 0, x / penalties["repetition"], x * penalties["repetition"])
        x = torch.where(prompt | (counts > 0), repeated, x)
        x = x - penalties["frequency"] * counts - penalties["presence"] * (counts > 0)
    x = x / temperature
    if min_p:
        x = x.masked_fill(x < x.max() + math.log(min_p), -math.inf)
    order = x.argsort(descending=True, stable=True)
    if top_k:
        x[order[top_k:]] = -math.inf
    if top_p < 1:
        p = torch.softmax(x, -1)[order]
        x[order[(p.cumsum(0) - p) >= top_p]] = -math.inf
    return torch.softmax(x, -1)


def chi_square(tokens, p):
    """Return the statistic and its degrees of freedom. Tokens expected less than ten times are one class."""
    expected = p * len(tokens)
    seen = torch.bincount(tokens, minlength=len(p)).double()
    assert not seen[p == 0].any(), "a token of probability 0 was drawn"
    common = expected >= 10
    observed = torch.cat([seen[common], seen[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return ((observed - wanted) ** 2 / wanted).sum().item(), len(wanted) - 1


def follows(tokens, p):
    statistic, degrees = chi_square(tokens, p)
    assert degrees > 1 and statistic < chi_square_bound(degrees), f"chi-square {statistic:.1f} of {degrees} degrees"


def some_logits(seed=11, scale=2.0):
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("limits", CONSTRAINTS)
@pytest.mark.parametrize("names", COMBINATIONS, ids=lambda names: "+".join(names) or "plain")
def test_every_truncation(names, limits, temperature):
    logits = some_logits(scale=1.6 * temperature)  # so that each truncation has tokens to take away and to leave
    truncation = {name: TRUNCATIONS[name] for name in names}
    arguments, meaning = constraint(limits, temperature)
    p = true_distribution(logits, meaning, temperature, **truncation)
    assert not names or (p > 0).sum() < (true_distribution(logits, meaning, temperature) > 0).sum()
    follows(draws(logits, COUNT, seed=17, temperature=temperature, **truncation, **arguments), p)


@pytest.mark.parametrize("vary", ["positions", "seeds", "sample_indices"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("names", COMBINATIONS, ids=lambda names: "+".join(names) or "plain")
def test_every_source_of_noise(names, dtype, vary):
    logits, truncation = some_logits(seed=12).to(dtype), {name: TRUNCATIONS[name] for name in names}
    follows(draws(logits, COUNT, seed=3, vary=vary, **truncation), true_distribution(logits, **truncation))


def test_the_statistic_notices_a_wrong_distribution():
    tokens = draws(some_logits(), 200_000, seed=17)
    follows(tokens, true_distribution(some_logits()))
    for wrong in ({"temperature": 1.02}, {"temperature": 0.98}):
        statistic, degrees = chi_square(tokens, true_distribution(some_logits(), **wrong))
        assert statistic > chi_square_bound(degrees)
    with pytest.raises(AssertionError, match="probability 0"):
        chi_square(tokens, true_distribution(some_logits(), top_k=20))


@pytest.mark.parametrize("vary", ["seeds", "positions", "sample_indices"])
def test_draws_of_different_seeds_positions_and_indices_are_independent(vary):
    tokens = draws(torch.zeros(8), 40_000, vary=vary)
    pairs = torch.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64).double()
    assert ((pairs - pairs.mean()) ** 2 / pairs.mean()).sum() < chi_square_bound(63)


def test_rare_tokens_are_drawn_as_often_as_they_should():
    # 2^-12 of the mass in 4096 tokens: each is rarer than a 32-bit uniform's coarse end would resolve well.
    logits = torch.cat([torch.zeros(1), torch.full((4096,), -24 * math.log(2))])
    count = 400_000
    rare = (draws(logits, count, seed=5) > 0).sum().item()
    expected = count * 4096 * 2**-24 / (1 + 4096 * 2**-24)
    assert abs(rare - expected) < 5 * math.sqrt(expected)


# ---- shared noise ----------------------------------------------------------------------------------------------------

# Pairs of distributions over 200 tokens: what a maximal coupling accepts (1 - TV), and the logits' scale, large where a
# draft of the most likely token alone would do well.
COUPLINGS = [(0.884, 1.6), (0.742, 1.5), (0.803, 3.5), (0.913, 4.0)]
RULES = [{}, {"temperature": 0.7}, {"top_k": 30, "top_p": 0.9}, {"min_p": 0.03, "temperature": 1.3}]


def pair(overlap, scale):
    """Return logits of target and draft whose distributions share `overlap` of their mass, by bisection."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(200, generator=generator).double() * scale
    noise = torch.randn(200, generator=generator).double()
    low, high = 0.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        p, q = torch.softmax(target, -1), torch.softmax(target + middle * noise, -1)
        low, high = (middle, high) if torch.minimum(p, q).sum() > overlap else (low, middle)
    return target.float(), (target + low * noise).float()


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize(("overlap", "scale"), COUPLINGS)
def test_acceptance_reaches_the_coupling_bound(overlap, scale, rules):
    target, draft = pair(overlap, scale)
    p, q = (true_distribution(logits, **rules) for logits in (target, draft))
    if not rules:
        assert abs(torch.minimum(p, q).sum().item() - overlap) < 1e-4
    distance = (p - q).abs().sum().item() / 2
    bound, trials, drafts = (1 - distance) / (1 + distance), 10_000, 4
    # Every request verifies four drafts, drawn with the noise of their positions; then the target draws one more.
    before = target.clone()
    drawn = draws(target, trials * (drafts + 1), seed=5, **rules).view(trials, drafts + 1)
    proposed = draws(draft, trials * (drafts + 1), seed=5, **rules).view(trials, drafts + 1)[:, :drafts]
    assert same_bits(target, before)
    agree = (drawn[:, :drafts] == proposed).double().mean().item()
    chance = 4.9 * math.sqrt(0.25 / (trials * drafts))
    assert bound - chance < agree < 1 - distance + chance  # no coupling exceeds 1 - TV
    got = ops.spec_verify(
        drawn.flatten().to("quartz"),
        proposed.flatten().to("quartz"),
        torch.arange(trials + 1, device="quartz") * drafts,
    )
    accepted = got.accepted.double().mean().item()  # the lengths of runs of agreement
    assert accepted > sum(bound**j for j in range(1, drafts + 1)) - 4.9 * drafts * math.sqrt(0.25 / trials)
    # What comes out is the target's distribution, whatever was accepted.
    follows(got.tokens[got.tokens >= 0].cpu(), p)
    # A draft of the most likely token is accepted with its probability, less than shared noise reaches.
    alone = (drawn[:, 0] == draft.argmax()).double().mean().item()
    assert abs(alone - p[draft.argmax()].item()) < 4.9 * math.sqrt(0.25 / trials) and alone < agree


def test_independent_noise_accepts_less():
    """Drafts drawn with other noise are accepted with the chance of two independent draws being equal."""
    target, draft = pair(0.884, 1.6)
    p, q = true_distribution(target), true_distribution(draft)
    first, second = draws(target, 40_000, seed=5), draws(draft, 40_000, seed=6)
    agree = (first == second).double().mean().item()
    assert abs(agree - (p * q).sum().item()) < 4.9 * math.sqrt(0.25 / 40_000) and agree < 0.3
