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


@pytest.mark.two_devices
@pytest.mark.parametrize(
    ("operator", "argument", "call"),
    [
        ("aten::add.Tensor", "other", lambda a, b: a + b),  # with the unboxed fallback
        ("aten::add.out", "out", lambda a, b: torch.add(a, a, out=b)),
        ("aten::cat", "tensors", lambda a, b: torch.cat([a, b])),
        ("aten::where.self", "other", lambda a, b: torch.where(a > 0, a, b)),
        ("aten::index.Tensor", "indices", lambda a, b: a[b.long()]),
        ("aten::_foreach_mul_.List", "other", lambda a, b: torch._foreach_mul_([a], [b])),
        ("aten::lerp.Tensor", "weight", lambda a, b: a.lerp(a, b)),  # with the boxed one
        ("aten::_linalg_solve_ex", "B", lambda a, b: torch.linalg.solve(a.view(1, 1), b.view(1, 1))),
        ("aten::convolution", "weight", lambda a, b: torch.nn.functional.conv1d(a.view(1, 1, 1), b.view(1, 1, 1))),
    ],
)
def test_two_quartz_devices_name_operator_and_argument(operator, argument, call):
    with pytest.raises(RuntimeError) as caught:
        call(torch.ones(1, device="quartz:0"), torch.ones(1, device="quartz:1"))
    assert str(caught.value) == (
        "Expected all tensors to be on the same device, but found at least two devices, quartz:0 and quartz:1! "
        f"(operator {operator}, argument '{argument}')"
    )


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


# operator call: what the error says below the native kernel's own text
NAMED = {
    "aten::mm(self: quartz:0 float32[2, 3], mat2: quartz:0 float64[3, 4])": lambda: (
        q(2, 3) @ q(3, 4, dtype=torch.float64)
    ),
    "aten::add.Tensor(self: quartz:0 float32[2], other: quartz:0 float32[3])": lambda: q(2) + q(3),
    "aten::add_.Tensor(self: quartz:0 int32[2], other: number (float64))": lambda: q(2, dtype=torch.int32).add_(0.5),
    "aten::cat(tensors: [quartz:0 float32[2, 2], quartz:0 bool[3, 3]])": lambda: torch.cat(
        [q(2, 2), q(3, 3, dtype=torch.bool)]
    ),
    "aten::linalg_cholesky_ex(self: quartz:0 int32[2, 2])": lambda: torch.linalg.cholesky(q(2, 2, dtype=torch.int32)),
    "aten::index.Tensor(self: quartz:0 float32[3], indices: [quartz:0 float32[1]])": lambda: torch.ops.aten.index(
        q(3), [q(1)]
    ),
    "aten::convolution(input: quartz:0 float32[1, 1, 4], weight: quartz:0 float32[1, 2, 2], bias: None)": lambda: (
        torch.nn.functional.conv1d(q(1, 1, 4), q(1, 2, 2))
    ),
    "aten::addmm(self: quartz:0 float32[2, 3], mat1: quartz:0 float32[2, 2] Sparse, mat2: quartz:0 float32[3, 3])": (
        lambda: torch.sparse.mm(q(2, 2).to_sparse(), q(3, 3))
    ),
}


@pytest.mark.host
@pytest.mark.parametrize("line", NAMED)
def test_native_errors_name_operator_arguments_and_values(line):
    with pytest.raises((RuntimeError, IndexError)) as caught:
        NAMED[line]()
    lines = str(caught.value).splitlines()
    assert lines[-2:] == ["  raised by the cpu kernel of", f"  quartz: {line}"]
    assert "quartz" not in "".join(lines[:-2])


def test_a_long_list_in_an_error_is_cut():
    with pytest.raises(RuntimeError, match=r"other: \[(quartz:0 float32\[3\], ){8}\.\.\. 500 in all\]\)$"):
        torch._foreach_add([q(2)] * 500, [q(3)] * 500)


def test_an_operator_within_an_operator_is_named_once():
    with torch.library._scoped_library("quartz_test_errors", "DEF") as library:
        library.define("outer(Tensor x, Tensor y) -> Tensor")
        native = "CPU" if torch.quartz.substrate() == "host" else "CUDA"
        library.impl("outer", lambda x, y: torch.quartz.adopt(x).mm(torch.quartz.adopt(y)), native)
        with pytest.raises(RuntimeError) as caught:
            torch.ops.quartz_test_errors.outer(q(2, 3), q(2, 3))
    assert str(caught.value).count("quartz: ") == 1
    assert "quartz: aten::mm(self: quartz:0 float32[2, 3], mat2: quartz:0 float32[2, 3])" in str(caught.value)


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


def test_out_on_the_cpu_is_not_advised_to_be_moved():
    q = torch.ones(3, device="quartz")
    with pytest.raises(RuntimeError, match="argument 'out': out= must be on quartz:0"):
        torch.add(q, q, out=torch.empty(3))


# What an own kernel writes. Each call gets the input and an `out` of the dtype it needs.
WRITTEN = {
    "sum": lambda x, out: torch.sum(x, 1, out=out()),
    "mean": lambda x, out: torch.mean(x, 1, out=out()),
    "var": lambda x, out: torch.var(x, 1, out=out()),
    "std": lambda x, out: torch.std(x, 1, out=out()),
    "logsumexp": lambda x, out: torch.logsumexp(x, 1, out=out()),
    "argmax": lambda x, out: torch.argmax(x, 1, out=out(torch.long)),
    "argmin": lambda x, out: torch.argmin(x, 1, out=out(torch.long)),
    "softmax": lambda x, out: torch.softmax(x, 1, out=out()),
    "log_softmax": lambda x, out: torch.log_softmax(x, 1, out=out()),
    "cumsum": lambda x, out: torch.cumsum(x, 1, out=out()),
    "topk values": lambda x, out: torch.topk(x, 1, out=(out(), torch.empty(0, dtype=torch.long, device=x.device))),
    "topk indices": lambda x, out: torch.topk(x, 1, out=(torch.empty(0, device=x.device), out(torch.long))),
    "sigmoid": lambda x, out: torch.sigmoid(x, out=out()),
    "rsqrt": lambda x, out: torch.rsqrt(x, out=out()),
    "mm": lambda x, out: torch.mm(x, x.t(), out=out()),
    "exp": lambda x, out: torch.exp(x, out=out()),
    "histc": lambda x, out: torch.histc(x, out=out()),
}


@pytest.mark.parametrize("shape", [(0,), ()], ids=["empty", "0-dim"])
@pytest.mark.parametrize("name", WRITTEN)
def test_out_on_the_cpu_is_refused(name, shape):
    with pytest.raises(RuntimeError, match=r"quartz:0 and cpu! \(operator aten::.*, argument '(out|values|indices)'"):
        WRITTEN[name](q(3, 2), lambda dtype=torch.float32: torch.empty(shape, dtype=dtype))


@pytest.mark.two_devices
@pytest.mark.parametrize("name", WRITTEN)
def test_out_on_another_quartz_device_is_refused(name):
    with pytest.raises(RuntimeError, match=r"quartz:0 and quartz:1! \(operator aten::"):
        WRITTEN[name](q(3, 2), lambda dtype=torch.float32: torch.empty(0, dtype=dtype, device="quartz:1"))


@pytest.mark.two_devices
@pytest.mark.parametrize("tracked", [False, True])
def test_an_attention_mask_on_another_quartz_device_is_refused(tracked):
    x = torch.ones(1, 1, 2, 4, device="quartz:0", requires_grad=tracked)
    with pytest.raises(RuntimeError, match=r"quartz:0 and quartz:1! .*scaled_dot_product_attention, .*'attn_mask'"):
        torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(2, 2, device="quartz:1"))


@pytest.mark.parametrize(
    "write",
    [
        lambda scalar: scalar.mul_(q(())),
        lambda scalar: scalar.addcmul_(q(()), q(())),
        lambda scalar: scalar.lerp_(q(()), 0.5),
        lambda scalar: torch._foreach_add_([scalar], [q(())]),
    ],
    ids=["mul_", "addcmul_", "lerp_", "foreach"],
)
def test_a_cpu_scalar_is_read_but_not_written(write):
    scalar = torch.tensor(3.0)
    assert (q(2) * scalar).tolist() == [3, 3]
    with pytest.raises(RuntimeError, match="same device"):
        write(scalar)
    assert scalar.item() == 3
    assert scalar.fill_(q(())).item() == 1  # CUDA's exception: it takes the value out
    assert scalar.copy_(q(()) * 2).item() == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: torch.cumsum(x, 0, out=out),
        lambda x, out: torch.sigmoid(x, out=out),
        lambda x, out: torch.topk(x, 10, out=(out, torch.empty(0, dtype=torch.long, device=x.device))),
    ],
    ids=["cumsum", "sigmoid", "topk"],
)
def test_out_over_a_part_of_the_input_is_refused(call):
    x = torch.arange(20.0, device="quartz")
    with pytest.raises(RuntimeError, match="single memory location"):
        call(x[:10], x[1:11])


def test_set_refuses_negative_sizes_and_strides():
    x = torch.arange(12.0, device="quartz")
    y = torch.empty(0, device="quartz")
    for size, stride in [((3, 2), (-2, 1)), ((-3, 2), (2, 1))]:
        with pytest.raises(RuntimeError, match=r"set_: .* must not be negative"):
            y.set_(x.untyped_storage(), 5, size, stride)
    with pytest.raises(RuntimeError, match="unequal size length"):
        y.set_(x.untyped_storage(), 5, (3, 2), (1,))
    assert y.shape == (0,) and y.untyped_storage().nbytes() == 0


def test_a_copy_of_freed_memory_is_an_error():
    x = q(4)
    x.untyped_storage().resize_(0)
    for copy in (x.tolist, x.cpu, x.clone, lambda: x.copy_(q(4)), lambda: x.copy_(torch.ones(4))):
        with pytest.raises(RuntimeError, match=r"shape \[4\] on quartz:0 whose storage was resized to 0 bytes"):
            copy()
    x.untyped_storage().resize_(16)
    assert x.fill_(2).tolist() == [2] * 4


SCALARS = {
    "embedding": lambda: torch.nn.functional.embedding(torch.tensor(1), q(3, 2)),
    "index_select": lambda: q(3).index_select(0, torch.tensor(1)),
    "gather": lambda: q(3)[0].gather(0, torch.tensor(0)),
    "take": lambda: q(3).take(torch.tensor(1)),
    "scatter_": lambda: q(3)[0].scatter_(0, torch.tensor(0), q(())),
    "cross entropy": lambda: torch.nn.functional.cross_entropy(q(3), torch.tensor(1)),
    "searchsorted": lambda: torch.searchsorted(q(3), torch.tensor(1.0)),
    "masked_select": lambda: q(3).masked_select(torch.tensor(True)),
    "addmm": lambda: torch.addmm(torch.tensor(1.0), q(2, 2), q(2, 2)),
}


@pytest.mark.parametrize("name", SCALARS)
def test_cpu_scalars_are_refused_where_cuda_refuses_them(name):
    with pytest.raises(RuntimeError, match=r"same device.*quartz:0 and cpu! \(operator aten::.*, argument '"):
        SCALARS[name]()


def test_cpu_scalars_are_numbers_to_pointwise_operators():
    scalar = torch.tensor(2.0)
    assert torch.where(q(2) > 0, q(2), scalar).tolist() == [1, 1]
    assert q(2).clamp(min=scalar).tolist() == q(2).masked_fill(q(2) > 0, scalar).tolist() == [2, 2]
    assert torch._foreach_mul([q(2)], scalar)[0].tolist() == q(2).lerp(q(2) * 3, scalar / 4).tolist() == [2, 2]
