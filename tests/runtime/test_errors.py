"""Bad input: a Python exception of the type PyTorch uses, then the device works on and nothing is lost."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def workspaces_are_allocated():
    # CUDA's libraries keep memory from their first call on.
    torch.linalg.inv(torch.eye(2, device="quartz") @ torch.eye(2, device="quartz"))


@pytest.fixture(autouse=True)
def the_device_still_works():
    gc.collect()
    kept = torch.arange(5.0, device="quartz", requires_grad=True)
    before = torch.quartz.memory_allocated()
    yield
    gc.collect()  # a caught exception holds the frames it came through
    assert torch.quartz.memory_allocated() == before
    (kept * 2).sum().backward()
    assert kept.tolist() == [0, 1, 2, 3, 4] and kept.grad.tolist() == [2] * 5


def q(*shape, **options):
    return torch.ones(*shape, device="quartz", **options)


MIXED = {
    "add": lambda: q(3) + torch.ones(3),
    "cpu first": lambda: torch.ones(3) * q(3),
    "mm": lambda: q(2, 2) @ torch.ones(2, 2),
    "linear": lambda: torch.nn.Linear(2, 2)(q(1, 2)),
    "cat": lambda: torch.cat([q(2), torch.ones(2)]),
    "out": lambda: torch.add(q(2), 1, out=torch.empty(2)),
    "in place": lambda: q(2).add_(torch.ones(2)),
    "where": lambda: torch.where(torch.ones(2).bool(), q(2), q(2)),
    "conv": lambda: torch.nn.functional.conv1d(q(1, 1, 4), torch.ones(1, 1, 2)),
    "embedding": lambda: torch.nn.functional.embedding(torch.tensor([0]), q(2, 2)),
    "batch norm": lambda: torch.nn.functional.batch_norm(q(2, 2), torch.zeros(2), torch.ones(2)),
    "foreach": lambda: torch._foreach_add([q(2)], [torch.ones(2)]),
    "index_select": lambda: q(3).index_select(0, torch.tensor([0])),
    "gather": lambda: q(3).gather(0, torch.tensor([0])),
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(q(1, 2, 2), torch.ones(1, 2, 2), q(1, 2, 2)),
    "cross entropy": lambda: torch.nn.functional.cross_entropy(q(2, 2), torch.tensor([0, 1])),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices(name):
    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        MIXED[name]()
    message = str(caught.value)
    assert "quartz" in message and "cpu" in message.lower(), message


def test_mixed_devices_names_operator_and_argument():
    with pytest.raises(RuntimeError, match=r"add.*(other|argument)"):
        q(3) + torch.ones(3)


def test_cpu_indices_are_allowed_as_on_cuda():
    assert q(3)[torch.tensor([0, 2])].shape == (2,)
    x = q(3)
    x[torch.tensor([1])] = 5
    assert x.tolist() == [1, 5, 1]
    with pytest.raises((RuntimeError, IndexError)):
        torch.ones(3)[q(1).long()]


WRONG_DTYPE = {
    "matmul": (lambda d: torch.ones(2, 2, device=d) @ torch.ones(2, 2, device=d, dtype=torch.float64)),
    "bitwise": (lambda d: torch.ones(2, device=d) & torch.ones(2, device=d)),
    "index": (lambda d: torch.ones(3, device=d)[torch.tensor([0.5], device=d)]),
    "shift": (lambda d: torch.ones(2, device=d) << 1),
    "cross entropy": (
        lambda d: torch.nn.functional.cross_entropy(
            torch.ones(2, 3, device=d), torch.ones(2, dtype=torch.bool, device=d)
        )
    ),
    "in place to a smaller dtype": (lambda d: torch.ones(2, device=d, dtype=torch.int32).add_(0.5)),
    "grad of integers": (lambda d: torch.ones(2, device=d, dtype=torch.int64, requires_grad=True)),
    "cholesky": (lambda d: torch.linalg.cholesky(torch.ones(2, 2, device=d, dtype=torch.int32))),
    "mean of integers": (lambda d: torch.ones(2, device=d, dtype=torch.int64).mean()),
}


@pytest.mark.parametrize("name", WRONG_DTYPE)
def test_wrong_dtype_raises_what_the_native_device_raises(name):
    call = WRONG_DTYPE[name]
    with pytest.raises(Exception) as expected:
        call(torch.quartz.native_device())
    with pytest.raises(type(expected.value)) as caught:
        call("quartz")
    assert str(caught.value).splitlines()[0] == str(expected.value).splitlines()[0]


WRONG_SHAPE = {
    "add": lambda d: torch.ones(2, device=d) + torch.ones(3, device=d),
    "mm": lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
    "view": lambda d: torch.ones(6, device=d).view(4, 2),
    "cat": lambda d: torch.cat([torch.ones(2, 2, device=d), torch.ones(3, 3, device=d)]),
    "index": lambda d: torch.ones(3, device=d)[5],
    "dim": lambda d: torch.ones(3, device=d).sum(2),
    "expand": lambda d: torch.ones(3, device=d).expand(2),
    "as_strided": lambda d: torch.ones(3, device=d).as_strided((4,), (1,)) + 1,
    "unbind": lambda d: torch.ones(3, device=d).unflatten(0, (2, 2)),
    "item": lambda d: torch.ones(2, device=d).item(),
    "bool": lambda d: bool(torch.ones(2, device=d)),
    "iterate scalar": lambda d: list(torch.ones((), device=d)),
}


@pytest.mark.parametrize("name", WRONG_SHAPE)
def test_wrong_shape_raises_what_the_native_device_raises(name):
    call = WRONG_SHAPE[name]
    with pytest.raises(Exception) as expected:
        call(torch.quartz.native_device())
    with pytest.raises(type(expected.value)):
        call("quartz")


@pytest.mark.host
def test_indices_out_of_range():
    for call in (
        lambda: q(3)[torch.tensor([7], device="quartz")],
        lambda: q(3).index_select(0, torch.tensor([-9], device="quartz")),
        lambda: torch.nn.functional.embedding(torch.tensor([9], device="quartz"), q(2, 2)),
        lambda: q(3).gather(0, torch.tensor([4], device="quartz")),
    ):
        with pytest.raises((IndexError, RuntimeError), match=r"range|bounds"):
            call()


def test_a_missing_device():
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        torch.ones(2).to("quartz:7")
    with pytest.raises(RuntimeError, match="invalid device ordinal 9"):
        torch.nn.Linear(2, 2).to("quartz:9")
    with pytest.raises(RuntimeError, match="Expected one of cpu, cuda"):  # PyTorch's own list of names
        torch.ones(2).to("quarz")


def test_a_kernel_error_leaves_no_half_written_result():
    x = q(3, 3)
    with pytest.raises(RuntimeError):
        torch.linalg.inv(torch.zeros(2, 2, device="quartz"))
    with pytest.raises(RuntimeError):
        torch.mm(q(2, 3), q(2, 3), out=x)
    assert x.eq(1).all()


def test_storage_of_another_device_is_refused():
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(2).set_(q(2).untyped_storage())
    with pytest.raises(RuntimeError, match="device"):
        q(2).set_(torch.ones(2).untyped_storage())


def test_adopt_and_alias_check_their_argument():
    with pytest.raises((ValueError, RuntimeError), match="quartz"):
        torch.quartz.native_alias(torch.ones(2))
    with pytest.raises((ValueError, RuntimeError), match=r"quartz|adopt"):
        torch.quartz.adopt(q(2))
    with pytest.raises(TypeError):
        torch.quartz.adopt([1, 2])


def test_in_a_queue_of_errors_memory_returns():
    for _ in range(200):
        with pytest.raises(RuntimeError):
            q(64, 64) @ q(63, 64)
