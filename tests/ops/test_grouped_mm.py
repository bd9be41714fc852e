"""_grouped_mm of quartz tensors: against float64, and with the bits of mm on every group."""

import pytest
import torch
from torch_quartz.testing import FLOATS, same_bits, surrounded

pytestmark = pytest.mark.host  # on cuda it is PyTorch's

GROUPS = [[3, 3, 8, 20], [0, 0, 0, 20], [20, 20, 20, 20], [1, 2, 3, 20], [5, 9, 12, 15]]


def data(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to("quartz")


def offsets(ends):
    return torch.tensor(ends, dtype=torch.int32, device="quartz")


def ranges(ends):
    return list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ends", GROUPS, ids=str)
def test_ragged_rows(dtype, ends):
    x, experts = data(20, 64, dtype=dtype), data(4, 48, 64, dtype=dtype, seed=1)
    for a in (x, surrounded(x, margin=8), x.t().contiguous().t()):
        for w in (experts.transpose(1, 2), experts.transpose(1, 2).contiguous()):
            out = torch._grouped_mm(a, w, offs=offsets(ends))
            assert out.shape == (20, 48) and out.dtype == dtype
            for expert, (begin, end) in enumerate(ranges(ends)):
                assert same_bits(out[begin:end].contiguous(), torch.mm(x[begin:end], experts[expert].t()))
            assert not out[ends[-1] :].any()  # rows of no group
    exact = torch.cat([x[b:e].double() @ experts[i].double().t() for i, (b, e) in enumerate(ranges(ends))])
    torch.testing.assert_close(out[: ends[-1]].double(), exact, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ends", GROUPS, ids=str)
def test_ragged_columns_and_ragged_sums(dtype, ends):
    stack, flat = data(4, 16, 64, dtype=dtype), data(20, 64, dtype=dtype, seed=1)
    out = torch._grouped_mm(stack, flat.t(), offs=offsets(ends))
    assert out.shape == (16, 20)
    for group, (begin, end) in enumerate(ranges(ends)):
        assert same_bits(out[:, begin:end].contiguous(), torch.mm(stack[group], flat[begin:end].t()))
    x, y = data(20, 24, dtype=dtype), data(20, 48, dtype=dtype, seed=1)  # the gradient of the weights
    out = torch._grouped_mm(x.t(), y, offs=offsets(ends))
    assert out.shape == (4, 24, 48)
    for group, (begin, end) in enumerate(ranges(ends)):
        assert same_bits(out[group].contiguous(), torch.mm(x[begin:end].t(), y[begin:end]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_batches(dtype):
    x, y = data(3, 8, 16, dtype=dtype), data(3, 16, 24, dtype=dtype, seed=1)
    assert same_bits(torch._grouped_mm(x, y).contiguous(), torch.bmm(x, y))


def test_threads_and_a_permutation_of_tokens():
    x, experts, ends = data(60, 64, dtype=torch.bfloat16), data(3, 64, 64, dtype=torch.bfloat16, seed=1), [17, 18, 60]
    expected = torch._grouped_mm(x, experts, offs=offsets(ends))
    order = torch.cat([torch.randperm(e - b) + b for b, e in ranges(ends)]).to("quartz")
    assert same_bits(torch._grouped_mm(x[order], experts, offs=offsets(ends)), expected[order])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert same_bits(torch._grouped_mm(x, experts, offs=offsets(ends)), expected)
    finally:
        torch.set_num_threads(threads)


def test_gradients():
    ends = [3, 3, 8, 20]

    def run(device):
        x = data(20, 16, dtype=torch.float32).to(device).requires_grad_()
        w = data(4, 16, 24, dtype=torch.float32, seed=1).to(device).requires_grad_()
        out = torch._grouped_mm(x, w, offs=offsets(ends).to(device))
        return [t.cpu() for t in (out, *torch.autograd.grad(out.square().sum(), (x, w)))]

    for got, expected in zip(run("quartz"), run("cpu"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_errors():
    x, experts = data(20, 64, dtype=torch.bfloat16), data(4, 64, 48, dtype=torch.bfloat16)
    for ends in ([3, 2, 8, 20], [3, 4, 8, 21], [-1, 4, 8, 20]):
        with pytest.raises(RuntimeError, match="_grouped_mm: offs must ascend from 0 to at most 20"):
            torch._grouped_mm(x, experts, offs=offsets(ends))
    with pytest.raises(RuntimeError, match="Offsets have to be int32"):
        torch._grouped_mm(x, experts, offs=offsets([1, 2, 3, 20]).long())
    with pytest.raises(RuntimeError, match="batch sizes have to match"):
        torch._grouped_mm(x, experts, offs=offsets([1, 2, 20]))
