"""The last decoder layer for the rows that are needed only.

Of a prompt's rows the next token needs the last one. The rows before it must leave their keys and values in the last
layer's cache, but what the layer computes of them behind that is not read by anybody. The layer therefore runs twice:
over all rows up to the attention function, which writes keys and values and stops it, and over the needed rows, where
the attention function does not write. Every needed row goes through the same operations as in one pass, and no
operator's row depends on the others, so the bits are the same. Needed rows are the last ones of their sequences.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torch_quartz.engine import paged_context
from torch_quartz.engine.model_layout import ModelLayout
from torch_quartz.engine.paged_context import PagedStep, StopLayer


def can_save(layout: ModelLayout) -> bool:
    """Whether the last decoder layer attends once and keeps no recurrent state.

    Parameters
    ----------
    layout : ModelLayout
    """
    if not layout.layers:
        return False
    inside = set(layout.layers[-1].modules())
    attending = sum(module in inside for module in layout.attention)
    return attending == 1 and not any(state.module in inside for state in layout.states)


def make_forward(layer: nn.Module) -> Any:
    """Return a forward of the last layer that computes the needed rows of the active step.

    Parameters
    ----------
    layer : Module
        Whose own forward is called.
    """
    original = layer.forward

    def forward(hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        step = paged_context.active()
        needed = None if step is None else step.needed
        if step is None or needed is None:
            return original(hidden_states, *arguments, **options)
        rows = hidden_states.shape[1]
        step.phase = "write"
        try:
            original(hidden_states, *arguments, **options)
        except StopLayer:
            pass
        else:
            raise RuntimeError("the last layer did not attend")
        if needed.shape[0] == 0:
            raise StopLayer  # nobody needs anything: `run` ends the whole pass
        step.phase = "read"

        def tail(value: Any) -> Any:
            return _select(value, rows, needed)

        try:
            return original(tail(hidden_states), *map(tail, arguments), **{k: tail(v) for k, v in options.items()})
        finally:
            step.phase = "both"

    return forward


def _select(value: Any, rows: int, needed: Tensor) -> Any:
    """Return the needed rows of whatever has one entry a row in its second dimension."""
    if isinstance(value, Tensor):
        whole = value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == rows
        return value.index_select(1, needed) if whole else value
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_select(one, rows, needed) for one in value)
    if isinstance(value, dict):
        return {key: _select(one, rows, needed) for key, one in value.items()}
    return value


def set_needed(step: PagedStep, needed: Tensor | None, starts: Tensor | None, most: int) -> None:
    """Tell a step which rows are needed behind the last layer's keys and values.

    Parameters
    ----------
    step : PagedStep
    needed : Tensor or None
        Their numbers, the last rows of each sequence; None is all rows.
    starts : Tensor or None
        ``(num_seqs + 1,)``: where each sequence begins among them.
    most : int
        Of one sequence.
    """
    step.needed, step.tail_starts, step.tail_most = needed, starts, most
