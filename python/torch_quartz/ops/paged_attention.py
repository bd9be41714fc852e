"""Attention over a cache of blocks, and writing into it. Page: docs/ops/paged_attention.md."""

import torch
from torch import Tensor


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    block_tables: Tensor,
    query_starts: Tensor,
    key_counts: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    value_size: int | None = None,
    plan: Tensor | None = None,
    most_queries: int | None = None,
) -> Tensor:
    """Attention of several sequences over their blocks of a cache, with any number of query tokens each.

    Sequence ``s`` has the rows ``query_starts[s]`` to ``query_starts[s + 1]`` of `query` and the first
    ``key_counts[s]`` keys of its blocks; its last query stands at its last key. Decoding (one token), verification (a
    few) and whole prompts or chunks may be mixed in one call, and have the bits of `attention` over the same keys.
    Nothing behind the counts is read.

    Parameters
    ----------
    query : Tensor
        Shape ``(tokens, heads, size)``; float32, float16 or bfloat16.
    key_cache : Tensor
        Shape ``(blocks, block size, key heads, size)``; any strides with a contiguous last dimension.
    value_cache : Tensor or None
        Shape ``(blocks, block size, key heads, value size)``. None: the first `value_size` elements of a key are its
        value, as in a latent cache (MLA).
    block_tables : Tensor
        Shape ``(sequences, blocks)``, int32 or int64: key ``j`` lies at ``j % block size`` of block ``j // block size``
        of the row. Entries that no query needs may be anything.
    query_starts : Tensor
        Shape ``(sequences + 1,)``, int32 or int64, ascending from 0. Rows behind the last are zero.
    key_counts : Tensor
        Shape ``(sequences,)``, int32 or int64: keys in the cache, those of the query tokens included.
    scale, causal, window, soft_cap, sinks
        As for `attention`.
    value_size : int or None
        Without `value_cache`: the elements of a key that are its value. None is all.
    plan : Tensor or None
        Of `attention_plan` for these lengths, shapes and options, which spares a small kernel in each call. It changes
        speed, never results. Only a GPU uses it.
    most_queries : int or None
        No sequence has more query tokens: for speed on a GPU only, and the same as in `attention_plan`.

    Returns
    -------
    Tensor
        Shape ``(tokens, heads, value size)``, contiguous.

    Raises
    ------
    RuntimeError
        Shapes, dtypes or devices that do not fit together; on the host, counts that the table does not hold and blocks
        that do not exist.

    Examples
    --------
    >>> cache = torch.zeros(4, 2, 1, 8, device="quartz")
    >>> rows = torch.arange(24.0, device="quartz").view(3, 1, 8)
    >>> torch_quartz.ops.write_kv(rows, rows, cache, cache, torch.tensor([6, 7, 2], device="quartz"))
    >>> table, starts, counts = (torch.tensor(x, device="quartz") for x in ([[3, 1]], [0, 1], [3]))
    >>> query = torch.zeros(1, 2, 8, device="quartz")
    >>> torch_quartz.ops.paged_attention(query, cache, cache, table, starts, counts)[0, :, 0].cpu()
    tensor([8., 8.])
    """
    return torch.ops.quartz.paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        key_counts,
        scale,
        causal,
        window,
        soft_cap,
        sinks,
        value_size,
        plan,
        most_queries or 0,
    )


def attention_plan(
    query_starts: Tensor,
    key_counts: Tensor,
    *,
    rows: int,
    most_keys: int,
    heads: int,
    kv_heads: int,
    block_size: int,
    causal: bool = True,
    window: int | None = None,
    most_queries: int | None = None,
) -> Tensor:
    """Plan how a GPU divides the work of `paged_attention`, once for all layers of a step.

    The plan is made on the GPU from the lengths there: nothing waits for the host, and a captured graph plans anew at
    each replay. One stream uses a plan at a time.

    Parameters
    ----------
    query_starts, key_counts : Tensor
        As for `paged_attention`.
    rows : int
        Rows of the query tensor.
    most_keys : int
        Columns of the block table times the block size.
    heads, kv_heads, block_size : int
        Of the query, and of the cache.
    causal, window, most_queries
        As for `paged_attention`.

    Returns
    -------
    Tensor
        For the `plan` of `paged_attention`; int32, without elements on the host.

    Examples
    --------
    >>> starts, counts = torch.tensor([0, 1], device="quartz"), torch.tensor([3], device="quartz")
    >>> plan = torch_quartz.ops.attention_plan(
    ...     starts, counts, rows=1, most_keys=64, heads=8, kv_heads=2, block_size=16, most_queries=1
    ... )
    >>> plan.dtype
    torch.int32
    """
    return torch.ops.quartz.attention_plan(
        query_starts,
        key_counts,
        rows,
        most_keys,
        heads,
        kv_heads,
        causal,
        window,
        block_size,
        most_queries or 0,
    )


def write_kv(
    key: Tensor, value: Tensor | None, key_cache: Tensor, value_cache: Tensor | None, slot_mapping: Tensor
) -> None:
    """Write the keys and values of new tokens into the slots of a cache.

    Parameters
    ----------
    key, value : Tensor
        Shape ``(tokens, heads, size)``; float32, float16 or bfloat16. `value` is None where a key holds its value.
    key_cache, value_cache : Tensor
        Shape ``(blocks, block size, heads, size)``; any strides with a contiguous last dimension. Changed in place.
    slot_mapping : Tensor
        Shape ``(tokens,)``, int32 or int64: token ``t`` goes to ``slot % block size`` of block ``slot // block size``.
        Negative slots are skipped; of equal slots the last token stays (on a GPU, one of them).

    Raises
    ------
    RuntimeError
        Shapes, dtypes or devices that do not fit together; on the host, slots behind the cache.

    Examples
    --------
    >>> cache = torch.zeros(2, 2, 1, 1, device="quartz")
    >>> slots = torch.tensor([-1, 3], device="quartz")
    >>> torch_quartz.ops.write_kv(torch.ones(2, 1, 1, device="quartz"), None, cache, None, slots)
    >>> cache.flatten().cpu()
    tensor([0., 0., 0., 1.])
    """
    torch.ops.quartz.write_kv(key, value, key_cache, value_cache, slot_mapping)


@torch.library.register_fake("quartz::paged_attention")
def _(
    query,
    key_cache,
    value_cache,
    block_tables,
    query_starts,
    key_counts,
    scale=None,
    causal=True,
    window=None,
    soft_cap=None,
    sinks=None,
    value_size=None,
    plan=None,
    most_queries=0,
):
    if value_cache is not None:
        value_size = value_cache.shape[3]
    elif value_size is None:
        value_size = key_cache.shape[3]
    return query.new_empty(query.shape[0], query.shape[1], value_size)


@torch.library.register_fake("quartz::attention_plan")
def _(
    query_starts,
    key_counts,
    rows,
    most_keys,
    heads,
    kv_heads,
    causal=True,
    window=None,
    block_size=16,
    most_queries=0,
):
    return query_starts.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int32)


@torch.library.register_fake("quartz::write_kv")
def _(key, value, key_cache, value_cache, slot_mapping):
    return None
