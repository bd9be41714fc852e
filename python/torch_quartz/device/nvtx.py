"""Named ranges: they appear in ``torch.profiler`` traces and, on cuda, as NVTX ranges in Nsight."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from torch_quartz import _C

__all__ = ["mark", "range", "range_end", "range_pop", "range_push", "range_start"]

_local = threading.local()


def range_push(msg: str) -> int:
    """Open a range in this thread, inside the last one that is open; return how many were open before.

    Parameters
    ----------
    msg : str
        Its name.

    Examples
    --------
    >>> torch.quartz.nvtx.range_push("step")
    0
    >>> torch.quartz.nvtx.range_pop()
    0
    """
    open_ranges = _open_ranges()
    open_ranges.append(_Range(msg))
    return len(open_ranges) - 1


def range_pop() -> int:
    """Close the last range opened in this thread; return how many are open now, -1 if none was open.

    Examples
    --------
    >>> torch.quartz.nvtx.range_pop()
    -1
    """
    open_ranges = _open_ranges()
    if not open_ranges:
        return -1
    open_ranges.pop().close()
    return len(open_ranges)


def range_start(msg: str) -> Any:
    """Open a range that need not be nested; hand what it returns to `range_end`.

    Parameters
    ----------
    msg : str
        Its name.

    Examples
    --------
    >>> handle = torch.quartz.nvtx.range_start("load")
    >>> torch.quartz.nvtx.range_end(handle)
    """
    return _Range(msg)


def range_end(range_id: Any) -> None:
    """Close a range opened by `range_start`.

    Parameters
    ----------
    range_id : object
        What `range_start` returned.

    Examples
    --------
    >>> torch.quartz.nvtx.range_end(torch.quartz.nvtx.range_start("save"))
    """
    range_id.close()


def mark(msg: str) -> None:
    """Leave a mark of no length.

    Parameters
    ----------
    msg : str
        Its name.

    Examples
    --------
    >>> torch.quartz.nvtx.mark("first token")
    """
    with torch.profiler.record_function(msg):
        if _C.substrate() == "cuda":
            torch.cuda.nvtx.mark(msg)


@contextlib.contextmanager
def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Context manager and decorator: a range around the code inside.

    Parameters
    ----------
    msg : str
        Its name, a format string if there are further arguments.
    *args, **kwargs
        What ``msg.format`` is given.

    Examples
    --------
    >>> with torch.quartz.nvtx.range("layer {}", 3):
    ...     y = torch.ones(2, device="quartz") + 1
    """
    opened = _Range(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        opened.close()


class _Range:
    def __init__(self, name: str):
        self._record = torch.profiler.record_function(name)
        self._record.__enter__()
        self._nvtx = torch.cuda.nvtx.range_start(name) if _C.substrate() == "cuda" else None

    def close(self) -> None:
        if self._nvtx is not None:
            torch.cuda.nvtx.range_end(self._nvtx)
        self._record.__exit__(None, None, None)


def _open_ranges() -> list[_Range]:
    if not hasattr(_local, "ranges"):
        _local.ranges = []
    return _local.ranges
