"""Reductions, softmax and cumsum over the last dimension of quartz tensors: values, rules of PyTorch, bits of a row."""

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz.testing import FLOATS, same_bits, surrounded

REDUCTIONS = {
    "sum": lambda x, **o: x.sum(-1, **o),
    "mean": lambda x, **o: x.mean(-1, **o),
    "var": lambda x, **o: x.var(-1, **o),
    "std": lambda x, **o: x.std(-1, **o),
    "logsumexp": lambda x, **o: x.logsumexp(-1, **o),
    "argmax": lambda x, **o: x.argmax(-1, **o),
    "argmin": lambda x, **o: x.argmin(-1, **o),
}
SAME_SHAPE = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cumsum": lambda x: x.cumsum(-1),
}
ALL = REDUCTIONS | SAME_SHAPE
OPERATORS = {
    "sum": "aten::sum.dim_IntList",
    "mean": "aten::mean.dim",
    "var": "aten::var.correction",
    "std": "aten::std.correction",
    "logsumexp": "aten::logsumexp",
    "argmax": "aten::argmax",
    "argmin": "aten::argmin",
    "softmax": "aten::_softmax",
    "log_softmax": "aten::_log_softmax",
    "cumsum": "aten::cumsum",
}


def own_calls(name, call):
    torch.quartz.reset_op_counts()
    call()
    return torch.quartz.op_counts().get(OPERATORS[name], (0, 0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(2,), (7,), (3, 16), (2, 5, 33), (2, 4096), (3, 40000), (4, 65)])
def test_values(name, dtype, shape):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3).to(dtype)
    got, want = ALL[name](x.to("quartz")).cpu(), ALL[name](x.double())
    if want.dtype == torch.int64:
        assert got.dtype == torch.int64 and torch.equal(got, want)
        return
    assert got.dtype == dtype
    tolerance = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    scale = math.sqrt(shape[-1]) if name in ("sum", "cumsum") else 1e-2 if name == "softmax" else 1
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probabilities_near_zero_keep_the_digits(dtype):
    x = (torch.randn(2000, 5) * 5).to(dtype)
    want = x.double().log_softmax(-1)
    tolerance = 4e-3 if dtype == torch.bfloat16 else 5e-4
    torch.testing.assert_close(x.to("quartz").log_softmax(-1).cpu().double(), want, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_an_own_kernel_serves_the_last_dimension_only(name):
    x = torch.randn(4, 6, device="quartz")
    assert tuple(own_calls(name, lambda: ALL[name](x))) == (1, 0)
    other = {"sum": lambda: x.sum(0), "mean": lambda: x.mean((0, 1)), "argmax": lambda: x.argmax()}
    for key, call in other.items():
        native = {"sum": lambda t: t.sum(0), "mean": lambda t: t.mean((0, 1)), "argmax": lambda t: t.argmax()}[key]
        torch.testing.assert_close(call().cpu(), native(x.cpu()))
    assert x.sum().shape == () and x.mean().shape == ()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_keepdim_and_negative_dimension(name):
    x = torch.randn(2, 3, 8, device="quartz")
    kept = REDUCTIONS[name](x, keepdim=True)
    assert kept.shape == (2, 3, 1)
    assert torch.equal(kept.squeeze(-1).cpu(), REDUCTIONS[name](x).cpu())
    function = getattr(torch, name)
    assert torch.equal(function(x, 2).cpu(), function(x, -1).cpu())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("asked", FLOATS)
@pytest.mark.parametrize("name", ["sum", "mean", "cumsum"])
def test_dtype_of_the_result(name, dtype, asked):
    x = torch.randn(3, 200).to(dtype)
    function = getattr(torch, name)
    got = function(x.to("quartz"), -1, dtype=asked)
    assert got.dtype == asked
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[asked]
    want = function(x.to(asked).double(), -1)
    torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance * 15)


def test_bfloat16_sums_accumulate_in_float32():
    assert torch.full((4096,), 1.0, dtype=torch.bfloat16, device="quartz").sum(-1).item() == 4096
    assert torch.full((1, 300), 0.1, dtype=torch.bfloat16, device="quartz").cumsum(-1)[0, -1].item() == pytest.approx(
        30, rel=8e-3
    )


@pytest.mark.parametrize("name", ALL)
def test_other_dtypes_run_the_native_kernel(name):
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(ALL[name](x.to("quartz")).cpu(), ALL[name](x))
    if name in ("sum", "argmax", "argmin", "cumsum"):
        integers = torch.randint(-9, 9, (3, 8))
        assert torch.equal(ALL[name](integers.to("quartz")).cpu(), ALL[name](integers))


@pytest.mark.parametrize("name", ["sum", "mean", "var", "std", "logsumexp", "argmax", "argmin"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_out(name, contiguous):
    x = torch.randn(5, 33, device="quartz")
    want = REDUCTIONS[name](x)
    out = (
        torch.empty(5, dtype=want.dtype, device="quartz")
        if contiguous
        else torch.empty(10, dtype=want.dtype, device="quartz")[::2]
    )
    options = {"correction": 1} if name in ("var", "std") else {}
    assert getattr(torch, name)(x, -1, out=out, **options) is out
    assert torch.equal(out.cpu(), want.cpu())
    if name == "mean" and torch.quartz.substrate() == "cuda":
        return  # plain CUDA writes a mean into integers, the CPU refuses
    integers = torch.empty(5, dtype=torch.int16)
    try:
        getattr(torch, name)(x.cpu(), -1, out=integers, **options)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            getattr(torch, name)(x, -1, out=integers.to("quartz"), **options)


def test_out_of_the_same_shape():
    x = torch.randn(5, 33, device="quartz")
    for function in (torch.softmax, torch.log_softmax, torch.cumsum):
        want = function(x, -1)
        out = x.clone()
        function(out, -1, out=out)
        assert same_bits(out, want)
    y = x.clone()
    assert y.cumsum_(-1) is y and same_bits(y, x.cumsum(-1))


@pytest.mark.parametrize("correction", [0, 1, 2.5, 8, 9])
def test_correction(correction):
    x = torch.randn(3, 8)
    with pytest.warns(UserWarning) if correction >= 8 else contextlib.nullcontext():
        want = x.var(-1, correction=correction)
        got = x.to("quartz").var(-1, correction=correction)
    torch.testing.assert_close(got.cpu(), want, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_ties_and_nan_of_argmax(dtype):
    nan, inf = float("nan"), float("inf")
    rows = [
        [1, 3, 3, 2] * 20,
        [0.0, -0.0, -1, 0] * 20,
        [1, nan, 5, nan] * 20,
        [inf, 1, inf, -inf] * 20,
        [-inf, -inf, -inf, -inf] * 20,
        [-1, -2, -2, -1] * 20,
    ]
    for length in (4, 17, 64, 67, 80):
        x = torch.tensor([row[:length] for row in rows], dtype=dtype)
        for function in (torch.argmax, torch.argmin):
            want = []
            for row in x.tolist():
                undefined = [i for i, v in enumerate(row) if v != v]
                best = max(row) if function is torch.argmax else min(row)
                want.append(undefined[0] if undefined else row.index(best))
            assert function(x.to("quartz"), -1).tolist() == want


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["sum", "mean", "var", "logsumexp", "softmax", "log_softmax", "cumsum"])
def test_infinities_and_nan_as_on_the_cpu(name, dtype):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1, inf, 2], [1, -inf, 2], [-inf, -inf, -inf], [inf, -inf, 1], [nan, 1, 2], [1, 2, 3]]).to(dtype)
    torch.testing.assert_close(ALL[name](x.to("quartz")).cpu(), ALL[name](x), equal_nan=True, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,)])
def test_empty(name, shape):
    x = torch.empty(shape)
    try:
        want = ALL[name](x)
    except (IndexError, RuntimeError) as error:
        with pytest.raises(type(error)):
            ALL[name](x.to("quartz"))
        return
    torch.testing.assert_close(ALL[name](x.to("quartz")).cpu(), want, equal_nan=True)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_bits_of_a_row_depend_on_the_row_alone(data):
    dtype, name = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(sorted(ALL)))
    width, rows = data.draw(st.integers(2, 400)), data.draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    row = torch.randn(width, generator=generator).to(dtype)
    alone = ALL[name](row[None].to("quartz"))[0]
    batch = torch.randn(rows, width, generator=generator).to(dtype)
    batch[::3] = float("nan")
    place = data.draw(st.integers(0, rows - 1))
    batch[place] = row
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.sampled_from([1, 2, 3])))
        for layout in (batch.to("quartz"), surrounded(batch.to("quartz")), batch.to("quartz").t().contiguous().t()):
            assert same_bits(ALL[name](layout)[place], alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ALL)
def test_instruction_sets_agree(name, dtype, instruction_sets):
    for width in (3, 203, 9000):
        x = torch.randn(4, width).to("quartz", dtype)
        results = [ALL[name](x) for _ in instruction_sets()]
        assert all(same_bits(result, results[0]) for result in results)


def test_a_prefix_has_the_same_cumulative_sums():
    x = torch.randn(1, 3000, device="quartz")
    assert same_bits(x.cumsum(-1)[:, :777], x[:, :777].contiguous().cumsum(-1))


@pytest.mark.parametrize("name", ["sum", "mean", "var", "std", "logsumexp", "softmax", "log_softmax", "cumsum"])
def test_gradients(name):
    x = torch.randn(3, 7, dtype=torch.float64)
    leaf = x.float().to("quartz").requires_grad_()
    y = ALL[name](leaf)
    cotangent = torch.randn(y.shape, dtype=torch.float64)
    (got,) = torch.autograd.grad(y, leaf, cotangent.float().to("quartz"))
    reference = x.requires_grad_()
    (want,) = torch.autograd.grad(ALL[name](reference), reference, cotangent)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)


def test_errors_are_those_of_pytorch():
    x = torch.ones(2, 3, device="quartz")
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.sum(2)
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.argmax(-3)
    with pytest.raises(RuntimeError, match=r"could not infer output dtype|must be either a floating point"):
        x.int().mean(-1)
