"""What NVIDIA's management library and CUDA's debugging say about a GPU: ``torch.cuda``'s answers, on cuda only.

The measurements need the package ``nvidia-ml-py``, as those of ``torch.cuda`` do; PyTorch says so where it is missing.
"""

import torch

from torch_quartz import _C
from torch_quartz.device._utils import DeviceLike, _checked_index, _require_cuda


def utilization(device: DeviceLike = None) -> int:
    """Return the percentage of the last sample period in which a GPU ran a kernel; only on cuda.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Raises
    ------
    RuntimeError
        On host.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     value = torch.quartz.utilization()  # doctest: +SKIP
    """
    index = _checked_index(device)
    _require_cuda("utilization")
    return torch.cuda.utilization(index)


def memory_usage(device: DeviceLike = None) -> int:
    """Return the percentage of the last sample period in which GPU memory was read or written; only on cuda.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Raises
    ------
    RuntimeError
        On host.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     value = torch.quartz.memory_usage()  # doctest: +SKIP
    """
    index = _checked_index(device)
    _require_cuda("memory_usage")
    return torch.cuda.memory_usage(index)


def device_memory_used(device: DeviceLike = None) -> int:
    """Return the bytes of a GPU's memory that all processes use; only on cuda.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Raises
    ------
    RuntimeError
        On host.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     value = torch.quartz.device_memory_used()  # doctest: +SKIP
    """
    index = _checked_index(device)
    _require_cuda("device_memory_used")
    return torch.cuda.device_memory_used(index)


def temperature(device: DeviceLike = None) -> int:
    """Return a GPU's temperature in degrees Celsius; only on cuda.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Raises
    ------
    RuntimeError
        On host.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     value = torch.quartz.temperature()  # doctest: +SKIP
    """
    index = _checked_index(device)
    _require_cuda("temperature")
    return torch.cuda.temperature(index)


def power_draw(device: DeviceLike = None) -> int:
    """Return the power a GPU draws, in milliwatts; only on cuda.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Raises
    ------
    RuntimeError
        On host.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     value = torch.quartz.power_draw()  # doctest: +SKIP
    """
    index = _checked_index(device)
    _require_cuda("power_draw")
    return torch.cuda.power_draw(index)


def clock_rate(device: DeviceLike = None) -> int:
    """Return the clock rate of a GPU's multiprocessors in MHz; only on cuda.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Raises
    ------
    RuntimeError
        On host.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     value = torch.quartz.clock_rate()  # doctest: +SKIP
    """
    index = _checked_index(device)
    _require_cuda("clock_rate")
    return torch.cuda.clock_rate(index)


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Warn of or refuse calls that make the processor wait for the GPU; only on cuda.

    Parameters
    ----------
    debug_mode : int or str
        0 or ``"default"``: neither; 1 or ``"warn"``: warn; 2 or ``"error"``: raise. Plain CUDA tensors obey it too.

    Raises
    ------
    RuntimeError
        On host, where no call waits.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     torch.quartz.set_sync_debug_mode("default")
    """
    _require_cuda("set_sync_debug_mode")
    torch.cuda.set_sync_debug_mode(debug_mode)


def get_sync_debug_mode() -> int:
    """Return the number that `set_sync_debug_mode` was given; 0 on host.

    Examples
    --------
    >>> torch.quartz.get_sync_debug_mode()
    0
    """
    return torch.cuda.get_sync_debug_mode() if _C.substrate() == "cuda" else 0
