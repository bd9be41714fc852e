"""What a causal language model of Transformers consists of, found by running it once on a few tokens.

The attention layers are those that call the attention interface; layers with a recurrent state are the modules that
update the state of a cache. Names of families and classes play no part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_quartz.engine.paged_context import Overrides, PagedLayer

PROBE_TOKENS = 3


@dataclass(eq=False)
class StateLayer:
    """A module that carries a state from token to token.

    Attributes
    ----------
    module : Module
    index : int
        Its `layer_idx` in a cache of Transformers.
    cache_name : str
        The argument of its forward that takes the cache.
    shapes : list of tuple
        Of its states: ``(kind, number, shape, dtype)``, kind "conv" or "recurrent", shape without the batch.
    pristine, template : object
        A cache layer of Transformers before its first token, and behind some.
    """

    module: nn.Module
    index: int
    cache_name: str
    shapes: list[tuple[str, int, tuple[int, ...], torch.dtype]] = field(default_factory=list)
    pristine: Any = None
    template: Any = None


@dataclass(eq=False)
class ModelLayout:
    """The parts of a model that the engine deals with.

    Attributes
    ----------
    base : Module
        Computes hidden states.
    layers : list of Module
        Decoder layers, in order.
    attention : dict of Module to PagedLayer
        `PagedLayer.group` is not set yet (-1).
    states : list of StateLayer
    vocab_size : int
        Columns of the logits.
    hidden_size : int
    """

    base: nn.Module
    layers: list[nn.Module]
    attention: dict[nn.Module, PagedLayer]
    states: list[StateLayer]
    vocab_size: int
    hidden_size: int


class _Recorder:
    """Stands in for a step: notes which modules attend, and attends without a cache."""

    def __init__(self) -> None:
        self.calls: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.order: list[nn.Module] = []

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
        from torch_quartz.ops import attention

        if module in self.calls:
            raise NotImplementedError(f"{type(module).__name__} attends twice in a forward pass")
        self.calls[module] = (key, value)
        options: dict[str, Any] = {"scale": scaling, "soft_cap": soft_cap, "sinks": sinks}
        return attention(query, key, value, causal=True, **options).transpose(1, 2)


def refused(model: nn.Module, reason: str) -> NotImplementedError:
    """Return the error for a model that the engine cannot serve."""
    return NotImplementedError(f"torch_quartz engine: {type(model).__name__} cannot be served: {reason}")


def base_of(model: nn.Module) -> nn.Module:
    """Return the part of a causal language model that computes hidden states."""
    base = getattr(model, "base_model", None)
    if base is None or base is model or not callable(getattr(model, "get_output_embeddings", None)):
        raise refused(model, "it is no causal language model of Transformers (a base model and a head)")
    inner = getattr(base, "language_model", None)
    if isinstance(inner, nn.Module):
        raise refused(model, "it has parts for images or sound; only text models are served")
    return base


def text_config(model: Any) -> Any:
    """Return the configuration of the decoder."""
    return model.config.get_text_config(decoder=True)


@torch.no_grad()
def find_layout(model: Any) -> ModelLayout:
    """Look through a model.

    Parameters
    ----------
    model : PreTrainedModel
        On the device.

    Returns
    -------
    ModelLayout

    Raises
    ------
    NotImplementedError
        What makes the model one that the engine does not serve.
    """
    base = base_of(model)
    config = text_config(model)
    count = config.num_hidden_layers
    lists = [child for child in base.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    layers = list(lists[0]) if len(lists) == 1 else []
    device = next(model.parameters()).device
    ids = torch.arange(1, PROBE_TOKENS + 1, device=device).unsqueeze(0) % config.vocab_size
    positions = torch.arange(PROBE_TOKENS, device=device).unsqueeze(0)
    overrides = Overrides(model)
    cache, states = _watched_cache(model, overrides)
    attention, output = watch_attention(model, config, overrides, lambda: call_base(base, ids, positions, cache))
    hidden = output.last_hidden_state
    for state in states:
        _note_shapes(model, cache, state)
    if not attention and not states:
        raise refused(model, "no layer calls Transformers' attention interface or keeps a recurrent state")
    logits = model.get_output_embeddings()(hidden[:, -1:].to(model.get_output_embeddings().weight.dtype))
    return ModelLayout(base, layers, attention, states, logits.shape[-1], hidden.shape[-1])


def watch_attention(
    model: nn.Module, config: Any, overrides: Overrides, run: Callable[[], Any]
) -> tuple[dict[nn.Module, PagedLayer], Any]:
    """Run something once; return the modules that attended in it, and its result.

    Parameters
    ----------
    model : Module
        For error messages.
    config : PreTrainedConfig
        Says what the layers are; a module's `layer_idx` counts among them.
    overrides : Overrides
        Of the modules that run.
    run : callable
    """
    recorder = _Recorder()
    try:
        with overrides.running(recorder):  # type: ignore[arg-type]
            output = run()
    except NotImplementedError as error:
        raise refused(model, str(error)) from error
    windows = _windows(model, config, list(recorder.calls))
    attention = {
        module: PagedLayer(-1, windows[module], key.shape[1], key.shape[3], value.shape[3], key.dtype)
        for module, (key, value) in recorder.calls.items()
    }
    return attention, output


def call_base(base: nn.Module, ids: Tensor, positions: Tensor, cache: Any = None, **extra: Any) -> Any:
    """Run the base model over flattened rows.

    Parameters
    ----------
    base : Module
    ids, positions : Tensor
        ``(1, rows)``.
    cache : object or None
        Of Transformers.
    """
    if cache is not None:
        extra[_cache_name(base)] = cache
    return base(input_ids=ids, position_ids=positions, use_cache=cache is not None, **extra)


def _cache_name(module: nn.Module) -> str:
    accepted = inspect.signature(type(module).forward).parameters  # the instance's may be a stand-in
    for name in ("cache", "past_key_values", "cache_params"):
        if name in accepted:
            return name
    raise NotImplementedError(f"{type(module).__name__}.forward takes no cache")


def _watched_cache(model: Any, overrides: Overrides) -> tuple[Any, list[StateLayer]]:
    """Return a cache in which states are kept, and the list of the modules that update them, filled while it runs."""
    from transformers import DynamicCache

    config = text_config(model)
    cache = DynamicCache(config=config)
    found: dict[int, StateLayer] = {}
    states: list[StateLayer] = []
    running: list[nn.Module] = []

    def watch(module: nn.Module) -> Any:
        original = module.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            running.append(module)
            try:
                return original(*arguments, **options)
            finally:
                running.pop()

        return forward

    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            overrides.forwards[module] = watch(module)

    def note(layer_idx: int) -> None:
        if layer_idx not in found:
            module = running[-1]
            found[layer_idx] = StateLayer(module, layer_idx, _cache_name(module))
            states.append(found[layer_idx])

    for name in ("update_conv_state", "update_recurrent_state"):
        original = getattr(cache, name, None)
        if original is None:
            continue

        def update(new: Tensor, layer_idx: int, *rest: Any, _original: Any = original, **options: Any) -> Tensor:
            note(layer_idx)
            return _original(new, layer_idx, *rest, **options)

        setattr(cache, name, update)
    return cache, states


def _note_shapes(model: Any, cache: Any, state: StateLayer) -> None:
    from transformers import DynamicCache

    layer = state.template = cache.layers[state.index]
    state.pristine = DynamicCache(config=text_config(model)).layers[state.index]
    for kind in ("conv", "recurrent"):
        tensors = getattr(layer, f"{kind}_states", None)
        if not isinstance(tensors, dict):
            raise refused(model, f"the cache of layer {state.index} has no {kind} states by number")
        for number, tensor in tensors.items():
            if tensor is not None:
                state.shapes.append((kind, number, tuple(tensor.shape[1:]), tensor.dtype))


def _windows(model: Any, config: Any, modules: list[nn.Module]) -> dict[nn.Module, int | None]:
    """Return each attention layer's window, as Transformers' masks and caches take it from the configuration."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    types, options = get_layer_types_and_kwargs(config)
    windows: dict[nn.Module, int | None] = {}
    for module in modules:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or not 0 <= index < len(types):
            raise refused(model, f"{type(module).__name__} has no layer_idx among its {len(types)} layers")
        kind = types[index]
        if kind in ("full_attention", "attention", "hybrid"):
            windows[module] = None
        elif kind in ("sliding_attention", "hybrid_sliding"):
            windows[module] = options[index]["sliding_window"]
        else:
            raise refused(model, f"layer {index} is of the type {kind!r}")
    return windows
