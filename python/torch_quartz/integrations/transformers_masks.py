"""Transformers' attention masks on quartz: what a mask says in lengths, kept beside it.

Models receive the mask that Transformers builds, a tensor of ``(batch, 1, queries, keys)``. Where its function is known
(causal, a window, or neither, with padding at the ends of a row), the tensor carries a `Visible`, from which the
attention operator needs no mask at all, and which tells it where a padded sequence begins. A mask of any other
function that has padding carries the beginnings only. A tensor that a model makes of the mask does not have the
attribute, and is a mask like any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visible:
    """What the queries of a mask may see.

    Attributes
    ----------
    key_begin, key_end : Tensor or None
        As `torch_quartz.ops.attention` takes them.
    exact : bool
        Whether these and what follows say all; else the mask is needed too, and what follows is not used.
    causal : bool
    window : int or None
    query_offset : int
        The stored key at which the first query stands.
    """

    key_begin: Tensor | None
    key_end: Tensor | None
    exact: bool
    causal: bool = False
    window: int | None = None
    query_offset: int = 0


def visible_of(mask: Tensor | None) -> Visible | None:
    """Return what a mask of `describing` carries, None if it carries nothing or was written to since."""
    visible, version = getattr(mask, "_quartz_visible", (None, None))
    return visible if visible is not None and mask is not None and version == mask._version else None


def describing(original: Callable[..., Tensor | None], masks: ModuleType) -> Callable[..., Tensor | None]:
    """Wrap a function of Transformers' mask interface: its masks on quartz carry a `Visible`.

    Parameters
    ----------
    original : callable
        ``sdpa_mask`` or ``eager_mask``.
    masks : module
        ``transformers.masking_utils``.
    """

    @functools.wraps(original)
    def mask_of(*arguments: Any, **options: Any) -> Tensor | None:
        mask = original(*arguments, **options)
        if mask is not None and mask.device.type == "quartz" and not arguments and not torch.compiler.is_compiling():
            visible = _visible(masks, **options)
            if visible is not None and not mask.is_inference():  # an inference tensor does not tell that it was written
                mask._quartz_visible = (visible, mask._version)
        return mask

    return mask_of


def _visible(
    masks: ModuleType,
    *,
    batch_size: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Visible | None:
    form = (True, None) if mask_function is None else _form(masks, mask_function)
    capturing = torch.quartz.is_current_stream_capturing()
    if isinstance(q_offset, Tensor):  # a static cache counts on the device: read only where that waits for nothing
        if capturing or torch.quartz.substrate() != "host":
            form = None
        elif form is not None:
            q_offset = int(q_offset)
    begin = end = None
    contiguous = True
    if attention_mask is not None:
        begin, end, contiguous = _bounds(attention_mask.to(device=device, dtype=torch.bool), capturing)
        begin, end = begin - kv_offset, (end - kv_offset).clamp(max=kv_length)
    elif kv_offset and not isinstance(kv_offset, Tensor):
        begin = torch.full((batch_size,), -kv_offset, device=device)
    if form is None or not contiguous:
        return None if begin is None else Visible(begin, end, exact=False)
    causal, window = form
    return Visible(begin, end, True, causal, window, q_offset - kv_offset)


def _bounds(padding: Tensor, capturing: bool) -> tuple[Tensor, Tensor, bool]:
    """Return where each row's tokens begin and end, and whether none between is hidden (if that is cheap to know)."""
    place = torch.arange(padding.shape[1], device=padding.device)
    begin = torch.where(padding, place, padding.shape[1]).amin(1)
    end = torch.where(padding, place + 1, 0).amax(1)
    if capturing:
        return begin, end, False
    inside = (place >= begin.unsqueeze(1)) & (place < end.unsqueeze(1))
    # One look at the device for each mask of a forward pass; Transformers itself has just looked for padding.
    return begin, end, bool((inside == padding).all())


def _form(masks: ModuleType, function: Callable) -> tuple[bool, int | None] | None:
    """Return (causal, window) of a mask function of Transformers, None if it is none of the known ones."""
    if function is masks.causal_mask_function:
        return True, None
    if function is masks.bidirectional_mask_function:
        return False, None
    name = getattr(function, "__qualname__", "")
    if getattr(function, "__module__", None) != masks.__name__ or function.__closure__ is None:
        return None
    free = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))
    if name == "sliding_window_overlay.<locals>.inner_mask" and type(free.get("sliding_window")) is int:
        return False, free["sliding_window"]
    if name == "and_masks.<locals>.and_mask" and isinstance(free.get("mask_functions"), tuple):
        parts = [_form(masks, part) for part in free["mask_functions"]]
        if None not in parts:
            windows = [window for _, window in parts if window is not None]
            return any(causal for causal, _ in parts), min(windows, default=None)
    return None
