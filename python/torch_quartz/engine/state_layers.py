"""Layers with a recurrent state inside a flattened step: each sequence's rows run from its own state.

The modules are called as Transformers calls them, with a cache that holds nothing but the states of the sequences at
hand. A chunk that begins a sequence is one call. Rows that follow a state run token by token, all sequences with such a
row in one batch, unless the module gives the same bits for several tokens behind a state. Behind a verification the
state after each of its rows is kept, until it is known how many drafts were right.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_quartz.engine import paged_context
from torch_quartz.engine.kv_cache import upload
from torch_quartz.engine.model_layout import StateLayer, text_config


@dataclass(eq=False)
class StateStep:
    """What the state layers of a step need to know.

    Attributes
    ----------
    starts, lens : numpy array
        ``(num_seqs,)``: where each sequence's rows begin, and how many they are.
    fresh : numpy array of bool
        ``(num_seqs,)``: the sequence begins with its first row.
    verified : numpy array of bool
        ``(num_seqs,)``: not all rows may stay.
    blocks : Tensor
        ``(num_seqs,)``, int64: of each sequence's state.
    kept : dict
        By module: the states behind each number of rows of the verified sequences, ``(rows, sequences, *shape)``.
    """

    starts: np.ndarray
    lens: np.ndarray
    fresh: np.ndarray
    verified: np.ndarray
    blocks: Tensor
    kept: dict[nn.Module, list[Tensor]] = field(default_factory=dict)
    kept_order: np.ndarray | None = None  # the verified sequences, as they stand in `kept`


class StateRunner:
    """Runs one state layer over the rows of steps.

    Parameters
    ----------
    model : PreTrainedModel
    state : StateLayer
    views : list of Tensor
        ``(blocks, *shape)`` of each of its states.
    device : device
    """

    def __init__(self, model: Any, state: StateLayer, views: list[Tensor], device: Any):
        self._state = state
        self._views = views
        self._device = device
        self._original = state.module.forward
        self._config = text_config(model)
        self._template = state.template
        self.continues = self._has_one_order(model)

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        """Stand in for the module's own forward while a step is active."""
        step = paged_context.active()
        states = None if step is None else step.states
        if states is None:
            return self._original(hidden_states, *arguments, **options)
        if arguments:
            raise NotImplementedError(
                f"torch_quartz engine: {type(self._state.module).__name__} is called with positional arguments"
            )
        options.pop(self._state.cache_name, None)
        options.pop("attention_mask", None)
        options = {k: v for k, v in options.items() if not isinstance(v, Tensor)}
        output = torch.empty_like(hidden_states)
        followers = []
        for i, (begin, rows, fresh) in enumerate(
            zip(states.starts.tolist(), states.lens.tolist(), states.fresh.tolist(), strict=True)
        ):
            if fresh or (self.continues and rows > 1 and not states.verified[i]):
                block = states.blocks[i : i + 1]
                layer = self._fresh() if fresh else self._following(self._load(block))
                output[:, begin : begin + rows] = self._call(hidden_states[:, begin : begin + rows], layer, options)
                self._store(block, layer)
            else:
                followers.append(i)
        if followers:
            self._token_by_token(states, np.array(followers), hidden_states, output, options)
        return output

    def _token_by_token(
        self, states: StateStep, followers: np.ndarray, hidden: Tensor, output: Tensor, options: dict[str, Any]
    ) -> None:
        """Run rows behind states: the first of all sequences, then the second of those that have one, and so on."""
        order = followers[np.argsort(-states.lens[followers], kind="stable")]  # longest first: a prefix stays in play
        lens, begins = states.lens[order], states.starts[order]
        blocks = states.blocks.index_select(0, upload(order, self._device))
        layer = self._following(self._load(blocks))
        kept: list[list[Tensor]] = [[] for _ in self._views]
        verified = states.verified[order]
        for row in range(int(lens[0])):
            count = int((lens > row).sum())
            if row:
                # Sequences without this row are done: their states go back first.
                now = self._tensors(layer)
                done = int((lens > row - 1).sum())
                if count < done:
                    self._put(blocks[count:done], [t[count:done] for t in now])
                layer = self._following([t[:count].contiguous() for t in now])
            places = upload(begins[:count] + row, self._device)
            rows = hidden[0].index_select(0, places).unsqueeze(1)
            output[0].index_copy_(0, places, self._call(rows, layer, options)[:, 0])
            if verified.any():
                for held, tensor in zip(kept, self._tensors(layer), strict=True):
                    full = torch.zeros(len(order), *tensor.shape[1:], dtype=tensor.dtype, device=self._device)
                    full[:count].copy_(tensor)
                    held.append(full)
        last = int((lens > int(lens[0]) - 1).sum())
        self._put(blocks[:last], self._tensors(layer))
        if verified.any():
            chosen = upload(np.flatnonzero(verified), self._device)
            states.kept[self._state.module] = [torch.stack(held).index_select(1, chosen) for held in kept]
            states.kept_order = order[verified]

    def accept(self, states: StateStep, committed: Tensor) -> None:
        """Put the states behind the committed rows of verified sequences in place.

        Parameters
        ----------
        states : StateStep
        committed : Tensor
            ``(num_seqs,)``, int64: tokens that each sequence of the step got.
        """
        kept = states.kept.get(self._state.module)
        if kept is None:
            return
        order = upload(states.kept_order, self._device)
        row = (committed.index_select(0, order) - 1).clamp(min=0)
        number = torch.arange(len(states.kept_order), device=self._device)
        self._put(states.blocks.index_select(0, order), [tensor[row, number] for tensor in kept])

    # ---- states and caches

    def _call(self, hidden: Tensor, layer: Any, options: dict[str, Any]) -> Tensor:
        result = self._original(hidden, **{self._state.cache_name: self._cache(layer)}, **options)
        return result[0] if isinstance(result, tuple) else result

    def _cache(self, layer: Any) -> Any:
        from transformers.cache_utils import Cache

        cache = Cache.__new__(Cache)
        cache.layers = _OneLayer(self._state.index, layer)
        cache.layer_class_to_replicate = None
        cache.offloading = False
        return cache

    def _fresh(self) -> Any:
        return copy.deepcopy(self._state.pristine)

    def _following(self, tensors: list[Tensor]) -> Any:
        layer = copy.copy(self._template)
        for (kind, number, _, _), tensor in zip(self._state.shapes, tensors, strict=True):
            name = f"{kind}_states"
            if getattr(layer, name) is getattr(self._template, name):
                setattr(layer, name, dict(getattr(layer, name)))
            getattr(layer, name)[number] = tensor
        layer.has_previous_state = dict(self._template.has_previous_state)
        return layer

    def _tensors(self, layer: Any) -> list[Tensor]:
        return [getattr(layer, f"{kind}_states")[number] for kind, number, _, _ in self._state.shapes]

    def _load(self, blocks: Tensor) -> list[Tensor]:
        return [view.index_select(0, blocks) for view in self._views]

    def _store(self, blocks: Tensor, layer: Any) -> None:
        self._put(blocks, self._tensors(layer))

    def _put(self, blocks: Tensor, tensors: list[Tensor]) -> None:
        for view, tensor in zip(self._views, tensors, strict=True):
            view.index_copy_(0, blocks, tensor.to(view.dtype))

    def _has_one_order(self, model: Any) -> bool:
        """Whether several tokens behind a state have the bits of all tokens at once; found by trying."""
        module = self._state.module
        parameter = next(module.parameters())
        generator = torch.Generator().manual_seed(0)
        size = self._config.hidden_size
        hidden = torch.randn(1, 9, size, generator=generator).to(self._device, parameter.dtype)
        with torch.no_grad():
            whole = self._fresh()
            expected = self._call(hidden, whole, {})
            layer = self._fresh()
            first = self._call(hidden[:, :4], layer, {})
            second = self._call(hidden[:, 4:], layer, {})
        return torch.equal(torch.cat([first, second], 1), expected) and all(
            torch.equal(a, b) for a, b in zip(self._tensors(whole), self._tensors(layer), strict=True)
        )


class _OneLayer:
    """The layers of a cache of which only one is asked for."""

    def __init__(self, index: int, layer: Any):
        self._index, self._layer = index, layer

    def __getitem__(self, index: int) -> Any:
        if index != self._index:
            raise IndexError(index)
        return self._layer

    def __len__(self) -> int:
        return self._index + 1
