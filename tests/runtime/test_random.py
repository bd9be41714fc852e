"""Random numbers: seeds, states, generators."""

import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor

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


@pytest.mark.parametrize(
    "draw",
    [
        lambda device: torch.randint(0, 1000, (100,), device=device),
        lambda device: torch.randperm(100, device=device),
        lambda device: torch.poisson(torch.full((100,), 3.0, device=device)),
        lambda device: torch.empty(100, device=device).log_normal_(),
        lambda device: torch.empty(100, device=device).geometric_(0.3),
    ],
)
def test_operators_of_the_native_device_draw_its_numbers(draw):
    native = torch.quartz.native_device(0)
    torch.manual_seed(5)
    expected = draw(native)
    torch.manual_seed(5)
    torch.rand(1000, device="quartz")  # from the counter: the native numbers stay where they are
    assert torch.equal(draw("quartz").cpu(), expected.cpu())


def test_numbers_of_the_counter_are_the_same_on_every_substrate():
    # By the formulas of docs/ops/random.md, worked out by tests/ops/random_reference.py; offsets 0, 1 and 2 of seed 5.
    torch.manual_seed(5)
    assert torch.rand(4, device="quartz").tolist() == [
        0.23616522550582886,
        0.7057997584342957,
        0.9856767654418945,
        0.5547667741775513,
    ]
    assert torch.randint(0, 9, (4,), device="quartz").shape == (4,)
    assert torch.randn(4, device="quartz").tolist() == [
        0.7245983481407166,
        1.107853889465332,
        1.206884741783142,
        -0.6249162554740906,
    ]
    assert torch.multinomial(torch.tensor([1.0, 2, 3, 4], device="quartz"), 4).tolist() == [3, 1, 2, 0]


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


def test_a_state_holds_the_counter_and_the_native_generator():
    generator = torch.Generator("quartz").manual_seed(21)
    torch.rand(9, device="quartz", generator=generator)
    torch.randint(0, 9, (9,), device="quartz", generator=generator)
    state = generator.get_state()

    def draw(source):
        options = {"device": "quartz", "generator": source}
        return torch.rand(9, **options), torch.randint(0, 1000, (9,), **options), torch.randn(3, **options)

    first = draw(generator)
    other = torch.Generator("quartz")
    other.set_state(state)
    assert other.initial_seed() == 21 and other.get_offset() == 3
    assert all(map(torch.equal, first, draw(other)))
    restored = pickle.loads(pickle.dumps(generator))
    assert all(map(torch.equal, draw(generator), draw(restored)))


def test_offsets_count_blocks_of_four():
    generator = torch.Generator("quartz").manual_seed(4)
    assert generator.get_offset() == 0
    whole = torch.rand(40, device="quartz", generator=generator)
    assert generator.get_offset() == 10
    generator.set_offset(5)
    assert torch.equal(torch.rand(20, device="quartz", generator=generator), whole[20:])


def test_a_foreign_state_is_refused():
    native = torch.Generator(torch.quartz.native_device(0).type).get_state()  # what versions before the counter gave
    wrong = torch.quartz.get_rng_state()
    wrong[0] = 0
    generator = torch.quartz.default_generators[0]
    before = generator.get_state()
    for state in (torch.zeros(3, dtype=torch.uint8), torch.zeros(8), native, wrong, before[1:]):
        with pytest.raises((RuntimeError, TypeError)):
            torch.quartz.set_rng_state(state)
    with pytest.raises(RuntimeError, match="the state of a quartz generator on the"):
        torch.quartz.set_rng_state(native)
    assert torch.equal(generator.get_state(), before)
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
    if inspect.signature(torch.random.fork_rng).parameters["device_type"].default is None:  # else it is "cuda"
        with torch.random.fork_rng(devices=[0]):
            torch.rand(4, device="quartz")
        assert torch.equal(before, torch.quartz.get_rng_state())


@pytest.mark.two_devices
def test_devices_have_generators_of_their_own():
    torch.manual_seed(3)
    first = torch.rand(8, device="quartz:0")
    assert torch.equal(first.cpu(), torch.rand(8, device="quartz:1").cpu())  # one seed, two counters
    state = torch.quartz.get_rng_state(1)
    second = torch.randn(8, device="quartz:1")
    assert torch.quartz.default_generators[0].get_offset() == 2
    assert torch.quartz.default_generators[1].get_offset() == 4
    torch.quartz.set_rng_state(state, 1)
    assert torch.equal(second, torch.randn(8, device="quartz:1"))
    generator = torch.Generator("quartz:1").manual_seed(3)
    assert torch.equal(torch.rand(8, device="quartz:1", generator=generator).cpu(), first.cpu())


def test_threads_share_one_sequence():
    generator = torch.Generator("quartz").manual_seed(8)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda _: torch.rand(64, device="quartz", generator=generator).tolist(), range(40)))
    whole = torch.rand(64 * 40, device="quartz", generator=torch.Generator("quartz").manual_seed(8)).view(40, 64)
    assert sorted(parts) == sorted(whole.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_uniform_numbers_stay_below_one(dtype):
    # Half-open as documented. CUDA's own kernels round up to 1 in half precision (pytorch#96947).
    x = torch.rand(1_000_000, dtype=dtype, device="quartz")
    assert x.max() < 1 and x.min() >= 0


def test_seeds_given_before_there_is_a_context_follow_in_their_order(monkeypatch):
    from torch_quartz.device import lifecycle, random

    calls = []
    monkeypatch.setattr(lifecycle, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_lazy_call", calls.append)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: None)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    torch.quartz.manual_seed(3)
    torch.quartz.manual_seed_all(4)
    torch.quartz.manual_seed(5)
    assert len(calls) == 1 and torch.quartz.initial_seed() == 0
    calls[0]()
    assert torch.quartz.initial_seed() == 5 and not random._pending
    assert all(generator.initial_seed() == 4 for generator in torch.quartz.default_generators[1:])
