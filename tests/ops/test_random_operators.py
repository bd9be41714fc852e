"""Random operators of PyTorch on quartz: the counter's numbers, distributions, layouts, and PyTorch's semantics."""

import math

import pytest
import random_reference as reference
import torch
import torch.nn.functional as F
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

SEED = 0x1234567890ABC


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(SEED)


def generator_at(seed, offset):
    generator = torch.Generator("quartz").manual_seed(seed)
    generator.set_offset(offset)
    return generator


def filled(name, *sizes, dtype=torch.float32, generator=None):
    x = torch.empty(*sizes, dtype=dtype, device="quartz")
    arguments = {"uniform_": (-2.0, 3.0), "normal_": (0.5, 2.0), "exponential_": (1.5,), "bernoulli_": (0.3,)}[name]
    return getattr(x, name)(*arguments, generator=generator)


DRAWS = ("uniform_", "normal_", "exponential_", "bernoulli_")


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("seed", [0, 2**63 + 7])
@pytest.mark.parametrize("offset", [0, 2**32 - 3])
def test_formulas(seed, offset):
    def take(name, **options):
        return filled(name, 39, generator=generator_at(seed, offset), **options)

    def wanted(values, dtype=torch.float32):
        return torch.tensor([float(v) for v in values], dtype=torch.float64).to(dtype)

    assert same_bits(take("uniform_").cpu(), wanted(reference.uniform(seed, offset, 39, -2.0, 3.0)))
    assert same_bits(take("normal_").cpu(), wanted(reference.normal(seed, offset, 39, 0.5, 2.0)))
    assert same_bits(take("exponential_").cpu(), wanted(reference.exponential(seed, offset, 39, 1.5)))
    for dtype in (*FLOATS, torch.float64, torch.int32, torch.bool):
        bernoulli = wanted(reference.bernoulli(seed, offset, [0.3] * 39), dtype)
        assert torch.equal(take("bernoulli_", dtype=dtype).cpu(), bernoulli)
    for dtype in (torch.float16, torch.bfloat16):
        uniform = reference.uniform(seed, offset, 39, -2.0, 3.0, str(dtype).removeprefix("torch."))
        rounded = wanted(uniform, dtype)
        rounded[rounded >= 3] = -2
        assert same_bits(take("uniform_", dtype=dtype).cpu(), rounded)
        assert same_bits(
            take("normal_", dtype=dtype).cpu(), wanted(reference.normal(seed, offset, 39, 0.5, 2.0), dtype)
        )


@pytest.mark.parametrize("offset", [0, 2**32 - 3])
def test_formulas_float64(offset):
    for name in ("uniform", "normal", "exponential"):
        arguments = {"uniform": (-2.0, 3.0), "normal": (0.5, 2.0), "exponential": (1.5,)}[name]
        got = filled(f"{name}_", 39, dtype=torch.float64, generator=generator_at(SEED, offset)).cpu()
        want = getattr(reference, f"wide_{name}")(SEED, offset, 39, *arguments)
        assert got.tolist() == want, name


def test_float64_functions_are_accurate():
    words = reference.wide_words(SEED, 0, 20_000)
    v = [((word >> 12) + 0.5) * 2.0**-52 for word in words]
    got = torch.empty(20_000, dtype=torch.float64, device="quartz").exponential_().cpu()
    want = torch.tensor([-math.log(x) for x in v], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=4e-16, atol=2e-16)
    normal = torch.randn(10_000, dtype=torch.float64, device="quartz", generator=generator_at(SEED, 0)).cpu()
    turns = torch.tensor([(word >> 11) * 2.0**-53 for word in words[1:10_000:2]], dtype=torch.float64)
    radius = (2 * want[:10_000:2]).sqrt()
    torch.testing.assert_close(normal[0::2], radius * torch.cos(2 * math.pi * turns), rtol=0, atol=1e-14)
    torch.testing.assert_close(normal[1::2], radius * torch.sin(2 * math.pi * turns), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_layout_threads_and_instruction_set_do_not_matter(name, dtype, instruction_sets):
    want, threads = filled(name, 3, 5, 7, 41, dtype=dtype, generator=generator_at(SEED, 2)), torch.get_num_threads()
    try:
        for _ in instruction_sets():
            for count in (1, 3):
                torch.set_num_threads(count)
                for layout in ("plain", "channels last", "transposed", "surrounded", "every second"):
                    x = torch.empty(3, 5, 7, 41, dtype=dtype, device="quartz")
                    x = {
                        "plain": lambda x: x,
                        "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
                        "transposed": lambda x: torch.empty(41, 7, 5, 3, dtype=x.dtype, device="quartz").permute(
                            3, 2, 1, 0
                        ),
                        "surrounded": surrounded,
                        "every second": lambda x: torch.empty(3, 5, 7, 82, dtype=x.dtype, device="quartz")[..., ::2],
                    }[layout](x)
                    strides = x.stride()
                    arguments = {"uniform_": (-2.0, 3.0), "normal_": (0.5, 2.0), "exponential_": (1.5,)}.get(
                        name, (0.3,)
                    )
                    assert getattr(x, name)(*arguments, generator=generator_at(SEED, 2)) is x
                    assert x.stride() == strides and same_bits(x, want), layout
    finally:
        torch.set_num_threads(threads)


def test_the_counter_is_a_function_of_counts_alone():
    generator = torch.quartz.default_generators[0]
    uses = {
        lambda: torch.rand(9, device="quartz"): 3,
        lambda: torch.randn(9, device="quartz", dtype=torch.bfloat16): 3,
        lambda: torch.rand(9, device="quartz", dtype=torch.float64): 5,
        lambda: torch.randn(9, device="quartz", dtype=torch.complex64): 5,
        lambda: torch.empty(9, device="quartz", dtype=torch.float64).bernoulli_(0.5): 3,
        lambda: torch.bernoulli(torch.full((9,), 0.5, device="quartz")): 3,
        lambda: torch.multinomial(torch.ones(2, 9, device="quartz"), 4): 6,
        lambda: torch.multinomial(torch.ones(2, 9, device="quartz"), 5, True): 6,
        lambda: F.dropout(torch.ones(9, device="quartz")): 3,
        lambda: F.dropout(torch.ones(9, device="quartz"), training=False): 0,
        lambda: torch.rand(0, device="quartz"): 0,
        lambda: torch.randint(0, 9, (9,), device="quartz"): 0,
        lambda: torch.randperm(9, device="quartz"): 0,
        lambda: torch.poisson(torch.ones(9, device="quartz")): 0,
    }
    for draw, blocks in uses.items():
        before = generator.get_offset()
        draw()
        assert generator.get_offset() == before + blocks
    # What ops.uniform_ and the others take is what the generator has.
    offset = generator.get_offset()
    x = torch.rand(9, device="quartz")
    assert same_bits(x, ops.uniform_(torch.empty(9, device="quartz"), generator.initial_seed(), offset))


# ------------------------------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "cumulative"),
    [
        ("uniform_", lambda x: (x + 2) / 5),
        ("normal_", lambda x: torch.special.ndtr((x - 0.5) / 2)),
        ("exponential_", lambda x: 1 - torch.exp(-1.5 * x)),
    ],
)
def test_distributions(name, cumulative, dtype):
    x = filled(name, 400_001, dtype=dtype).cpu().double()
    p = cumulative(x.sort().values)
    steps = torch.arange(len(x)) / len(x)
    assert (p - steps).abs().max() < 2.7 / math.sqrt(len(x))  # Kolmogorov: exceeded with a chance of 1e-6
    assert torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1].abs() < 5 / math.sqrt(len(x))


def test_complex_numbers():
    z = torch.randn(200_000, dtype=torch.complex64, device="quartz").cpu()
    assert abs(z.abs().square().mean() - 1) < 0.02 and abs(z.real.square().mean() - 0.5) < 0.01
    u = torch.rand(1000, dtype=torch.complex128, device="quartz").cpu()
    assert (u.real >= 0).all() and (u.real < 1).all() and (u.imag >= 0).all() and u.imag.std() > 0.2


def test_bernoulli_of_a_tensor():
    p = torch.tensor([0.0, 1e-3, 0.3, 0.999, 1.0], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        drawn = torch.bernoulli(p.to(dtype).repeat(20_000).to("quartz")).view(-1, 5).mean(0).cpu().double()
        assert drawn[0] == 0 and drawn[4] == 1
        assert (drawn - p).abs().max() < 5 * (0.3 * 0.7 / 20_000) ** 0.5
    probabilities = [0.1 * i for i in range(11)]
    tensor = torch.tensor(probabilities, dtype=torch.float64, device="quartz")
    want = reference.bernoulli(SEED, 5, probabilities)
    assert torch.bernoulli(tensor, generator=generator_at(SEED, 5)).tolist() == want
    rows = torch.empty(3, 11, dtype=torch.int64, device="quartz").bernoulli_(tensor, generator=generator_at(SEED, 5))
    assert rows[0].tolist() == [int(x) for x in want]
    out = torch.empty(0, dtype=torch.bool, device="quartz")
    assert torch.bernoulli(tensor, generator=generator_at(SEED, 5), out=out).tolist() == [x == 1 for x in want]
    assert torch.bernoulli(tensor, 0.25, generator=generator_at(SEED, 5)).tolist() == reference.bernoulli(
        SEED, 5, [0.25] * 11
    )


# --------------------------------------------------------------------------------------------------------- multinomial


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial_formulas(dtype, replacement):
    rows = (torch.randn(5, 23, dtype=torch.float64) * 3).exp().to(dtype)
    rows[:, 4::5] = 0
    rows[1] *= 1e-4 if dtype == torch.float16 else 1e-30
    plain = rows.double().tolist()
    for samples in (1, 2, 7, 18):
        want = reference.multinomial(SEED, 2**32 - 4, plain, samples, replacement)
        for device_rows in (rows.to("quartz"), surrounded(rows.to("quartz")), rows.t().contiguous().to("quartz").t()):
            got = torch.multinomial(device_rows, samples, replacement, generator=generator_at(SEED, 2**32 - 4))
            assert got.dtype == torch.int64 and got.tolist() == want
    one = torch.multinomial(rows[0].to("quartz"), 3, replacement, generator=generator_at(SEED, 9))
    assert one.tolist() == reference.multinomial(SEED, 9, plain[:1], 3, replacement)[0]
    out = torch.empty(0, dtype=torch.int64, device="quartz")
    again = torch.multinomial(rows[0].to("quartz"), 3, replacement, generator=generator_at(SEED, 9), out=out)
    assert again is out and torch.equal(out, one)


def test_multinomial_does_not_depend_on_threads_or_instruction_set(instruction_sets):
    rows, threads = torch.rand(7, 30_011).exp().to("quartz"), torch.get_num_threads()
    results = []
    try:
        for _ in instruction_sets():
            for count in (1, 4):
                torch.set_num_threads(count)
                drawn = [
                    torch.multinomial(rows, n, r, generator=generator_at(3, 4))
                    for n, r in ((1, False), (50, False), (50, True))
                ]
                results.append(torch.cat(drawn, dim=1))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


def chi_square(drawn, p):
    """How far counts lie from their expectation, in standard deviations of chi-square's distribution."""
    counts, expected = torch.bincount(drawn.flatten(), minlength=len(p)).double(), p.double() * drawn.numel()
    assert counts[p == 0].sum() == 0
    statistic = ((counts - expected).square() / expected)[p > 0].sum().item()
    freedom = int((p > 0).sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_multinomial_follows_the_probabilities():
    p = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.1, 0.1, 0.05, 0.03, 0.02, 0.0])
    rows = (1000 * p).expand(100_000, 10).to("quartz")  # need not add up to 1
    assert abs(chi_square(torch.multinomial(rows, 1).cpu(), p)) < 5
    assert abs(chi_square(torch.multinomial(p.to("quartz"), 100_000, True).cpu(), p)) < 5
    pairs = torch.multinomial(rows, 2).cpu()
    assert (pairs[:, 0] != pairs[:, 1]).all()
    assert abs(chi_square(pairs[:, 0], p)) < 5
    after = pairs[pairs[:, 0] == 1, 1]  # the second of those whose first was category 1
    assert abs(chi_square(after, torch.where(torch.arange(10) == 1, 0.0, 2 * p))) < 5
    every = torch.multinomial(rows[:50], 7).cpu().sort(dim=1).values
    assert (every == torch.tensor([1, 2, 4, 5, 6, 7, 8])).all()


def test_multinomial_of_many_categories():
    p = torch.zeros(2**24, device="quartz")
    p[[5, 2**24 - 1]] = 1.0
    drawn = torch.multinomial(p, 2).sort().values
    assert drawn.tolist() == [5, 2**24 - 1]
    assert set(torch.multinomial(p, 100, True).tolist()) == {5, 2**24 - 1}
    with pytest.raises(RuntimeError, match=r"2\^24"):
        torch.multinomial(torch.ones(2**24 + 1, device="quartz"), 1)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_multinomial_refuses_what_is_no_probability(replacement, bad):
    rows = torch.ones(3, 4, device="quartz")
    rows[1, 2] = bad
    with pytest.raises(RuntimeError, match="finite probabilities of at least 0"):
        torch.multinomial(rows, 2, replacement)
    rows[1] = 0
    with pytest.raises(RuntimeError, match="a sum above 0"):
        torch.multinomial(rows, 2, replacement)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: torch.multinomial(p, 5), "without replacement"),
        (lambda p: torch.multinomial(p, 0), "n_sample <= 0"),
        (lambda p: torch.multinomial(p[None, None], 1), "1 or 2 dim"),
        (lambda p: torch.multinomial(p.long(), 1), "floating-point"),
        (lambda p: torch.multinomial(p, 1, out=torch.empty(1, device=p.device)), "Long"),
    ],
)
def test_multinomial_errors_are_those_of_pytorch(call, message):
    for device in ("cpu", "quartz"):
        with pytest.raises(RuntimeError, match=message):
            call(torch.ones(4, device=device))


def test_multinomial_needs_enough_categories():
    with pytest.raises(RuntimeError, match=r"num_samples must be at most the number of categories .* got 3"):
        torch.multinomial(torch.tensor([1.0, 0, 2, 0], device="quartz"), 3)
    assert torch.multinomial(torch.empty(0, 4, device="quartz"), 2).shape == (0, 2)


# ------------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.75, 1.0])
def test_native_dropout(dtype, p):
    for x in (torch.randn(5, 9, dtype=dtype).to("quartz"), torch.randn(9, 5, dtype=dtype).to("quartz").t()):
        torch.quartz.default_generators[0].set_offset(11)
        x.requires_grad_()
        y, mask = torch.native_dropout(x, p, True)
        kept = torch.tensor(reference.bernoulli(SEED, 11, [1 - p] * 45)).bool().view(5, 9)
        assert torch.equal(mask.cpu(), kept) and y.stride() == x.stride() == mask.stride()
        scale = 0.0 if p == 1 else 1 / (1 - p)
        wide = x.detach().cpu().to(torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(y.detach().cpu(), (wide * kept * torch.tensor(scale, dtype=wide.dtype)).to(dtype))
        gradient = torch.randn(5, 9, dtype=dtype)
        y.backward(gradient.to("quartz"))
        want = gradient.to(wide.dtype) * kept * torch.tensor(scale, dtype=wide.dtype)
        assert torch.equal(x.grad.cpu(), want.to(dtype))


def test_dropout_modules():
    x = torch.randn(4, 6, 50, device="quartz")
    assert torch.equal(torch.nn.Dropout(0.3).eval()(x), x) and F.dropout(x, 0.0) is x
    assert F.dropout(x, 1.0).abs().sum() == 0
    y = F.dropout(x, 0.25)
    torch.testing.assert_close(y[y != 0], x[y != 0] / 0.75)
    assert 0.15 < (y == 0).float().mean() < 0.35
    channels = F.dropout1d(x, 0.5)
    assert all((c == 0).all() or (c != 0).all() for c in channels.flatten(0, 1))
    alpha = F.alpha_dropout(torch.randn(100_000, device="quartz"), 0.3, True)
    assert abs(alpha.mean()) < 0.02 and abs(alpha.std() - 1) < 0.02
    z = x.clone()
    assert F.dropout(z, 0.5, inplace=True) is z and (z == 0).any()
    assert torch.native_dropout(torch.ones(0, 3, device="quartz"), 0.5, True)[0].shape == (0, 3)
    with pytest.raises(ValueError, match="between 0 and 1"):
        F.dropout(x, 1.5)
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        torch.native_dropout(x, -0.5, True)


# ----------------------------------------------------------------------------------------------------------- semantics


def test_normal_of_tensors():
    mean, std = torch.randn(3, 5), torch.rand(5)
    z = torch.tensor([float(v) for v in reference.normal(SEED, 0, 15)]).view(3, 5)

    def take(*arguments, **options):
        return torch.normal(*arguments, generator=generator_at(SEED, 0), **options).cpu()

    m, s = mean.to("quartz"), std.to("quartz")
    assert torch.equal(take(m, s), z * std + mean)
    assert torch.equal(
        take(m, 2.0), torch.tensor([float(v) for v in reference.normal(SEED, 0, 15, 0, 2)]).view(3, 5) + mean
    )
    assert torch.equal(take(-1.0, s), z[0] * std - 1)
    assert torch.equal(take(0.0, 1.0, (3, 5), device="quartz"), z)
    out = torch.empty(0, device="quartz")
    assert torch.equal(take(m, s, out=out), z * std + mean) and out.shape == (3, 5)
    with pytest.raises(RuntimeError, match="std"):
        torch.normal(m, -s)
    with pytest.raises(RuntimeError, match="std"):
        torch.normal(m, -1.0)
    m.requires_grad_()
    torch.normal(m, s).sum().backward()
    assert (m.grad == 0).all()


def test_torch_distributions():
    location = torch.zeros(4, device="quartz", requires_grad=True)
    sample = torch.distributions.Normal(location, torch.ones(4, device="quartz")).rsample((1000,))
    sample.sum().backward()
    assert (location.grad == 1000).all() and abs(sample.mean()) < 0.1
    logits = torch.tensor([0.0, math.log(3.0)], device="quartz")
    assert abs(torch.distributions.Categorical(logits=logits).sample((10_000,)).float().mean() - 0.75) < 0.03
    assert torch.distributions.Bernoulli(probs=torch.tensor(0.2, device="quartz")).sample((9,)).shape == (9,)
    assert (torch.distributions.Exponential(torch.tensor(2.0, device="quartz")).sample((9,)) > 0).all()
    assert F.gumbel_softmax(logits.expand(1000, 2), hard=True).sum() == 1000


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: x.uniform_(2.0, 1.0), RuntimeError),
        (lambda x: x.half().uniform_(0.0, 1e6), RuntimeError),
        (lambda x: x.normal_(0.0, -1.0), RuntimeError),
        (lambda x: x.exponential_(0.0), RuntimeError),
        (lambda x: x.bernoulli_(1.5), RuntimeError),
        (lambda x: x.long().normal_(), (RuntimeError, NotImplementedError)),
        (lambda x: x.long().uniform_(), (RuntimeError, NotImplementedError)),
        (lambda x: x.expand(2, 4).uniform_(), RuntimeError),
        (lambda x: x[:1].expand(4).normal_(), RuntimeError),
        (lambda x: x[:1].expand(4).bernoulli_(0.5), RuntimeError),
        (
            lambda x: torch.bernoulli(torch.ones(3, dtype=torch.int64, device=x.device)),
            (RuntimeError, NotImplementedError),
        ),
    ],
)
def test_errors_are_those_of_pytorch_and_change_nothing(call, error):
    generator = torch.quartz.default_generators[0]
    x, y = torch.zeros(4), torch.zeros(4, device="quartz")
    with pytest.raises(error) as native:
        call(x)
    offset = generator.get_offset()
    with pytest.raises(error) as got:
        call(y)
    assert got.type is native.type
    assert (y == 0).all() and generator.get_offset() == offset


@pytest.mark.host
@pytest.mark.parametrize("bad", [-0.5, 1.5, math.nan])
def test_bernoulli_refuses_probabilities_outside(bad):
    p = torch.tensor([0.5, bad], device="quartz")
    with pytest.raises(RuntimeError):
        torch.bernoulli(p)
    x = torch.full((2,), 7.0, device="quartz")
    with pytest.raises(RuntimeError):
        x.bernoulli_(p)
    assert (x == 7).all()


@pytest.mark.cuda
def test_bernoulli_takes_the_nearer_bound():
    p = torch.tensor([-0.5, 1.5, math.nan], device="quartz").repeat(100)
    assert torch.equal(torch.bernoulli(p).cpu(), torch.tensor([0.0, 1.0, 0.0]).repeat(100))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand_like(x),
        lambda x: torch.randn(4, device=x.device),
        lambda x: F.dropout(x, 0.5),
        lambda x: torch.bernoulli(torch.full((4,), 0.5, device=x.device)),
        lambda x: torch.multinomial(torch.ones(4, device=x.device), 1),
    ],
)
def test_vmap(draw):
    x = torch.ones(64, 4, device="quartz")
    different = torch.vmap(draw, randomness="different")(x)
    assert different.shape[0] == 64 and not (different == different[0]).all()
    same = torch.vmap(draw, randomness="same")(x)
    assert (same == same[0]).all()
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(draw)(x)


def program(x):
    noise = torch.randn_like(x) + torch.rand(x.shape, device=x.device)
    y = F.dropout(x * noise, 0.5)
    return y + x.new_empty(x.shape).exponential_(), torch.bernoulli(torch.sigmoid(y))


def test_functional_and_compiled_programs_draw_the_same_numbers():
    x = torch.randn(33, device="quartz")
    torch.manual_seed(3)
    want = program(x)
    compiled = torch.compile(program, backend="aot_eager")
    for run in (torch.func.functionalize(program), compiled, compiled):
        torch.manual_seed(3)
        assert all(map(same_bits, run(x), want))


def test_fake_and_meta_tensors():
    x = torch.empty(3, 4, device="meta")
    assert torch.rand_like(x).is_meta and x.normal_() is x and torch.multinomial(x, 2).shape == (3, 2)
    with torch._subclasses.FakeTensorMode():
        x = torch.rand(3, 4, device="quartz")
        assert x.device.type == "quartz" and F.dropout(x).shape == (3, 4)
        assert torch.multinomial(x, 2).device.type == "quartz"


def test_checkpoint_draws_the_mask_again():
    x = torch.randn(1000, device="quartz", requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x, 0.5) * 2, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


# --------------------------------------------------------------------------------------------------------- CUDA graphs


@pytest.mark.cuda
def test_graph_replays_draw_new_numbers():
    x = torch.ones(1000, device="quartz")

    def draw():
        noise = torch.randn(1000, device="quartz")
        return noise, torch.rand(1000, device="quartz"), F.dropout(x, 0.5), torch.multinomial(noise.abs(), 3)

    stream = torch.quartz.Stream()
    with torch.quartz.stream(stream):
        draw()
    stream.synchronize()
    offset = torch.quartz.default_generators[0].get_offset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = draw()
    assert torch.quartz.default_generators[0].get_offset() == offset  # a capture draws nothing

    def replay():
        graph.replay()
        return [output.cpu().clone() for output in outputs]

    torch.manual_seed(5)
    first, second = replay(), replay()
    assert not any(map(torch.equal, first, second))
    torch.manual_seed(5)
    assert all(map(torch.equal, first, replay())) and all(map(torch.equal, second, replay()))
    eager = torch.randn(1000, device="quartz", generator=torch.Generator("quartz").manual_seed(5))
    assert not torch.equal(first[0], eager.cpu())
    assert abs(first[0].mean()) < 0.2 and not torch.equal(first[0][:4], first[1][:4])
