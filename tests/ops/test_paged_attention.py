"""quartz::paged_attention and quartz::write_kv: the bits of quartz::attention, whatever else the cache holds."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits


def paged(k, v, block_size, fill=float("nan"), spare=3, seed=0):
    """Put sequences of keys and values (heads, length, size) into the shuffled blocks of a cache full of `fill`."""
    generator = torch.Generator().manual_seed(seed)
    counts = [keys.shape[1] for keys in k]
    needed = [-(-count // block_size) for count in counts]
    blocks = sum(needed) + spare
    order = torch.randperm(blocks, generator=generator)
    table = torch.full((len(k), max([1, *needed]) + 1), -7, dtype=torch.int64)  # unused entries name no block
    heads, size, value_size = k[0].shape[0], k[0].shape[2], v[0].shape[2]
    caches = [
        torch.full((blocks, block_size, heads, n), fill, dtype=k[0].dtype, device="quartz") for n in (size, value_size)
    ]
    begin = 0
    for s, count in enumerate(counts):
        table[s, : needed[s]] = order[begin : begin + needed[s]]
        begin += needed[s]
        positions = torch.arange(count)
        slots = table[s, positions // block_size] * block_size + positions % block_size
        rows = [t.transpose(0, 1).contiguous() for t in (k[s], v[s])]
        ops.write_kv(*rows, *caches, slots.to("quartz"))
    return caches, table, counts


def sequences(dtype, lengths, heads=4, kv_heads=2, size=32, value_size=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = [(heads, size), (kv_heads, size), (kv_heads, value_size or size)]
    return [[torch.randn(h, n, d, generator=generator).to("quartz", dtype) for n in lengths] for h, d in shape]


def ask(q, caches, table, counts, queries, index=torch.int64, **options):
    """Attend with the last `queries[s]` tokens of each sequence."""
    rows = torch.cat([x[:, x.shape[1] - n :].transpose(0, 1) for x, n in zip(q, queries, strict=True)])
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=index, device="quartz")
    counts = torch.tensor(counts, dtype=index, device="quartz")
    return ops.paged_attention(rows, *caches, table.to("quartz", index), starts, counts, **options)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bits_of_the_dense_operator(data):
    dtype = data.draw(st.sampled_from(FLOATS))
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    queries = [data.draw(st.sampled_from(sorted({1, min(4, n), n}))) for n in lengths]
    group = data.draw(st.sampled_from([1, 3, 8]))
    block_size = data.draw(st.sampled_from([1, 2, 5, 12, 16, 24, 48, 64, 80, 256]))
    options = {
        "window": data.draw(st.sampled_from([None, 1, 20])),
        "soft_cap": data.draw(st.sampled_from([None, 8.0])),
        "sinks": data.draw(st.sampled_from([None, torch.linspace(-1, 1, 2 * group)])),
        "causal": data.draw(st.booleans()),
    }
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"].to("quartz")
    value_size = data.draw(st.sampled_from([32, 48]))
    q, k, v = sequences(dtype, lengths, 2 * group, 2, 32, value_size, data.draw(st.integers(0, 99)))
    fill = data.draw(st.sampled_from([float("nan"), float("inf"), 6e4, 0.0]))
    cache = paged(k, v, block_size, fill, seed=data.draw(st.integers(0, 99)))
    got = ask(q, *cache, queries, data.draw(st.sampled_from([torch.int32, torch.int64])), **options)
    begin = 0
    for s, n in enumerate(queries):
        want = ops.attention(q[s][None, :, lengths[s] - n :], k[s][None], v[s][None], **options)
        assert same_bits(got[begin : begin + n], want[0].transpose(0, 1))
        begin += n


@pytest.mark.parametrize("dtype", FLOATS)
def test_stale_slots_and_reused_blocks(dtype):
    """Lengths around a block, and every fill of what is unused: the same bits."""
    lengths = [1, 15, 16, 17]
    q, k, v = sequences(dtype, lengths)
    results = []
    for fill in (float("nan"), 6e4 if dtype == torch.float16 else 1e30, 0.0):
        cache = paged(k, v, 16, fill)
        results.append(ask(q, *cache, [1, 1, 1, 1]))
    assert all(same_bits(result, results[0]) for result in results)
    assert not results[0].isnan().any()
    # A sequence whose own values are NaN spoils no other, and its block may be used again.
    broken = [x.clone() for x in v]
    broken[2][:] = float("nan")
    caches, table, counts = paged(k, broken, 16)
    got = ask(q, caches, table, counts, [1, 1, 1, 1])
    assert got[2].isnan().all() and same_bits(got[[0, 1, 3]], results[0][[0, 1, 3]])
    slots = table[2, 0] * 16 + torch.arange(16)
    ops.write_kv(k[2].transpose(0, 1), v[2].transpose(0, 1), *caches, slots.to("quartz"))
    assert same_bits(ask(q, caches, table, counts, [1, 1, 1, 1]), results[0])


@pytest.mark.parametrize("dtype", FLOATS)
def test_window_across_chunks(dtype):
    """Window 4 over 16 tokens: query i sees i - 3 to i, in one piece and in chunks; freed blocks are not looked at."""
    q, k, v = sequences(dtype, [16])
    (caches, table, _) = paged(k, v, 2)
    position = torch.arange(16, device="quartz")
    seen = (position <= position[:, None]) & (position > position[:, None] - 4)
    want = ops.attention(q[0][None], k[0][None], v[0][None], seen)[0].transpose(0, 1)
    for chunk in (1, 3, 4, 5, 8, 16):
        for begin in range(0, 16, chunk):
            end = min(16, begin + chunk)
            freed = table.clone()
            freed[0, : max(0, begin - 3) // 2] = -1
            got = ask([q[0][:, :end]], caches, freed, [end], [end - begin], window=4)
            assert same_bits(got, want[begin:end])


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7, 8, 12, 24, 48, 80, 96, 128, 192, 784])
def test_every_block_size(block_size):
    """Over several tiles of keys, in prefill and in decoding: the bits that blocks of 64 give."""
    q, k, v = sequences(torch.bfloat16, [300, 129, 7], heads=8, kv_heads=2, size=64)
    for queries, options in (([300, 129, 7], {}), ([1, 5, 1], {}), ([40, 1, 7], {"window": 90})):
        want = ask(q, *paged(k, v, 64), queries, **options)
        assert same_bits(ask(q, *paged(k, v, block_size), queries, **options), want)


@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (24, 40), (64, 128), (80, 80), (192, 128), (256, 64)])
def test_head_sizes_and_block_sizes(size, value_size):
    q, k, v = sequences(torch.float16, [150, 20], heads=4, kv_heads=1, size=size, value_size=value_size)
    want = [ops.attention(q[s][None], k[s][None], v[s][None], causal=True)[0].transpose(0, 1) for s in range(2)]
    for block_size in (3, 16, 48):
        got = ask(q, *paged(k, v, block_size), [150, 20])
        assert same_bits(got[:150], want[0]) and same_bits(got[150:], want[1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_latent_cache(dtype):
    """MLA: one key head, whose first elements are the value."""
    q, k, _ = sequences(dtype, [40, 7], heads=16, kv_heads=1, size=72)
    v = [x[:, :, :64] for x in k]
    (cache, _), table, counts = paged(k, k, 16)
    want = ask(q, (cache, cache[..., :64]), table, counts, [3, 7])
    got = ask(q, (cache, None), table, counts, [3, 7], value_size=64)
    assert got.shape == (10, 16, 64) and same_bits(got, want)
    dense = ops.attention(q[0][None, :, 37:], k[0][None], v[0][None], causal=True)
    assert same_bits(got[:3], dense[0].transpose(0, 1))
    assert ask(q, (cache, None), table, counts, [1, 1]).shape == (2, 16, 72)


@pytest.mark.parametrize("dtype", FLOATS)
def test_cache_layouts(dtype):
    q, k, v = sequences(dtype, [33, 5])
    caches, table, counts = paged(k, v, 16)
    want = ask(q, caches, table, counts, [33, 1])
    heads_first = [c.transpose(1, 2).contiguous().transpose(1, 2) for c in caches]
    together = torch.stack(caches, 1)  # (blocks, 2, block size, heads, size)
    for layout in (heads_first, together.unbind(1)):
        assert same_bits(ask(q, layout, table, counts, [33, 1]), want)
    on_cpu = ops.paged_attention(
        torch.cat([q[0].transpose(0, 1), q[1][:, 4:].transpose(0, 1)]).cpu(),
        *[c.cpu() for c in caches],
        table,
        torch.tensor([0, 33, 34]),
        torch.tensor(counts),
    )
    if torch.quartz.substrate() == "host":
        assert same_bits(on_cpu, want)
    else:  # a GPU has an order of its own
        torch.testing.assert_close(on_cpu, want.cpu(), atol=2e-2, rtol=0)


def test_write_kv():
    key, value = torch.randn(4, 2, 8, device="quartz"), torch.randn(4, 2, 6, device="quartz")
    key_cache, value_cache = torch.zeros(3, 5, 2, 8, device="quartz"), torch.zeros(3, 5, 2, 6, device="quartz")
    version = key_cache._version
    first = 14 if torch.quartz.substrate() == "host" else -1  # of equal slots a GPU keeps any
    slots = torch.tensor([first, -1, 0, 14], device="quartz", dtype=torch.int32)
    ops.write_kv(key, value, key_cache, value_cache, slots)
    assert key_cache._version > version
    for cache, rows in ((key_cache, key), (value_cache, value)):
        assert same_bits(cache[2, 4], rows[3]) and same_bits(cache[0, 0], rows[2])  # of equal slots the last stays
        assert cache.count_nonzero() == 2 * rows[0].numel()
    strided = torch.randn(4, 2, 16, device="quartz")[:, :, ::2]
    ops.write_kv(strided, None, key_cache, None, torch.arange(4, device="quartz"))
    assert same_bits(key_cache.view(15, 2, 8)[:4], strided)
    ops.write_kv(key[:0], None, key_cache, None, torch.arange(0, device="quartz"))


def test_rows_of_no_sequence_are_zero():
    _q, k, v = sequences(torch.float32, [5, 3])
    caches, table, _counts = paged(k, v, 4)
    rows = torch.randn(6, 4, 32, device="quartz")
    starts, lengths = torch.tensor([0, 2, 2], device="quartz"), torch.tensor([5, 0], device="quartz")
    got = ops.paged_attention(rows, *caches, table.to("quartz"), starts, lengths)
    assert not got[2:].any() and got[:2].any()
    empty = ops.paged_attention(rows[:0], *caches, table[:0].to("quartz"), starts[:1], lengths[:0])
    assert empty.shape == (0, 4, 32)


def test_instruction_sets_and_threads(instruction_sets):
    q, k, v = sequences(torch.bfloat16, [300, 20, 1], heads=9, kv_heads=3, size=80)
    cache = paged(k, v, 16)
    results = [ask(q, *cache, [2, 20, 1]) for _ in instruction_sets()]
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, 16):
            torch.set_num_threads(count)
            results.append(ask(q, *cache, [2, 20, 1]))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(result, results[0]) for result in results)


def test_registrations():
    _q, k, v = sequences(torch.float32, [5, 3])
    caches, table, counts = paged(k, v, 4, fill=0.0)
    rows = torch.randn(3, 4, 32, device="quartz")
    starts, lengths = torch.tensor([0, 2, 3], device="quartz"), torch.tensor(counts, device="quartz")
    checks = ("test_schema", "test_faketensor")
    arguments = (rows, *caches, table.to("quartz"), starts, lengths)
    torch.library.opcheck(torch.ops.quartz.paged_attention.default, arguments, test_utils=checks)
    write = (rows[:, :2].contiguous(), None, caches[0], None, torch.arange(3, device="quartz"))
    torch.library.opcheck(torch.ops.quartz.write_kv.default, write, test_utils=checks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.ones(4, 32)}, r"query must have the shape \(tokens, heads, size\)"),
        ({"query": torch.ones(3, 3, 32)}, "query must have a multiple of the heads of key_cache, got 3 and 2"),
        ({"key_cache": torch.ones(4, 4, 2, 16)}, "key_cache must have the head size of query, got 16 and 32"),
        ({"key_cache": torch.ones(4, 4, 2, 32).half()}, "key_cache must have the dtype of query, got Half"),
        (
            {"value_cache": torch.ones(3, 4, 2, 32)},
            "value_cache must have the blocks, block size and heads of key_cache",
        ),
        ({"block_tables": torch.zeros(2, 2)}, "block_tables must be int32 or int64, got Float"),
        (
            {"block_tables": torch.tensor([[0, 4], [1, 2]])},
            "block_tables must name blocks below 4, got 4 for sequence 0",
        ),
        (
            {"block_tables": torch.tensor([[0, 1], [-1, 2]])},
            "block_tables must name blocks below 4, got -1 for sequence 1",
        ),
        ({"query_starts": torch.tensor([0, 2])}, "query_starts must have one element more than there are sequences"),
        ({"query_starts": torch.tensor([1, 2, 3])}, "query_starts must begin with 0, got 1"),
        (
            {"query_starts": torch.tensor([0, 2, 9])},
            "query_starts must ascend from 0 to at most the rows of query, 3, got 9",
        ),
        ({"query_starts": torch.tensor([0, 2, 1])}, "query_starts must ascend"),
        (
            {"key_counts": torch.tensor([9, 1])},
            "key_counts must fit into the block table, 8 keys, got 9 for sequence 0",
        ),
        ({"key_counts": torch.tensor([-1, 1])}, "key_counts must fit into the block table"),
        ({"value_size": 8}, "value_size must be None where value_cache is given, got 8"),
        ({"value_cache": None, "value_size": 33}, "value_size must be between 1 and the head size 32, got 33"),
        ({"window": 0}, "window must be at least 1, got 0"),
    ],
)
def test_errors(change, message):
    arguments = {
        "query": torch.ones(3, 4, 32),
        "key_cache": torch.ones(4, 4, 2, 32),
        "value_cache": torch.ones(4, 4, 2, 32),
        "block_tables": torch.tensor([[0, 1], [3, 2]]),
        "query_starts": torch.tensor([0, 2, 3]),
        "key_counts": torch.tensor([6, 1]),
        **change,
    }
    arguments = {n: a.to("quartz") if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    contents = re.search("name blocks|begin with 0|ascend|fit into", message)
    if contents and torch.quartz.substrate() == "cuda":  # not read by the host: brought within the cache
        assert ops.paged_attention(**arguments).shape == (3, 4, 32)
        torch.quartz.synchronize()
        return
    with pytest.raises(RuntimeError, match="quartz::paged_attention: " + message):
        ops.paged_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_mapping": torch.tensor([0, 8])}, "slot_mapping must be below 8, got 8 for token 1"),
        ({"slot_mapping": torch.tensor([0])}, "slot_mapping must have one element for each token, got 1 for 2 tokens"),
        ({"value": None}, "value_cache must be given if and only if value is, got a tensor"),
        ({"key": torch.ones(2, 1, 3)}, "key_cache must have the heads and the size of key"),
        ({"key": torch.ones(2, 3)}, r"key must have the shape \(tokens, heads, size\)"),
        ({"key": torch.ones(2, 1, 4).half()}, "key_cache must have the dtype of key"),
    ],
)
def test_errors_of_write_kv(change, message):
    arguments = {
        "key": torch.ones(2, 1, 4),
        "value": torch.ones(2, 1, 4),
        "key_cache": torch.zeros(4, 2, 1, 4),
        "value_cache": torch.zeros(4, 2, 1, 4),
        "slot_mapping": torch.tensor([0, 7]),
        **change,
    }
    arguments = {n: a.to("quartz") if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    if message.startswith("slot_mapping must be below") and torch.quartz.substrate() == "cuda":
        ops.write_kv(**arguments)  # no look at device memory: a slot out of range is skipped
        assert arguments["key_cache"].sum().item() == 4
        return
    with pytest.raises(RuntimeError, match="quartz::write_kv: " + message):
        ops.write_kv(**arguments)
