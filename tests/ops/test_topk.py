"""topk and sort over quartz tensors: NaN above all numbers, equal values by ascending index, bits kept."""

import pytest
import torch
import torch_quartz
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz.testing import FLOATS, bits, same_bits, surrounded


def reference(row, largest):
    """Return the indices of a row in the order of the result."""

    def key(i):
        value = row[i]
        rank = (1, 0.0) if value != value else (0, value)
        return ((-rank[0], -rank[1]) if largest else rank, i)

    return sorted(range(len(row)), key=key)


def rows(dtype, count, width, generator):
    x = torch.randint(-5, 5, (count, width), generator=generator).to(dtype)  # many ties
    special = torch.rand(count, width, generator=generator)
    x[special < 0.05] = float("nan")
    x[(special > 0.05) & (special < 0.1)] = -0.0
    x[special > 0.97] = float("inf")
    x[(special > 0.94) & (special < 0.97)] = float("-inf")
    return x


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(
    ("width", "k"), [(1, 1), (5, 5), (40, 7), (300, 17), (300, 300), (3000, 20), (3000, 1000), (5000, 2500)]
)
def test_values_and_ties(dtype, largest, width, k):
    x = rows(dtype, 3, width, torch.Generator().manual_seed(0))
    values, indices = x.to("quartz").topk(k, largest=largest)
    assert indices.tolist() == [reference(row, largest)[:k] for row in x.tolist()]
    assert torch.equal(bits(values), bits(x).gather(-1, indices.cpu()))  # gather itself may change the bits of NaN


def test_of_random_rows():
    x = torch.randn(4, 20000)
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    for k in (1, 50, 5000):
        got = x.to("quartz").topk(k)
        assert torch.equal(got.indices.cpu(), indices[:, :k]) and torch.equal(got.values.cpu(), values[:, :k])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_row_does_not_see_its_neighbours(data):
    dtype, largest = data.draw(st.sampled_from(FLOATS)), data.draw(st.booleans())
    width, count = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 20))
    k, place = data.draw(st.integers(1, width)), data.draw(st.integers(0, count - 1))
    x = rows(dtype, count, width, torch.Generator().manual_seed(data.draw(st.integers(0, 2**31))))
    alone = x[place].to("quartz").topk(k, largest=largest)
    for layout in (x.to("quartz"), surrounded(x.to("quartz")), x.to("quartz").t().contiguous().t()):
        got = layout.topk(k, largest=largest)
        assert same_bits(got.values[place], alone.values) and torch.equal(got.indices[place].cpu(), alone.indices.cpu())


def test_instruction_sets_agree(instruction_sets):
    for dtype in FLOATS:
        x = rows(dtype, 4, 1000, torch.Generator().manual_seed(1)).to("quartz")
        for k in (10, 300):
            results = [x.topk(k).indices.cpu() for _ in instruction_sets()]
            assert all(torch.equal(result, results[0]) for result in results)


def test_out_and_other_dimensions_and_dtypes():
    x = torch.randn(6, 9)
    want = x.topk(3)
    values, indices = torch.empty(6, 3, device="quartz"), torch.empty(6, 3, dtype=torch.int64, device="quartz")
    torch.topk(x.to("quartz"), 3, out=(values, indices))
    assert torch.equal(values.cpu(), want.values) and torch.equal(indices.cpu(), want.indices)
    assert torch.equal(x.to("quartz").topk(2, dim=0).values.cpu(), x.topk(2, dim=0).values)
    integers = torch.randperm(40).view(4, 10)
    assert torch.equal(integers.to("quartz").topk(3).values.cpu(), integers.topk(3).values)
    assert torch.equal(x.double().to("quartz").topk(3).values.cpu(), want.values.double())
    assert x.to("quartz").topk(0).values.shape == (6, 0)
    assert torch.empty(0, 4, device="quartz").topk(2).values.shape == (0, 2)
    with pytest.raises(RuntimeError, match="out of range"):
        x.to("quartz").topk(10)


def test_gradient():
    x = torch.randn(3, 9, device="quartz", requires_grad=True)
    values, indices = x.topk(2)
    values.sum().backward()
    assert torch.equal(x.grad.cpu(), torch.zeros(3, 9).scatter(-1, indices.cpu(), 1.0))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
@pytest.mark.parametrize("descending", [False, True])
def test_sort_is_stable(dtype, descending):
    x = torch.randint(0, 4, (3, 500)).to(dtype)
    want = torch.sort(x, stable=True, descending=descending)
    for got in (x.to("quartz").sort(descending=descending), x.to("quartz").sort(stable=False, descending=descending)):
        assert torch.equal(got.values.cpu(), want.values) and torch.equal(got.indices.cpu(), want.indices)
    assert torch.equal(x.to("quartz").argsort(descending=descending).cpu(), want.indices)
    values, indices = torch.empty_like(x, device="quartz"), torch.empty(3, 500, dtype=torch.int64, device="quartz")
    torch.sort(x.to("quartz"), descending=descending, out=(values, indices))
    assert torch.equal(indices.cpu(), want.indices)


def test_sort_counts_as_proven():
    torch.quartz.reset_op_counts()
    torch.randn(3, 9, device="quartz").sort()
    torch.randn(3, 9, device="quartz").topk(2)
    names = {operator.name for operator in torch_quartz.determinism_report()}
    assert not names & {"aten::sort.stable", "aten::topk"}
