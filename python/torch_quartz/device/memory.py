"""Device memory: how much is used, how much was, and giving it back.

The numbers come from the device's allocator through ``torch.accelerator``. On cuda that is PyTorch's CUDA caching
allocator; on host nothing is cached, so what is reserved is what is allocated.
"""

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from torch_quartz import _C
from torch_quartz.device._utils import DeviceLike, _checked_index, _require_cuda

OutOfMemoryError = torch.OutOfMemoryError


def memory_stats(device: DeviceLike = None) -> "OrderedDict[str, Any]":
    """Return the allocator's counters of a device, with the names of ``torch.cuda.memory_stats``.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Returns
    -------
    OrderedDict
        For example ``"allocated_bytes.all.peak"``; empty before the first use of a CUDA device.

    Examples
    --------
    >>> x = torch.ones(1000, device="quartz")
    >>> torch.quartz.memory_stats()["allocated_bytes.all.current"] >= 4000
    True
    """
    return torch.accelerator.memory_stats(_checked_index(device))


def memory_stats_as_nested_dict(device: DeviceLike = None) -> dict[str, Any]:
    """Return the counters of `memory_stats` as nested dictionaries.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> x = torch.ones(1000, device="quartz")
    >>> torch.quartz.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] >= 4000
    True
    """
    nested: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *path, last = name.split(".")
        level = nested
        for part in path:
            level = level.setdefault(part, {})
        level[last] = value
    return nested


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes that live tensors of a device occupy.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> before = torch.quartz.memory_allocated()
    >>> x = torch.ones(1000, device="quartz")
    >>> torch.quartz.memory_allocated() - before >= 4000
    True
    """
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the most bytes that live tensors of a device occupied since the start or `reset_peak_memory_stats`.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> torch.quartz.max_memory_allocated() >= torch.quartz.memory_allocated()
    True
    """
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device: DeviceLike = None) -> int:
    """Return the bytes that a device's allocator holds, for live tensors and in its cache.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> torch.quartz.memory_reserved() >= torch.quartz.memory_allocated()
    True
    """
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return the most bytes that a device's allocator held since the start or `reset_peak_memory_stats`.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> torch.quartz.max_memory_reserved() >= torch.quartz.memory_reserved()
    True
    """
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Start the peaks of `memory_stats` again from what is in use now.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> torch.quartz.reset_peak_memory_stats()
    >>> torch.quartz.max_memory_allocated() == torch.quartz.memory_allocated()
    True
    """
    torch.accelerator.reset_peak_memory_stats(_checked_index(device))


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Set the running totals of `memory_stats` (``allocated``, ``freed``, number of errors) to zero.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> torch.quartz.reset_accumulated_memory_stats()
    >>> torch.quartz.memory_stats().get("allocated_bytes.all.allocated", 0)
    0
    """
    torch.accelerator.reset_accumulated_memory_stats(_checked_index(device))


def empty_cache() -> None:
    """Give memory that the allocator holds but no tensor uses back to the system.

    Examples
    --------
    >>> torch.quartz.empty_cache()
    """
    torch.accelerator.empty_cache()


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return the free and the total bytes of a device; on host those of the machine.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> free, total = torch.quartz.mem_get_info()
    >>> 0 < free <= total
    True
    """
    free, total = torch.accelerator.get_memory_info(_checked_index(device))
    return free, total


def ipc_collect() -> None:
    """Free memory whose receivers in other processes are done with it; nothing is shared that way on host.

    Examples
    --------
    >>> torch.quartz.ipc_collect()
    """
    if _C.substrate() == "cuda":
        torch.cuda.ipc_collect()


def memory_snapshot() -> list[dict[str, Any]]:
    """Return the blocks of the CUDA caching allocator; only on cuda.

    Raises
    ------
    RuntimeError
        On host, whose allocator keeps no blocks.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     blocks = torch.quartz.memory_snapshot()
    """
    _require_cuda("memory_snapshot")
    return torch.cuda.memory_snapshot()


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Let this process allocate only a part of a GPU's memory; only on cuda.

    Parameters
    ----------
    fraction : float
        From 0 to 1.
    device : torch.device, str, int or None
        None is the current device.

    Raises
    ------
    RuntimeError
        On host, where the operating system limits memory.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     torch.quartz.set_per_process_memory_fraction(1.0)
    """
    index = _checked_index(device)
    _require_cuda("set_per_process_memory_fraction")
    torch.cuda.set_per_process_memory_fraction(fraction, index)


def get_per_process_memory_fraction(device: DeviceLike = None) -> float:
    """Return the part of a GPU's memory that this process may allocate; only on cuda.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Raises
    ------
    RuntimeError
        On host, where the operating system limits memory.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     fraction = torch.quartz.get_per_process_memory_fraction()
    """
    index = _checked_index(device)
    _require_cuda("get_per_process_memory_fraction")
    return torch.cuda.get_per_process_memory_fraction(index)


class MemPool:
    """A pool of the CUDA caching allocator that `use_mem_pool` allocates from; only on cuda.

    Parameters
    ----------
    allocator, **options
        As for ``torch.cuda.MemPool``.

    Raises
    ------
    RuntimeError
        On host, whose allocator keeps no pools.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     pool = torch.quartz.MemPool()
    ...     with torch.quartz.use_mem_pool(pool):
    ...         x = torch.ones(4, device="quartz")
    """

    def __init__(self, allocator: Any = None, **options: Any):
        _require_cuda("MemPool")
        self._native = torch.cuda.MemPool(allocator, **options)

    @property
    def id(self) -> tuple[int, int]:
        """The pool's name, for ``Graph.capture_begin`` and `graph`."""
        return self._native.id

    def use_count(self) -> int:
        """Return how many users hold the pool."""
        return self._native.use_count()

    def snapshot(self, **options: Any) -> list[dict[str, Any]]:
        """Return the blocks of the pool, as ``torch.cuda.MemPool.snapshot``."""
        return self._native.snapshot(**options)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: DeviceLike = None) -> Iterator[None]:
    """Take this thread's new memory from a pool; only on cuda, where alone there are pools.

    Parameters
    ----------
    pool : MemPool
        The pool.
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    See `MemPool`:

    >>> if torch.quartz.substrate() == "cuda":
    ...     with torch.quartz.use_mem_pool(torch.quartz.MemPool()):
    ...         pass
    """
    index = _checked_index(device)
    _require_cuda("use_mem_pool")
    with torch.cuda.use_mem_pool(pool._native, index):
        yield


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """Return a table of the allocator's counters for people to read.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.
    abbreviated : bool
        Leave out the rows that count blocks instead of bytes.

    Examples
    --------
    >>> print(torch.quartz.memory_summary().splitlines()[0])
    quartz:0 memory                     now         peak    allocated        freed
    """
    index = _checked_index(device)
    stats = memory_stats(index)
    rows = [
        f"{f'quartz:{index} memory':28}" + "".join(f"{head:>12} " for head in ("now", "peak", "allocated", "freed"))
    ]
    counters = [(f"{name}_bytes", f"{name} bytes", _bytes) for name in ("allocated", "active", "reserved")]
    if not abbreviated:
        names = (("allocation", "allocations"), ("segment", "segments"), ("inactive_split", "unreleasable blocks"))
        counters += [(key, text, str) for key, text in names]
    for key, text, write in counters:
        values = [stats.get(f"{key}.all.{kind}", 0) for kind in ("current", "peak", "allocated", "freed")]
        rows.append(f"{text:28}" + "".join(f"{write(value):>12} " for value in values))
    rows.append(f"{'out-of-memory errors':28}{stats.get('num_ooms', 0):>12} ")
    return "\n".join(row.rstrip() for row in rows)


def reset_max_memory_allocated(device: DeviceLike = None) -> None:
    """Do what `reset_peak_memory_stats` does: an old name, which warns as that of ``torch.cuda``.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     torch.quartz.reset_max_memory_allocated()
    """
    _warn_of_old_name("reset_max_memory_allocated", "reset_peak_memory_stats")
    reset_peak_memory_stats(device)


def reset_max_memory_cached(device: DeviceLike = None) -> None:
    """Do what `reset_peak_memory_stats` does: an old name, which warns as that of ``torch.cuda``.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     torch.quartz.reset_max_memory_cached()
    """
    _warn_of_old_name("reset_max_memory_cached", "reset_peak_memory_stats")
    reset_peak_memory_stats(device)


def memory_cached(device: DeviceLike = None) -> int:
    """Return `memory_reserved`: an old name, which warns as that of ``torch.cuda``.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     torch.quartz.memory_cached() == torch.quartz.memory_reserved()
    True
    """
    _warn_of_old_name("memory_cached", "memory_reserved")
    return memory_reserved(device)


def max_memory_cached(device: DeviceLike = None) -> int:
    """Return `max_memory_reserved`: an old name, which warns as that of ``torch.cuda``.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     torch.quartz.max_memory_cached() == torch.quartz.max_memory_reserved()
    True
    """
    _warn_of_old_name("max_memory_cached", "max_memory_reserved")
    return max_memory_reserved(device)


def _warn_of_old_name(old: str, new: str) -> None:
    warnings.warn(f"torch.quartz.{old} is an old name: use torch.quartz.{new}", FutureWarning, stacklevel=3)


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count = count / 1024
    return f"{count:.1f} GiB"
