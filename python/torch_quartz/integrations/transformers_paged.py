"""Transformers' continuous batching on quartz: `write_kv` and `paged_attention` over its paged cache.

Transformers keeps the blocks of a request in lists of Python and gives the model their contents as indices: where each
token of each sequence is read, and where the new ones are written. For layers of full attention these indices are block
tables, one entry a page; keys and values are then read where they lie. A layer with a sliding window keeps a ring of
its last tokens, in another order than that of positions; its keys are gathered as Transformers does it and laid out in
pages again, at the positions that they have in the sequence, so that the bits are those of the layer without a cache.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torch_quartz.integrations.replacements import Replacements
from torch_quartz.integrations.transformers_attention import BY_DEFAULT

PATCHES = (
    {
        "name": "transformers.paged_attention",
        "target": "transformers.generation.continuous_batching.cache.PagedAttentionCache.update",
        "reason": "attention on quartz reads the blocks where they are, and needs no gathered copy of keys and values",
    },
    {
        "name": "transformers.continuous_batching_attention",
        "target": "transformers.generation.continuous_batching.continuous_api.ContinuousBatchingManager."
        "switch_to_cb_friendly_attn",
        "reason": "a closed list of attention implementations; models on quartz are switched to 'quartz'",
    },
)

_NAMES = ("quartz", "paged|quartz")
_PAGE = 16  # tokens of a page of gathered keys: what the kernels of a GPU copy fast
_changes = Replacements()


def install() -> None:
    """Install the changes when Transformers' continuous batching is imported."""
    _changes.when_imported("transformers.generation.continuous_batching.cache", _patch_cache)
    _changes.when_imported("transformers.generation.continuous_batching.continuous_api", _patch_manager)


def undo() -> None:
    """Put the originals back."""
    _changes.undo()


def _prefixed(cache: type) -> bool:
    """Whether this Transformers (before 5.22) has ``paged|`` implementations, which update the cache themselves."""
    return "kwargs" not in inspect.signature(cache.update).parameters


def _patch_manager(module: ModuleType) -> None:
    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def switch_to_cb_friendly_attn(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
            chosen = model.config._attn_implementation
            if model.device.type != "quartz" or not (chosen in (*_NAMES, "sdpa") or chosen is BY_DEFAULT):
                return original(self, model, *arguments, **options)
            # Where "sdpa" computes no soft cap (Transformers before 5.20), its paged form shall not either.
            capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
            if chosen == "sdpa" and capped:
                return original(self, model, *arguments, **options)
            target = "paged|quartz" if _prefixed(module.PagedAttentionCache) else "quartz"
            if chosen != target:
                model.set_attn_implementation(target)
                self._original_attn_impl = chosen  # `stop` sets it again
            return None

        return switch_to_cb_friendly_attn

    if hasattr(module.ContinuousBatchingManager, "switch_to_cb_friendly_attn"):
        _changes.attribute(module.ContinuousBatchingManager, "switch_to_cb_friendly_attn", make)


@dataclass(frozen=True)
class _Layer:
    """What one layer's attention needs of the paged cache.

    Attributes
    ----------
    key_pages, value_pages : Tensor or None
        ``(pages, page size, key heads, size)``; None if `keys` and `values` were gathered.
    keys, values : Tensor or None
        ``(keys, key heads, size)``, one sequence behind another.
    read, write : Tensor
        Rows of the pages: of all keys of the sequences (empty if all are new), and of the new tokens.
    key_starts : Tensor
        ``(sequences + 1,)``: where each sequence begins among the keys.
    most_keys : int
        Of one sequence in this layer.
    """

    key_pages: Tensor | None
    value_pages: Tensor | None
    keys: Tensor | None
    values: Tensor | None
    read: Tensor
    write: Tensor
    key_starts: Tensor
    most_keys: int


def _patch_cache(module: ModuleType) -> None:
    cache = module.PagedAttentionCache
    if _prefixed(cache):
        return

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def update(
            self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
        ) -> tuple[Tensor, Tensor]:
            config = self.config.get_text_config()
            if key_states.device.type != "quartz" or config._attn_implementation not in _NAMES:
                return original(self, key_states, value_states, layer_idx, kwargs)
            allocator = self.layer_to_allocator[layer_idx]
            sliding = allocator.layer_type == "sliding_attention"
            if not sliding and kwargs.get("block_table") is not None:
                raise ValueError(
                    "quartz attention: continuous batching uses no block tables of Transformers on quartz; leave "
                    "max_blocks_per_request at None"
                )
            if sliding:
                key_states, value_states = original(self, key_states, value_states, layer_idx, kwargs)
                pages, gathered = (None, None), (_rows(key_states), _rows(value_states))
            else:
                kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][allocator.layer_type].to(torch.int32)
                kwargs["max_length_k"] = kwargs["max_length_k"][allocator.layer_type]
                pages, gathered = allocator.get_cache_for_block_table(layer_idx), (None, None)
            kwargs["quartz_paged"] = _Layer(
                *pages,
                *gathered,
                kwargs["read_index"][allocator.index],
                kwargs["write_index"][allocator.index],
                kwargs["cu_seq_lens_k"],
                kwargs["max_length_k"],
            )
            return key_states, value_states

        return update

    _changes.attribute(cache, "update", make)


def _rows(states: Tensor) -> Tensor:
    """(1, heads, tokens, size) as (tokens, heads, size)."""
    return states[0].transpose(0, 1)


def _layer_of_prefixed(module: torch.nn.Module, key: Tensor, value: Tensor, options: dict[str, Any]) -> _Layer:
    cache, layer = options["cache"], module.layer_idx
    group, index = cache.layer_index_to_group_indices[layer]
    sliding = cache.sliding_windows[layer] != 1
    starts, most = options["cu_seq_lens_k"], options["max_seqlen_k"]
    if isinstance(starts, dict):
        name = "sliding_attention" if sliding else "full_attention"
        starts, most = starts[name], most[name]
    read, write = options["read_index"], options["write_index"]
    pages, gathered = (None, None), (None, None)
    if sliding:
        gathered = cache.update(key, value, layer, read, write)
    else:
        shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        pages = cache.key_cache[index].view(shape), cache.value_cache[index].view(shape)
    return _Layer(*pages, *gathered, read[group], write[group], starts, most)


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Write the new keys and values of a step of continuous batching into the cache and attend over it.

    Parameters
    ----------
    module : torch.nn.Module
        The attention module.
    query, key, value : Tensor
        ``(1, heads, tokens, size)``, the tokens of all sequences.
    scaling, soft_cap, sinks
        As for `torch_quartz.ops.paged_attention`.
    options : dict
        What Transformers' continuous batching gives the attention function beside them.

    Returns
    -------
    Tensor
        ``(1, tokens, heads, value size)``.
    """
    from torch_quartz.ops import paged_attention, write_kv

    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise NotImplementedError("quartz attention: a paged cache has no gradients; call the model within no_grad()")
    layer = options.get("quartz_paged") or _layer_of_prefixed(module, key, value, options)
    query_starts = options["cu_seq_lens_q"]
    lengths = layer.key_starts[1:] - layer.key_starts[:-1]
    window = getattr(module, "sliding_window", None) if layer.key_pages is None else None
    if layer.key_pages is not None and layer.value_pages is not None:
        write_kv(_rows(key), _rows(value), layer.key_pages, layer.value_pages, layer.write)
        # A prompt without a past reads what it has just written.
        read, starts = (layer.read, layer.key_starts) if layer.read.numel() else (layer.write, query_starts)
        table = _table(read, starts, layer.most_keys, layer.key_pages.shape[1])
        pages, counts = (layer.key_pages, layer.value_pages), lengths
    else:
        pages, table, counts = _laid_out(layer, lengths, query_starts, options)
    output = paged_attention(
        _rows(query),
        *pages,
        table,
        query_starts,
        counts,
        scale=scaling,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        most_queries=options.get("max_length_q") or options.get("max_seqlen_q"),
    )
    return output.unsqueeze(0)


def _table(read: Tensor, starts: Tensor, most_keys: int, page: int) -> Tensor:
    """Return the block table that the rows of all keys say."""
    first = torch.arange(0, most_keys, page, device=read.device)
    places = (starts[:-1].unsqueeze(1) + first).clamp(max=read.numel() - 1)
    return (read[places] // page).to(torch.int32)


def _laid_out(
    layer: _Layer, lengths: Tensor, query_starts: Tensor, options: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Return pages that hold the gathered keys at their positions, their table, and how many keys there have been."""
    from torch_quartz.ops import write_kv

    keys, values = layer.keys, layer.values
    assert keys is not None and values is not None
    device, sequences = keys.device, lengths.shape[0]
    positions = options.get("position_ids")
    if positions is None:
        counts, most = lengths, layer.most_keys
    else:
        last = (query_starts[1:] - 1).clamp(min=0)
        counts = torch.where(lengths > 0, positions.reshape(-1)[last] + 1, 0).to(lengths.dtype)
        most = int(positions.max()) + 1
    before = counts - lengths  # keys that the window has left behind
    owned = -(-layer.most_keys // _PAGE) + 1  # pages of one sequence
    first_page = before // _PAGE
    token = torch.arange(keys.shape[0], device=device)
    sequence = torch.searchsorted(layer.key_starts[1:].contiguous(), token, right=True).clamp(max=sequences - 1)
    place = token - layer.key_starts[sequence] + before[sequence]
    slots = (sequence * owned - first_page[sequence]) * _PAGE + place
    page = torch.arange(-(-most // _PAGE), device=device)
    offset = page - first_page.unsqueeze(1)
    table = torch.where(
        (offset >= 0) & (offset < owned), offset + torch.arange(sequences, device=device).unsqueeze(1) * owned, 0
    )
    key_pages, value_pages = (
        torch.empty(sequences * owned, _PAGE, rows.shape[1], rows.shape[2], dtype=rows.dtype, device=device)
        for rows in (keys, values)
    )
    write_kv(keys, values, key_pages, value_pages, slots)
    return (key_pages, value_pages), table.to(torch.int32), counts
