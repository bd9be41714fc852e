"""What must not change the bits of a row, for every operator of `invariance_table.py`.

Tests of one operator (`test_<operator>.py`) add what only it has: chunks and padding of attention, permutations of
experts, values.
"""

import math
import pathlib
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance_table import NOT_BY_ROWS, TABLE, Operator, one
from torch_quartz.testing import same_bits, surrounded

FEW = settings(max_examples=8, deadline=None)


def tensors(result):
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def same(first, second):
    """Whether results are the same bits; NaN of any sign and payload is NaN."""
    pairs = zip(tensors(first), tensors(second), strict=True)
    return all(same_bits(*(t.view(torch.uint8) if t.element_size() == 1 else t for t in pair)) for pair in pairs)


def part(result, begin, end):
    return tuple(t[begin:end] for t in tensors(result))


def arguments(entry, count, dtype, seed=0):
    """Return the arguments with rows and the shared ones, on quartz."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to("quartz")

    return entry.rows(count, random), entry.shared(random)


def is_real(tensor):
    return tensor.is_floating_point() and tensor.element_size() > 1


def with_neighbours(rows, place, fill):
    """Return the rows with every one but `place` filled, where they are numbers."""
    changed = {}
    for name, tensor in rows.items():
        changed[name] = tensor.clone()
        if is_real(tensor):
            changed[name][torch.arange(len(tensor)) != place] = fill
    return changed


def laid_out(tensor, layout):
    """Return the same values in another place or order of memory, with NaN or large integers around them."""
    fill = math.nan if is_real(tensor) else 0 if tensor.element_size() == 1 else 10**6
    if layout == "within a larger one":
        if tensor.element_size() == 1:
            return surrounded(tensor.view(torch.uint8), 255).view(tensor.dtype)
        return surrounded(tensor, fill)
    if layout == "every second row":
        wide = tensor.repeat_interleave(2, 0)
        if is_real(tensor):
            wide[1::2] = fill
        return wide[::2]
    if layout == "rows apart in memory" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "unaligned":
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        return flat[1:].view(tensor.shape).copy_(tensor)
    return tensor


LAYOUTS = ["as it is", "within a larger one", "every second row", "rows apart in memory", "unaligned"]


@pytest.mark.parametrize("name", TABLE)
@FEW
@given(st.data())
def test_number_place_and_neighbours(name, data):
    """A row's bits are those it has alone: among 1 to 40 rows, at any place, beside NaN, infinity or other numbers."""
    entry, dtype = TABLE[name], data.draw(st.sampled_from(TABLE[name].dtypes))
    count = data.draw(st.sampled_from([1, 2, 7, 8, 33, 40]))
    place = data.draw(st.integers(0, count - 1))
    rows, shared = arguments(entry, count, dtype, data.draw(st.integers(0, 99)))
    alone = entry.call(**{key: t[place : place + 1].clone() for key, t in rows.items()}, **shared)
    for fill in (None, math.nan, math.inf, 3e4):
        batch = rows if fill is None else with_neighbours(rows, place, fill)
        assert same(part(entry.call(**batch, **shared), place, place + 1), alone), f"neighbours {fill}"
    begin = data.draw(st.integers(0, place))  # fewer rows before it, fewer behind it
    end = data.draw(st.integers(place + 1, count))
    fewer = entry.call(**{key: t[begin:end] for key, t in rows.items()}, **shared)
    assert same(part(fewer, place - begin, place - begin + 1), alone)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TABLE)
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_layout_views_and_memory_around(name, layout, data):
    """Strides, offsets, alignment and what lies in memory around the operands change nothing, and are not written."""
    entry, dtype = TABLE[name], data.draw(st.sampled_from(TABLE[name].dtypes))
    rows, shared = arguments(entry, data.draw(st.sampled_from([1, 3, 33])), dtype, data.draw(st.integers(0, 99)))
    expected = entry.call(**rows, **shared)
    moved = {key: laid_out(tensor, layout) for key, tensor in rows.items()}
    assert same(entry.call(**moved, **shared), expected)
    assert all(same(moved[key], tensor) for key, tensor in rows.items()), "an argument was written"
    weights = {
        key: laid_out(tensor, layout) if isinstance(tensor, torch.Tensor) and tensor.dim() else tensor
        for key, tensor in shared.items()
        if layout != "rows apart in memory" or key not in entry.lines
    }
    try:
        got = entry.call(**rows, **shared | weights)
    except NotImplementedError as error:  # experts on a GPU take weights as they lie in checkpoints only, and say so
        assert torch.quartz.substrate() == "cuda" and "contiguous weights, aligned" in str(error)
    else:
        assert same(got, expected)


@pytest.mark.parametrize("name", TABLE)
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_threads_and_streams(name, data):
    """The number of threads and the stream, and memory that was NaN before, change nothing."""
    entry, dtype = TABLE[name], data.draw(st.sampled_from(TABLE[name].dtypes))
    rows, shared = arguments(entry, data.draw(st.sampled_from([1, 5, 65])), dtype, data.draw(st.integers(0, 99)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = entry.call(**rows, **shared)
        for count in (2, 3, 8):
            torch.set_num_threads(count)
            free = [torch.full_like(t, math.nan) for t in tensors(expected) if is_real(t) for _ in range(3)]
            del free
            assert same(entry.call(**rows, **shared), expected)
    finally:
        torch.set_num_threads(before)
    stream = torch.quartz.Stream()
    stream.wait_stream(torch.quartz.current_stream())
    with torch.quartz.stream(stream):
        got = entry.call(**rows, **shared)
    stream.synchronize()
    assert same(got, expected)


@pytest.mark.host
@pytest.mark.parametrize("name", TABLE)
def test_instruction_sets(name, instruction_sets):
    """AVX2, AVX-512 and AVX-512 with bfloat16 products give the same bits."""
    entry = TABLE[name]
    for dtype in entry.dtypes:
        rows, shared = arguments(entry, 9, dtype)
        results = [entry.call(**rows, **shared) for _ in instruction_sets()]
        assert all(same(result, results[0]) for result in results)


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in TABLE if name != "dot"])  # a loop of the test, not of the operator
def test_graph_capture(name):
    """A captured call gives the bits of the eager one, for the numbers it was captured with and for others."""
    entry = TABLE[name]
    rows, shared = arguments(entry, 7, entry.dtypes[-1], 1)
    entry.call(**rows, **shared)  # plans and workspaces of the first call
    torch.quartz.synchronize()
    graph = torch.quartz.Graph()
    with torch.quartz.graph(graph):
        got = entry.call(**rows, **shared)
    for seed in (1, 2, 3):
        for key, tensor in arguments(entry, 7, entry.dtypes[-1], seed)[0].items():
            rows[key].copy_(tensor)
        graph.replay()
        torch.quartz.synchronize()
        assert same(got, entry.call(**rows, **shared))


def test_the_properties_notice_a_violation(monkeypatch):
    for property_, call in (
        (test_number_place_and_neighbours, lambda x: x - x.mean(0)),
        (test_number_place_and_neighbours, lambda x: x + torch.arange(len(x), device=x.device)[:, None]),
        (
            lambda name: test_layout_views_and_memory_around(layout="every second row", name=name),
            lambda x: x * x.stride(0),
        ),
        (test_threads_and_streams, lambda x: x * torch.get_num_threads()),
    ):
        monkeypatch.setitem(TABLE, "wrong", Operator(one(130), lambda random: {}, call, ("wrong",)))
        with pytest.raises(AssertionError):
            property_(name="wrong")


def test_every_operator_with_a_proof_is_in_the_table():
    covered = {name for entry in TABLE.values() for name in entry.covers}
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("quartz::")}
    assert ours - covered == {name for name in NOT_BY_ROWS if name.startswith("quartz::")}
    page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "determinism.md"
    table = page.read_text(encoding="utf-8").partition("## Operators")[2].partition("\n## ")[0]
    named = set()
    for line in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        named |= set(re.findall(r"`([\w:]+)`", line))
    known = covered | set(NOT_BY_ROWS) | {name.removeprefix("quartz::") for name in covered | set(NOT_BY_ROWS)}
    assert len(named) > 40 and named <= known
