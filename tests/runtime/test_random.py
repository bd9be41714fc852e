"""Random numbers: seeds, states, generators."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_torch_manual_seed_seeds_quartz():
    torch.manual_seed(11)
    a = torch.rand(16, device="quartz")
    assert torch.quartz.initial_seed() == 11
    torch.manual_seed(11)
    assert torch.equal(a, torch.rand(16, device="quartz"))
    torch.quartz.manual_seed_all(11)
    assert torch.equal(a, torch.rand(16, device="quartz"))
    torch.quartz.manual_seed(12)
    assert not torch.equal(a, torch.rand(16, device="quartz"))


@pytest.mark.host
@pytest.mark.parametrize(
    "draw",
    [
        lambda device: torch.rand(100, device=device),
        lambda device: torch.randn(100, device=device),
        lambda device: torch.randint(0, 1000, (100,), device=device),
        lambda device: torch.randperm(100, device=device),
        lambda device: torch.empty(100, device=device).exponential_(),
        lambda device: torch.bernoulli(torch.full((100,), 0.3, device=device)),
        lambda device: torch.multinomial(torch.ones(10, device=device), 5),
        lambda device: torch.nn.functional.dropout(torch.ones(100, device=device), 0.4),
        lambda device: torch.rand_like(torch.ones(100, device=device)),
        lambda device: torch.normal(torch.zeros(10, device=device), torch.ones(10, device=device)),
    ],
)
def test_host_draws_what_the_cpu_draws(draw):
    torch.manual_seed(5)
    expected = draw("cpu")
    torch.manual_seed(5)
    assert torch.equal(draw("quartz").cpu(), expected)


def test_drawing_on_quartz_leaves_the_cpu_alone():
    state = torch.get_rng_state()
    torch.rand(100, device="quartz")
    torch.nn.functional.dropout(torch.ones(100, device="quartz"))
    assert torch.equal(torch.get_rng_state(), state)
    device_state = torch.quartz.get_rng_state()
    torch.rand(100)
    assert torch.equal(torch.quartz.get_rng_state(), device_state)


def test_state_round_trip():
    state = torch.quartz.get_rng_state()
    assert state.device.type == "cpu" and state.dtype == torch.uint8
    a = torch.randn(10, device="quartz")
    torch.quartz.set_rng_state(state)
    assert torch.equal(a, torch.randn(10, device="quartz"))
    torch.quartz.set_rng_state_all(torch.quartz.get_rng_state_all())
    torch.quartz.set_rng_state(state, "quartz:0")
    assert torch.equal(a, torch.randn(10, device="quartz"))


def test_a_foreign_state_is_refused():
    with pytest.raises((RuntimeError, TypeError)):
        torch.quartz.set_rng_state(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises((RuntimeError, TypeError)):
        torch.quartz.set_rng_state(torch.zeros(8))
    assert torch.rand(2, device="quartz").shape == (2,)


def test_seed_is_random():
    torch.quartz.seed()
    first = torch.quartz.initial_seed()
    torch.quartz.seed_all()
    assert torch.quartz.initial_seed() != first


def test_generator_objects():
    generator = torch.Generator("quartz").manual_seed(9)
    assert generator.device == torch.device("quartz:0")
    a = torch.rand(8, device="quartz", generator=generator)
    state = torch.quartz.get_rng_state()
    generator.manual_seed(9)
    assert torch.equal(a, torch.rand(8, device="quartz", generator=generator))
    assert torch.equal(state, torch.quartz.get_rng_state())
    copy = generator.clone_state()
    assert torch.equal(
        torch.rand(8, device="quartz", generator=generator), torch.rand(8, device="quartz", generator=copy)
    )
    assert len(torch.quartz.default_generators) == torch.quartz.device_count()
    assert torch.quartz.default_generators[0].device.type == "quartz"


def test_a_generator_of_another_device_is_refused():
    with pytest.raises(RuntimeError, match=r"(?i)generator"):
        torch.rand(8, device="quartz", generator=torch.Generator("cpu"))
    with pytest.raises(RuntimeError, match=r"(?i)generator"):
        torch.rand(8, generator=torch.Generator("quartz"))
    assert torch.rand(2, device="quartz").shape == (2,)


def test_fork_rng():
    before = torch.quartz.get_rng_state()
    with torch.random.fork_rng(device_type="quartz"):
        torch.manual_seed(77)
        torch.rand(4, device="quartz")
    assert torch.equal(before, torch.quartz.get_rng_state())
    with torch.random.fork_rng(devices=[0]):  # the current accelerator is the default
        torch.rand(4, device="quartz")
    assert torch.equal(before, torch.quartz.get_rng_state())


@pytest.mark.host
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_stay_below_one(dtype):
    # Half-open as documented. CUDA's own kernels round up to 1 in half precision (pytorch#96947).
    x = torch.rand(1_000_000, dtype=dtype, device="quartz")
    assert x.max() < 1 and x.min() >= 0
