"""_grouped_mm of quartz tensors: against float64, and with the bits of mm on every group."""

import pytest
import torch
from torch_quartz.testing import FLOATS, same_bits, surrounded

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
@pytest.mark.parametrize(
    ("tokens", "groups", "k", "n"),
    [(700, 3, 128, 136), (200, 40, 192, 64), (90, 5, 72, 40), (64, 1, 64, 8), (0, 3, 64, 16), (300, 1100, 64, 8)],
    ids=str,
)
def test_sizes_that_choose_another_kernel(dtype, tokens, groups, k, n):
    # Many and few rows a group, k and n that are no multiples of a tile, no rows, more groups than a block has threads.
    ends = torch.randint(0, tokens + 1, (groups,), generator=torch.Generator().manual_seed(3)).sort().values.tolist()
    x, experts = data(tokens, k, dtype=dtype), data(groups, n, k, dtype=dtype, seed=1)
    grad = data(tokens, n, dtype=dtype, seed=2)
    out = torch._grouped_mm(x, experts.transpose(1, 2), offs=offsets(ends))
    sums = torch._grouped_mm(grad.t(), x, offs=offsets(ends))
    assert out.shape == (tokens, n) and sums.shape == (groups, n, k)
    for group, (begin, end) in list(enumerate(ranges(ends)))[:: max(1, groups // 40)]:
        assert same_bits(out[begin:end].contiguous(), torch.mm(x[begin:end], experts[group].t()))
        assert same_bits(sums[group].contiguous(), torch.mm(grad[begin:end].t(), x[begin:end]))
    assert not out[ends[-1] :].any()


def test_nan_stays_in_its_group():
    x, grad = data(90, 64, dtype=torch.bfloat16), data(90, 72, dtype=torch.bfloat16, seed=1)
    x[40:47] = float("nan")
    ends = [13, 40, 47, 90]
    for first, second in ((grad, x), (x, grad)):
        out = torch._grouped_mm(first.t(), second, offs=offsets(ends))
        assert out[2].isnan().all() and not out[[0, 1, 3]].isnan().any()


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


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients(transposed):
    ends = [3, 3, 8, 20]

    def run(device):
        x = data(20, 16, dtype=torch.float32).to(device).requires_grad_()
        w = data(4, *((24, 16) if transposed else (16, 24)), dtype=torch.float32, seed=1).to(device).requires_grad_()
        out = torch._grouped_mm(x, w.transpose(1, 2) if transposed else w, offs=offsets(ends).to(device))
        return [t.cpu() for t in (out, *torch.autograd.grad(out.square().sum(), (x, w)))]

    for got, expected in zip(run("quartz"), run("cpu"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_offsets_are_not_read_by_the_host():
    # What the host refuses has a defined result on a GPU: an end below an earlier one makes an empty group, one beyond
    # the rows ends with them.
    x, experts = data(20, 64, dtype=torch.bfloat16), data(4, 64, 48, dtype=torch.bfloat16)
    for ends, meant in (
        ([5, 2, 8, 20], [5, 5, 8, 20]),
        ([3, 4, 8, 31], [3, 4, 8, 20]),
        ([-1, 4, 8, 20], [0, 4, 8, 20]),
    ):
        assert same_bits(
            torch._grouped_mm(x, experts, offs=offsets(ends)), torch._grouped_mm(x, experts, offs=offsets(meant))
        )
    torch.quartz.synchronize()
    graph, ends = torch.quartz.Graph(), offsets([5, 5, 8, 20])
    with torch.quartz.graph(graph):
        out = torch._grouped_mm(x, experts, offs=ends)
    for now in ([5, 5, 8, 20], [0, 20, 20, 20]):
        ends.copy_(offsets(now))
        graph.replay()
        assert same_bits(out, torch._grouped_mm(x, experts, offs=offsets(now)))


@pytest.mark.host
def test_errors():
    x, experts = data(20, 64, dtype=torch.bfloat16), data(4, 64, 48, dtype=torch.bfloat16)
    for ends in ([3, 2, 8, 20], [3, 4, 8, 21], [-1, 4, 8, 20]):
        with pytest.raises(RuntimeError, match="_grouped_mm: offs must ascend from 0 to at most 20"):
            torch._grouped_mm(x, experts, offs=offsets(ends))
    with pytest.raises(RuntimeError, match="Offsets have to be int32"):
        torch._grouped_mm(x, experts, offs=offsets([1, 2, 3, 20]).long())
    with pytest.raises(RuntimeError, match="batch sizes have to match"):
        torch._grouped_mm(x, experts, offs=offsets([1, 2, 20]))
