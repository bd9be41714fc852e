"""The products of quartz tensors against float64, and their bits under everything that must not change them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

DEVICES = ["quartz", "cpu"] + (["cuda"] if torch.cuda.is_available() else [])
ACTIVATIONS = {
    "none": lambda v: v,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": lambda v: v * torch.special.erfc(-v / 2**0.5) / 2,  # F.gelu loses the tail, in float64 too
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "gelu_quick": lambda v: v * torch.sigmoid(1.702 * v),
}
SHAPES = [(1, 1, 1), (1, 64, 256), (1, 33, 577), (3, 5, 7), (8, 100, 512), (14, 32, 300), (15, 65, 257), (40, 1, 90)]
SHAPES += [(1, 1, 5000), (129, 70, 600), (300, 3, 129), (2, 200, 1), (3, 4, 0), (0, 4, 3), (4, 0, 3)]


def data(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, exact, dtype):
    """The rounding to the dtype, and the sums in float32: an error relative to the size of the sum's terms."""
    scale = max(1.0, exact.abs().max().item() if exact.numel() else 1.0)
    unit = {torch.float32: 2e-6, torch.bfloat16: 4.1e-3, torch.float16: 5.2e-4}[dtype]
    torch.testing.assert_close(got.cpu().double(), exact, rtol=unit, atol=unit * scale / 4)


def layouts(matrix):
    """The same values, quartz, in every kind of strides."""
    matrix = matrix.to("quartz")
    rows, columns = matrix.shape
    yield matrix
    yield surrounded(matrix)
    yield matrix.t().contiguous().t()
    yield surrounded(matrix.t().contiguous()).t()
    yield torch.full((rows, 2 * columns), float("nan"), dtype=matrix.dtype, device="quartz")[:, ::2].copy_(matrix)
    yield torch.full((3 * rows, columns), float("nan"), dtype=matrix.dtype, device="quartz")[::3].copy_(matrix)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_layouts(dtype, shape):
    m, n, k = shape
    x, w, bias = data(m, k, dtype=dtype), data(n, k, dtype=dtype, seed=1), data(n, dtype=dtype, seed=2)
    exact = x.double() @ w.double().t()
    plain = torch.mm(x.to("quartz"), w.to("quartz").t())
    assert plain.shape == (m, n) and plain.dtype == dtype and plain.is_contiguous()
    close(plain, exact, dtype)
    with_bias = F.linear(x.to("quartz"), w.to("quartz"), bias.to("quartz"))
    close(with_bias, exact + bias.double(), dtype)
    for a, b in zip(layouts(x), layouts(w), strict=True):
        assert same_bits(torch.mm(a, w.to("quartz").t()), plain)
        assert same_bits(torch.mm(x.to("quartz"), b.t()), plain)
        assert same_bits(torch.mm(a, b.t()), plain)
        assert same_bits(F.linear(a, b, bias.to("quartz")), with_bias)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_operator_gives_the_bits_of_mm(dtype):
    x, w, bias = (
        t.to("quartz") for t in (data(6, 300, dtype=dtype), data(70, 300, dtype=dtype), data(70, dtype=dtype))
    )
    plain, added = torch.mm(x, w.t()), torch.addmm(bias, x, w.t())
    assert same_bits(torch.matmul(x, w.t()), plain)
    assert same_bits(torch.matmul(x[None, None], w.t())[0, 0], plain)
    assert same_bits(torch.matmul(x, w.t()[None].expand(3, -1, -1))[2], plain)
    assert same_bits(torch.bmm(torch.stack([w[:6], x]), w.t().expand(2, -1, -1))[1], plain)
    assert same_bits(torch.stack([torch.mv(w, row) for row in x]), plain)
    assert same_bits(torch.stack([row @ w.t() for row in x]), plain)
    assert same_bits(torch.stack([x @ column for column in w], 1), plain)
    assert same_bits(torch.stack([torch.dot(x[2], column) for column in w]), plain[2])
    assert same_bits(torch.einsum("mk,nk->mn", x, w), plain)
    assert same_bits(F.linear(x, w), plain)
    assert same_bits(ops.linear(x, w), plain)
    assert same_bits(F.linear(x, w, bias), added)
    assert same_bits(F.linear(x[0], w, bias), added[0])
    assert same_bits(F.linear(x.view(2, 3, 300), w, bias).view(6, 70), added)
    assert same_bits(
        F.linear(x.view(3, 2, 300).transpose(0, 1), w, bias), added.view(3, 2, 70).transpose(0, 1).contiguous()
    )
    assert same_bits(ops.linear(x, w, bias), added)
    assert same_bits(torch.baddbmm(bias, x[None], w.t()[None])[0], added)
    assert same_bits(torch.addmv(bias, w, x[3]), added[3])
    assert same_bits(bias.expand(6, 70).clone().addmm_(x, w.t()), added)
    assert same_bits(bias.expand(1, 6, 70).clone().baddbmm_(x[None], w.t()[None])[0], added)
    with torch.inference_mode():
        assert same_bits(F.linear(x, w, bias), added)
    for parameter in (x, w, bias):
        parameter.requires_grad_()
    assert same_bits(F.linear(x, w, bias), added)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_bits_of_a_row_depend_on_the_row_alone(draw):
    dtype = draw.draw(st.sampled_from(FLOATS))
    k, n, rows = draw.draw(st.integers(1, 700)), draw.draw(st.integers(1, 90)), draw.draw(st.integers(1, 70))
    seed = draw.draw(st.integers(0, 2**31))
    row, w = data(k, dtype=dtype, seed=seed).to("quartz"), data(n, k, dtype=dtype, seed=seed + 1).to("quartz")
    alone = F.linear(row, w)
    batch = data(rows, k, dtype=dtype, seed=seed + 2).to("quartz")
    batch[::3] = float("nan")
    batch[1::3] = float("inf")
    place = draw.draw(st.integers(0, rows - 1))
    batch[place] = row
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(draw.draw(st.sampled_from([1, 2, 3, 7])))
        for x in layouts(batch):
            assert same_bits(torch.mm(x, w.t())[place], alone)
        first = draw.draw(st.integers(0, place))
        assert same_bits(F.linear(batch[first:], w)[place - first], alone)
        columns = draw.draw(st.integers(1, n))  # of the weight, too
        assert same_bits(F.linear(batch, w[:columns])[place], alone[:columns])
        assert same_bits(torch.bmm(batch[:, None], w.t().expand(rows, -1, -1))[place, 0], alone)
        assert same_bits(torch.mm(w, batch.t())[:, place], alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.host
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_instruction_sets_agree(dtype, rows, instruction_sets):
    x, w, bias = data(rows, 603, dtype=dtype), data(77, 603, dtype=dtype, seed=1), data(77, dtype=dtype, seed=2)
    x[0, ::7] *= 1e-38  # subnormal numbers
    w[:9] *= 1e-30
    if rows > 4:
        x[2, 5], x[3, 9], x[4] = float("inf"), float("nan"), 0.0
    x, w, bias = x.to("quartz"), w.to("quartz"), bias.to("quartz")
    for call in (
        lambda: torch.mm(x, w.t()),
        lambda: torch.mm(x, w.t().contiguous()),
        lambda: torch.dot(x[0], w[3]).view(1),
        *(lambda name=name: ops.linear(x, w, bias, name) for name in ACTIVATIONS),
    ):
        results = [call() for _ in instruction_sets()]
        assert all(same_bits(result, results[0]) for result in results)


def chains_of_pairs(x, w):
    """The order of arithmetic for bfloat16, in float64 rounded after every step: exact where no subnormals occur."""
    total = None
    for begin in range(0, len(x), 256):
        chain = torch.zeros((), dtype=torch.float32)
        for i in range(begin, min(begin + 256, len(x)), 2):
            for j in (i + 1, i):  # the odd k first; a product of two bfloat16 is exact in float32
                if j < len(x):
                    chain = (chain.double() + x[j].double() * w[j].double()).float()
        total = chain if total is None else total + chain
    return total


@pytest.mark.host
def test_order_of_arithmetic():
    for k in (5, 256, 700):
        x, w = data(k, dtype=torch.bfloat16), data(k, dtype=torch.bfloat16, seed=1)
        expected = chains_of_pairs(x, w).bfloat16()
        assert same_bits(torch.dot(x.to("quartz"), w.to("quartz")), expected)
        assert same_bits(torch.mm(x.to("quartz").expand(20, -1), w.to("quartz")[:, None])[7, 0], expected)


@pytest.mark.host
def test_modes_of_the_thread_do_not_count():
    x, w = (data(3, 90, dtype=torch.float32) * 1e-39).to("quartz"), data(40, 90, dtype=torch.float32).to("quartz")
    expected = torch.mm(x, w.t())
    assert expected.count_nonzero() > 0
    try:
        if torch.set_flush_denormal(True):
            assert same_bits(torch.mm(x, w.t()), expected)
            assert (torch.tensor([1e-39]) * 1).item() == 0  # and the mode is as it was
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", FLOATS)
def test_alpha_and_beta(dtype):
    x, w, c = data(9, 50, dtype=dtype), data(21, 50, dtype=dtype, seed=1), data(9, 21, dtype=dtype, seed=2)
    a, b, addend = x.to("quartz"), w.to("quartz").t(), c.to("quartz")
    for alpha, beta in ((2, 1), (0.5, -3.0), (1, 0), (-1.5, True)):
        exact = alpha * (x.double() @ w.double().t()) + beta * c.double()
        close(torch.addmm(addend, a, b, alpha=alpha, beta=beta), exact, dtype)
        close(torch.baddbmm(addend, a[None], b[None], alpha=alpha, beta=beta)[0], exact, dtype)
        close(torch.addmv(addend[:, 4], a, b[:, 4], alpha=alpha, beta=beta), exact[:, 4], dtype)
    for shape in ((), (1,), (21,), (9, 1), (1, 21)):
        part = data(*shape, dtype=dtype, seed=3)
        close(torch.addmm(part.to("quartz"), a, b), x.double() @ w.double().t() + part.double(), dtype)
    nan = torch.full_like(addend, float("nan"))
    assert not torch.addmm(nan, a, b, beta=0).isnan().any()  # not read, as in PyTorch
    assert same_bits(torch.addmm(addend, nan[:, :1].expand(9, 50), b, alpha=0), addend)


@pytest.mark.parametrize("dtype", FLOATS)
def test_out_and_in_place(dtype):
    x, w, c = (t.to("quartz") for t in (data(9, 50, dtype=dtype), data(50, 21, dtype=dtype), data(9, 21, dtype=dtype)))
    plain, added = torch.mm(x, w), torch.addmm(c, x, w)
    out = torch.empty(0, dtype=dtype, device="quartz")
    assert torch.mm(x, w, out=out) is out and same_bits(out, plain)
    for target in (torch.zeros_like(plain), surrounded(torch.zeros_like(plain)), torch.zeros_like(plain.t()).t()):
        assert same_bits(torch.mm(x, w, out=target), plain)
        assert same_bits(torch.addmm(c, x, w, out=target), added)
        assert same_bits(torch.bmm(x[None], w[None], out=target[None])[0], plain)
        assert same_bits(torch.baddbmm(c[None], x[None], w[None], out=target[None])[0], added)
        assert same_bits(torch.mv(x, w[:, 0], out=target[:, 1]), plain[:, 0])
        assert same_bits(torch.addmv(c[:, 0], x, w[:, 0], out=target[:, 0]), added[:, 0])
        target.copy_(c)
        assert target.addmm_(x, w) is target and same_bits(target, added)
    assert same_bits(torch.addmm(c, x, w, out=c.clone()), added)
    same = c.clone()
    assert same_bits(torch.addmm(same, x, w, out=same), added)
    memory = torch.zeros(9, 100, dtype=dtype, device="quartz")
    memory[:, :50] = x
    assert same_bits(torch.mm(memory[:, :50], w, out=memory[:, 40:61]), plain)  # out lies over x
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.mm(x, w, out=torch.zeros(1, 21, dtype=dtype, device="quartz").expand(9, 21))


ERRORS = {
    "inner size": lambda d: torch.mm(torch.ones(2, 3, device=d), torch.ones(4, 5, device=d)),
    "dimensions": lambda d: torch.mm(torch.ones(2, 3, 1, device=d), torch.ones(3, 5, device=d)),
    "dtypes": lambda d: torch.mm(torch.ones(2, 3, device=d), torch.ones(3, 5, device=d).half()),
    "addend": lambda d: torch.addmm(torch.ones(7, device=d), torch.ones(2, 3, device=d), torch.ones(3, 5, device=d)),
    "addend in place": lambda d: torch.ones(5, device=d).addmm_(torch.ones(2, 3, device=d), torch.ones(3, 5, device=d)),
    "batch": lambda d: torch.bmm(torch.ones(2, 3, 4, device=d), torch.ones(3, 4, 5, device=d)),
    "vector": lambda d: torch.mv(torch.ones(2, 3, device=d), torch.ones(4, device=d)),
    "dot": lambda d: torch.dot(torch.ones(2, device=d), torch.ones(4, device=d)),
    "linear": lambda d: F.linear(torch.ones(2, 3, device=d), torch.ones(5, 4, device=d)),
    "linear with bias": lambda d: F.linear(
        torch.ones(2, 3, device=d), torch.ones(5, 3, device=d), torch.ones(4, device=d)
    ),
    "out dtype": lambda d: torch.mm(
        torch.ones(2, 3, device=d), torch.ones(3, 5, device=d), out=torch.ones(2, 5, device=d).half()
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_pytorch(name):
    native = "cuda" if torch.quartz.substrate() == "cuda" else "cpu"
    with pytest.raises(RuntimeError) as expected:
        ERRORS[name](native)
    with pytest.raises(RuntimeError) as got:
        ERRORS[name]("quartz")
    assert str(got.value).splitlines()[0].replace("quartz:0", native).replace("quartz", native) in str(expected.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64], ids=str)
def test_other_dtypes_are_pytorch_s(dtype):
    x, y = torch.arange(6).reshape(2, 3).to(dtype), torch.arange(12).reshape(3, 4).to(dtype)
    if torch.quartz.substrate() == "cuda" and not dtype.is_floating_point and not dtype.is_complex:
        with pytest.raises(RuntimeError, match="not implemented for 'Long'"):  # as on plain CUDA
            torch.mm(x.to("quartz"), y.to("quartz"))
        return
    assert torch.equal(torch.mm(x.to("quartz"), y.to("quartz")).cpu(), torch.mm(x, y))
    assert torch.equal((x.to("quartz").conj() @ y.to("quartz")).cpu(), x.conj() @ y)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 4, 3), (2, 1, 2, 3), (0, 3), (2, 0, 3)], ids=str)
def test_gradients_of_linear(shape, bias):
    def run(device):
        x = data(*shape, dtype=torch.float32).to(device).requires_grad_()
        w = data(5, 3, dtype=torch.float32).to(device).requires_grad_()
        b = data(5, dtype=torch.float32).to(device).requires_grad_() if bias else None
        y = F.linear(x, w, b)
        inputs = [x, w] + ([b] if bias else [])
        first = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        forward = torch.func.jvp(lambda t: F.linear(t, w, b), (x.detach(),), (x.detach() * 2,))
        mapped = torch.vmap(lambda t: F.linear(t, w, b))(x.detach()[None])
        return [t.detach().cpu() for t in (y, *first, *second, *forward, mapped)]

    for got, expected in zip(run("quartz"), run("cpu"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_quartz_linear(device, dtype, activation):
    x, w, bias = data(2, 7, 40, dtype=dtype), data(50, 40, dtype=dtype, seed=1), data(50, dtype=dtype, seed=2)
    x[0, 0] = 0
    for b in (bias, None):
        exact = x.double() @ w.double().t()
        exact = ACTIVATIONS[activation](exact if b is None else exact + b.double())
        got = ops.linear(x.to(device), w.to(device), None if b is None else b.to(device), activation)
        assert got.shape == (2, 7, 50) and got.dtype == dtype and got.device.type == device
        close(got, exact, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 20, 100, 300])
def test_a_frozen_weight_changes_no_bit(device, dtype, rows):
    x, w = data(rows, 128, dtype=dtype).to(device), data(200, 128, dtype=dtype, seed=1).to(device)
    assert same_bits(ops.linear(x, w, frozen_weight=True), ops.linear(x, w))


@pytest.mark.parametrize("rows", [1, 8, 64, 128, 256, 700])
def test_a_weight_written_just_before(rows):
    # On a GPU a product starts before the kernel before it has ended, and must not see what that one overwrites.
    x, weights = data(rows, 1024, dtype=torch.bfloat16).to("quartz"), data(3, 1024, 1024, dtype=torch.bfloat16)
    weights, w = weights.to("quartz"), torch.empty(1024, 1024, dtype=torch.bfloat16, device="quartz")
    expected = [F.linear(x, weights[i].clone()) for i in range(3)]
    got = []
    for i in range(12):
        w.copy_(weights[i % 3])
        got.append(F.linear(x, w))
    for i in range(12):
        assert same_bits(got[i], expected[i % 3])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_quartz_linear_extremes(activation):
    values = torch.tensor([-float("inf"), -1e30, -100.0, -20.0, -12.0, -5.0, -1e-3, 0.0, 1e-3, 5.0, 20.0, 100.0, 1e30])
    got = ops.linear(values[:, None].to("quartz"), torch.ones(1, 1, device="quartz"), None, activation).cpu()[:, 0]
    exact = ACTIVATIONS[activation](values.double())
    apart = activation == "gelu" and torch.quartz.substrate() == "cuda"  # PyTorch's kernel, which adds 1 to erf
    torch.testing.assert_close(got.double(), exact, rtol=3e-5, atol=1e-6 if apart else 1e-37, equal_nan=True)
    assert ops.linear(
        torch.full((1, 1), float("nan"), device="quartz"), torch.ones(1, 1, device="quartz"), None, activation
    ).isnan()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_quartz_linear(activation):
    def run(call, device):
        tensors = [data(*shape, dtype=torch.float32).to(device).requires_grad_() for shape in ((2, 3, 4), (5, 4), (5,))]
        y = call(*tensors)
        first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
        return [y, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), tensors)]

    got = run(lambda x, w, b: ops.linear(x, w, b, activation), "quartz")
    expected = run(lambda x, w, b: ACTIVATIONS[activation](F.linear(x, w, b)), "cpu")
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), reference, rtol=1e-4, atol=1e-4)


def test_registrations():
    x, w, b = (torch.randn(*s, device="quartz", requires_grad=True) for s in ((2, 8), (3, 8), (3,)))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.quartz.linear.default, (x, w, b, "silu"), test_utils=checks)
    torch.library.opcheck(torch.ops.quartz.linear.default, (x, w), test_utils=checks)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"w": torch.ones(4, 5)}, RuntimeError, r"quartz::linear: weight must be \(n, k\)"),
        ({"w": torch.ones(4, 3).half()}, RuntimeError, "quartz::linear: weight must have the dtype of x, got Half"),
        (
            {"x": torch.ones(2, 3).long()},
            RuntimeError,
            "quartz::linear: x must be float32, float16 or bfloat16, got Long",
        ),
        ({"bias": torch.ones(3)}, RuntimeError, "quartz::linear: bias must have one element for each row of weight"),
        ({"activation": "swish"}, ValueError, "quartz::linear: activation must be one of none, .* got swish"),
    ],
)
def test_errors_of_quartz_linear(change, error, message):
    arguments = {"x": torch.ones(2, 3), "w": torch.ones(4, 3), "bias": torch.ones(4), "activation": "none"} | change
    x, w, bias = (arguments[name].to("quartz") for name in ("x", "w", "bias"))
    with pytest.raises(error, match=message):
        ops.linear(x, w, bias, arguments["activation"])
