"""The step that runs: where the attention layers of a model find the pages, tables and lengths of its rows.

While a step is active in a thread, Transformers' attention interface (integrations/transformers_attention.py) gives
every call to `PagedStep.attend`: new keys and values are written into the cache, and the rows attend over the blocks of
their sequences. The models' masks are not made: positions and lengths say everything.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_ATTENTION = "quartz_engine"  # no masks are made for a name that has none


class _Local(threading.local):
    step: PagedStep | None = None


_local = _Local()


def active() -> PagedStep | None:
    """Return the step that runs in this thread."""
    return _local.step


_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_making_a_lock = threading.Lock()


def lock_of(model: nn.Module) -> Any:
    """Return the lock of whoever changes a model for a time: engines in several threads may serve one model.

    Parameters
    ----------
    model : Module
    """
    with _making_a_lock:
        return _locks.setdefault(model, threading.RLock())


class StopLayer(BaseException):
    """Ends a layer behind the write of its keys and values (last_layer.py); no error, so no handler may take it."""


@dataclass(eq=False)
class PagedLayer:
    """An attention layer's pages.

    Attributes
    ----------
    group : int
        Of layers that share a block table.
    window : int or None
        A query sees keys ``p - window + 1`` to ``p``.
    kv_heads, key_size, value_size : int
    dtype : torch.dtype
    draft : bool
        Of a drafter: its pages have some blocks more, for tokens that are not committed.
    key_pages, value_pages : Tensor
        ``(blocks, block size, heads, size)``; set when the pools are allocated.
    """

    group: int
    window: int | None
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    draft: bool = False
    key_pages: Tensor = field(init=False)
    value_pages: Tensor = field(init=False)


class PagedStep:
    """What the attention layers of one forward pass need to know of its rows.

    Parameters
    ----------
    layers : dict of Module to PagedLayer
        By the attention module that calls.
    tables : list of Tensor
        A group: ``(num_seqs, columns)``, int32.
    slots : list of Tensor
        A group: ``(rows,)``, where a row's key is written, -1 nowhere.
    query_starts : Tensor
        ``(num_seqs + 1,)``.
    key_counts : Tensor
        ``(num_seqs,)``: keys of each sequence, those of its rows included.
    most_queries : int
        Rows of the longest sequence.
    """

    def __init__(
        self,
        layers: dict[nn.Module, PagedLayer],
        tables: list[Tensor],
        slots: list[Tensor],
        query_starts: Tensor,
        key_counts: Tensor,
        most_queries: int,
    ):
        from torch_quartz import ops  # with the first step, not with the package

        self._ops = ops
        self.layers = layers
        self.tables = tables
        self.slots = slots
        self.query_starts = query_starts
        self.key_counts = key_counts
        self.most_queries = most_queries
        self.causal = True  # False: rows of a sequence see all its keys (a block drafter)
        self.phase = "both"  # "write": stop behind the write; "read": the rows in `tail_starts` of what is written
        self.needed: Tensor | None = None  # rows whose results are used (last_layer.py); None: all
        self.tail_starts: Tensor | None = None
        self.tail_most = 0
        self.states: Any = None  # StateStep of a model with recurrent layers
        self._plans: dict[tuple, Tensor | None] = {}
        self._planned = torch.quartz.substrate() == "cuda"

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Write keys and values and attend.

        Parameters
        ----------
        module : Module
            The attention module.
        query, key, value : Tensor
            ``(1, heads, rows, size)``.
        scaling, soft_cap, sinks
            As for `torch_quartz.ops.paged_attention`.

        Returns
        -------
        Tensor
            ``(1, rows, heads, value size)``.
        """
        layer = self.layers.get(module)
        if layer is None:
            raise NotImplementedError(
                f"torch_quartz engine: {type(module).__name__} called attention, which it did not when the model was "
                "looked through; the engine has no pages for it"
            )
        group = layer.group
        if self.phase != "read":
            self._ops.write_kv(
                key[0].transpose(0, 1),
                value[0].transpose(0, 1),
                layer.key_pages,
                layer.value_pages,
                self.slots[group],
            )
            if self.phase == "write":
                raise StopLayer
            starts, most = self.query_starts, self.most_queries
        else:
            starts, most = self.tail_starts, self.tail_most
        plan = self._plan(layer, query, starts, most) if self._planned else None
        output = self._ops.paged_attention(
            query[0].transpose(0, 1),
            layer.key_pages,
            layer.value_pages,
            self.tables[group],
            starts,
            self.key_counts,
            scale=scaling,
            causal=self.causal,
            window=layer.window,
            soft_cap=soft_cap,
            sinks=sinks,
            plan=plan,
            most_queries=most,
        )
        return output.unsqueeze(0)

    def _plan(self, layer: PagedLayer, query: Tensor, starts: Any, most: int) -> Tensor:
        """Return how a GPU divides this work: one plan for all layers of the same form."""
        block = layer.key_pages.shape[1]
        table = self.tables[layer.group]
        form = (layer.group, query.shape[1], layer.kv_heads, layer.window, self.phase)
        if form not in self._plans:
            self._plans[form] = self._ops.attention_plan(
                starts,
                self.key_counts,
                rows=query.shape[2],
                most_keys=table.shape[1] * block,
                heads=query.shape[1],
                kv_heads=layer.kv_heads,
                block_size=block,
                causal=self.causal,
                window=layer.window,
                most_queries=most,
            )
        return self._plans[form]


class Overrides:
    """Switches a model between its plain form and the engine's, for the time of a step.

    The configurations of its modules name the paged attention, and some modules have another ``forward``. Nothing of it
    stays: the same model may be called, copied and saved between steps. Steps of other engines on the model wait. A
    plain call of the model in another thread must wait too (docs/serving.md): it may find no masks.

    Parameters
    ----------
    model : Module
    """

    def __init__(self, model: nn.Module):
        self._lock = lock_of(model)
        configs = {}
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, "_attn_implementation"):
                configs[id(config)] = config
        self._configs = list(configs.values())
        self.forwards: dict[nn.Module, Any] = {}

    @contextlib.contextmanager
    def running(self, step: PagedStep) -> Iterator[None]:
        """Make a step the active one of this thread."""
        with self._lock:
            yield from self._switched(step)

    def _switched(self, step: PagedStep) -> Iterator[None]:
        before, implementations, forwards = _local.step, [], []
        try:
            for config in self._configs:
                attributes = config.__dict__
                implementations.append((attributes, attributes.get("_attn_implementation_internal")))
                attributes["_attn_implementation_internal"] = _ATTENTION
            for module, forward in self.forwards.items():
                forwards.append((module.__dict__, module.__dict__.get("forward")))
                module.__dict__["forward"] = _in_a_step(forward, module.forward)
            _local.step = step
            yield
        finally:
            _local.step = before
            for attributes, value in implementations:
                attributes["_attn_implementation_internal"] = value
            for attributes, value in forwards:
                if value is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = value


def _in_a_step(forward: Callable, plain: Callable) -> Callable:
    def chosen(*arguments: Any, **options: Any) -> Any:
        return (plain if _local.step is None else forward)(*arguments, **options)

    return chosen
