"""The memory of running sequences: groups of layers, their pools of blocks, copies, and swapping to host memory.

Layers with the same reach (all keys, a window, a recurrent state) share a block table and form a group. A block of a
group holds the keys and values of all its layers, so that copying or swapping one is a copy of one row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_quartz.engine.model_layout import StateLayer
from torch_quartz.engine.paged_context import PagedLayer

_HOST_DEFAULT_BYTES = 4 * 2**30  # a machine without a GPU has other uses for its memory
_ALIGNMENT = 256  # bytes: of a layer's part in a block


@dataclass(eq=False)
class Group:
    """Layers that share a block table.

    Attributes
    ----------
    kind : str
        "full", "sliding" or "state".
    window : int
        Of "sliding", in tokens.
    block_bytes : int
        Of one block with all layers.
    num_blocks, host_blocks : int
    pools, host_pools : list of Tensor
        ``(blocks, elements)``, one a dtype.
    """

    kind: str
    window: int = 0
    layers: list[PagedLayer] = field(default_factory=list)
    states: list[StateLayer] = field(default_factory=list)
    num_blocks: int = 0
    host_blocks: int = 0
    pools: list[Tensor] = field(default_factory=list)
    host_pools: list[Tensor] = field(default_factory=list)
    state_views: list[list[Tensor]] = field(default_factory=list)  # of each state layer: (blocks, *shape) each


def make_groups(layers: list[PagedLayer], states: list[StateLayer]) -> list[Group]:
    """Return the groups of a model's layers, and set `PagedLayer.group`."""
    groups: dict[tuple[str, int], Group] = {}
    for layer in layers:
        key = ("full", 0) if layer.window is None else ("sliding", layer.window)
        groups.setdefault(key, Group(*key)).layers.append(layer)
    if states:
        groups["state", 0] = Group("state", states=states)
    ordered = sorted(groups.values(), key=lambda group: ("full", "sliding", "state").index(group.kind))
    for number, group in enumerate(ordered):
        for layer in group.layers:
            layer.group = number
    return ordered


_Part = tuple[Any, str, tuple[int, ...], int]  # owner, attribute, shape, offset in elements


def _parts(group: Group, block_size: int) -> dict[tuple[torch.dtype, bool], list[_Part]]:
    """Return what a block consists of: a pool for each dtype, and others for a drafter's layers."""
    parts: dict[tuple[torch.dtype, bool], list[_Part]] = {}
    ends: dict[tuple[torch.dtype, bool], int] = {}

    def add(owner: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        step = max(1, _ALIGNMENT // dtype.itemsize)
        pool = dtype, getattr(owner, "draft", False)
        begin = ends.get(pool, 0)
        parts.setdefault(pool, []).append((owner, name, shape, begin))
        ends[pool] = begin + -(-int(np.prod(shape)) // step) * step

    for layer in group.layers:
        add(layer, "key_pages", (block_size, layer.kv_heads, layer.key_size), layer.dtype)
        add(layer, "value_pages", (block_size, layer.kv_heads, layer.value_size), layer.dtype)
    for state in group.states:
        for kind, number, shape, dtype in state.shapes:
            add(state, f"{kind}{number}", shape, dtype)
    return parts


def _row_elements(parts: list[_Part], dtype: torch.dtype) -> int:
    step = max(1, _ALIGNMENT // dtype.itemsize)
    _, _, shape, begin = parts[-1]
    return begin + -(-int(np.prod(shape)) // step) * step


class KVCache:
    """The pools of a model's groups.

    Parameters
    ----------
    groups : list of Group
        Of `make_groups`.
    block_size : int
        Tokens of a block.
    device : device
    """

    def __init__(self, groups: list[Group], block_size: int, device: Any):
        self.groups = groups
        self.block_size = block_size
        self.device = device
        self._parts = [_parts(group, block_size) for group in groups]
        self.block_bytes = [
            sum(_row_elements(entries, dtype) * dtype.itemsize for (dtype, _), entries in parts.items())
            for parts in self._parts
        ]

    def size(
        self,
        budget: int | None,
        *,
        num_blocks: int | None,
        max_num_seqs: int,
        max_model_len: int,
        max_rows: int,
        swap_bytes: int,
        caching: bool,
    ) -> None:
        """Decide the number of blocks of each group.

        Parameters
        ----------
        budget : int or None
            Bytes for all pools; needed unless `num_blocks` is given and no group keeps states.
        num_blocks : int or None
            Blocks of every group of attention layers, in place of the budget.
        max_num_seqs, max_model_len, max_rows : int
            What can run: more blocks than all of it needs are not made.
        swap_bytes : int
            Host memory for swapped blocks.
        caching : bool
            Whether states of finished sequences are kept, too.

        Raises
        ------
        ValueError
            Where the budget does not hold one sequence.
        """
        columns = -(-max_model_len // self.block_size)
        # A state a running sequence, and as many for the prefix cache and sequences that end while a step runs.
        states = 2 * max_num_seqs + 2 if caching else max_num_seqs + 2
        paged = [i for i, group in enumerate(self.groups) if group.kind != "state"]
        fixed = 0
        for i, group in enumerate(self.groups):
            if group.kind == "state":
                group.num_blocks = states
                if budget is not None and num_blocks is None:
                    share = budget if not paged else budget // 2
                    group.num_blocks = max(2, min(states, share // self.block_bytes[i]))
                fixed += group.num_blocks * self.block_bytes[i]
        limits = {}
        for i in paged:
            group = self.groups[i]
            reach = columns
            if group.kind == "sliding":
                reach = min(columns, -(-(group.window + max_rows) // self.block_size) + 2)
            # Twice what runs: the rest keeps prefixes.
            limits[i] = max_num_seqs * reach * (2 if caching and group.kind == "sliding" else 1)
        if num_blocks is not None:
            for i in paged:
                self.groups[i].num_blocks = num_blocks
        elif paged:
            assert budget is not None
            low, high = 0, max(limits.values())

            def total(blocks: int) -> int:
                return fixed + sum(min(blocks, limits[i]) * self.block_bytes[i] for i in paged)

            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if total(middle) <= budget else (low, middle - 1)
            if low < 1:
                raise ValueError(
                    f"EngineConfig.kv_cache_bytes must hold at least one block of {self.block_size} tokens in every "
                    f"group, {total(1)} bytes, got {budget}"
                )
            for i in paged:
                self.groups[i].num_blocks = min(low, limits[i])
        self._size_swap(swap_bytes)

    def _size_swap(self, swap_bytes: int) -> None:
        if not swap_bytes:
            return
        whole = sum(g.num_blocks * size for g, size in zip(self.groups, self.block_bytes, strict=True))
        share = min(1.0, swap_bytes / whole)
        for group in self.groups:
            group.host_blocks = int(group.num_blocks * share)

    def allocate(self, scratch_blocks: int = 0) -> None:
        """Make the pools, and give the layers their pages.

        Parameters
        ----------
        scratch_blocks : int
            Further blocks of a drafter's layers, behind those that the scheduler hands out.
        """
        for group, parts in zip(self.groups, self._parts, strict=True):
            group.pools, group.host_pools, group.state_views = [], [], [[] for _ in group.states]
            for (dtype, draft), entries in parts.items():
                elements = _row_elements(entries, dtype)
                rows = group.num_blocks + (scratch_blocks if draft else 0)
                pool = torch.empty(rows, elements, dtype=dtype, device=self.device)
                group.pools.append(pool)
                if group.host_blocks:
                    group.host_pools.append(_host_memory(group.host_blocks, elements, dtype))
                for owner, name, shape, begin in entries:
                    count = int(np.prod(shape))
                    view = pool[:, begin : begin + count].unflatten(1, shape)
                    if isinstance(owner, PagedLayer):
                        setattr(owner, name, view)
                    else:
                        group.state_views[group.states.index(owner)].append(view)

    @property
    def bytes(self) -> int:
        """Of all pools on the device."""
        return sum(pool.numel() * pool.element_size() for group in self.groups for pool in group.pools)

    @property
    def host_bytes(self) -> int:
        """Of all pools in host memory."""
        return sum(pool.numel() * pool.element_size() for group in self.groups for pool in group.host_pools)

    def fill(self, value: float) -> None:
        """Fill all pools with a number; no result may depend on what unused places hold."""
        for group in self.groups:
            for pool in group.pools:
                pool.fill_(value)

    # ---- what a plan asks for

    def swap_out(self, rows: np.ndarray) -> None:
        """Copy blocks to host memory: (group, block, host block) each. Later work on the device does not wait."""
        for number, group in enumerate(self.groups):
            for _, block, host_block in rows[rows[:, 0] == number].tolist():
                for pool, host in zip(group.pools, group.host_pools, strict=True):
                    host[host_block].copy_(pool[block], non_blocking=True)

    def swap_in(self, rows: np.ndarray) -> None:
        """Copy blocks back: (group, block, host block) each."""
        for number, group in enumerate(self.groups):
            for _, block, host_block in rows[rows[:, 0] == number].tolist():
                for pool, host in zip(group.pools, group.host_pools, strict=True):
                    pool[block].copy_(host[host_block], non_blocking=True)

    def copy(self, rows: np.ndarray) -> None:
        """Copy blocks within groups: (group, from, to) each."""
        for number, group in enumerate(self.groups):
            chosen = rows[rows[:, 0] == number]
            if len(chosen):
                source, target = (upload(np.ascontiguousarray(chosen[:, i], np.int64), self.device) for i in (1, 2))
                for pool in group.pools:
                    pool.index_copy_(0, target, pool.index_select(0, source))

    def state_ops(self, rows: np.ndarray, zero: int) -> None:
        """Zero or copy states: (op, group, from, to) each, in any order."""
        zeroed, copied = rows[rows[:, 0] == zero], rows[rows[:, 0] != zero]
        self.copy(copied[:, 1:])
        for number, group in enumerate(self.groups):
            chosen = zeroed[zeroed[:, 1] == number]
            if len(chosen):
                target = upload(np.ascontiguousarray(chosen[:, 3], np.int64), self.device)
                for pool in group.pools:
                    pool.index_fill_(0, target, 0)


def upload(array: np.ndarray, device: Any) -> Tensor:
    """Copy an array to the device; the host does not wait for it."""
    tensor = torch.from_numpy(array)
    if torch.quartz.substrate() == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _host_memory(rows: int, elements: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, elements, dtype=dtype, device="cpu", pin_memory=torch.quartz.substrate() == "cuda")


def free_bytes(device: Any, fraction: float, used_by_peak: int) -> int:
    """Return how many bytes the pools may take.

    Parameters
    ----------
    device : device
    fraction : float
        Of the whole memory that may be in use in the end.
    used_by_peak : int
        Bytes that a step takes beside what is allocated now.
    """
    free, total = torch.quartz.mem_get_info(device)
    if torch.quartz.substrate() == "host":
        return max(0, min(_HOST_DEFAULT_BYTES, int(free * fraction) // 4))
    return max(0, int(total * fraction) - (total - free) - used_by_peak)


def states_of(groups: list[Group]) -> dict[nn.Module, tuple[int, StateLayer, list[Tensor]]]:
    """Return each state module's group, description and views of its pool."""
    found = {}
    for number, group in enumerate(groups):
        for state, views in zip(group.states, group.state_views, strict=True):
            found[state.module] = (number, state, views)
    return found
