"""Which devices there are, which one is current, what they are like."""

import functools
import os
import platform
from typing import Any, NamedTuple

import torch

from torch_quartz import _C
from torch_quartz.device._utils import DeviceLike, _checked_index, _get_device_index


def is_available() -> bool:
    """Return whether there is a quartz device; true wherever the package could be imported.

    Examples
    --------
    >>> torch.quartz.is_available()
    True
    """
    return _C.device_count() > 0


def device_count() -> int:
    """Return the number of quartz devices: GPUs on cuda, ``TORCH_QUARTZ_HOST_DEVICES`` on host.

    Examples
    --------
    >>> torch.quartz.device_count() >= 1
    True
    """
    return _C.device_count()


def current_device() -> int:
    """Return the index of the device that is current in this thread.

    Examples
    --------
    >>> torch.quartz.current_device()
    0
    """
    return _C.current_device()


def set_device(device: DeviceLike) -> None:
    """Make a device current in this thread; prefer the context manager `device`.

    Parameters
    ----------
    device : torch.device, str or int
        A negative index changes nothing.

    Raises
    ------
    RuntimeError
        If there is no such device.

    Examples
    --------
    >>> torch.quartz.set_device("quartz:0")
    """
    index = _get_device_index(device, optional=True)
    if index >= 0:
        _C.set_device(index)


class device:
    """Context manager that makes a device current.

    Parameters
    ----------
    device : torch.device, str, int or None
        None or a negative index changes nothing.

    Examples
    --------
    >>> with torch.quartz.device(0):
    ...     torch.empty(2, device="quartz").device
    device(type='quartz', index=0)
    """

    def __init__(self, device: DeviceLike):
        self.idx = -1 if device is None else _get_device_index(device, optional=True)
        self.prev_idx = -1

    def __enter__(self) -> "device":
        self.prev_idx = _C.exchange_device(self.idx)
        return self

    def __exit__(self, *exception: Any) -> None:
        _C.exchange_device(self.prev_idx)


class device_of(device):
    """Context manager that makes the device of a tensor or storage current; nothing changes if it is not on quartz.

    Parameters
    ----------
    obj : torch.Tensor or torch.UntypedStorage
        The object whose device is wanted.

    Examples
    --------
    >>> with torch.quartz.device_of(torch.ones(2, device="quartz:0")):
    ...     torch.quartz.current_device()
    0
    """

    def __init__(self, obj: Any):
        super().__init__(obj.device.index if obj.device.type == "quartz" else None)


def _exchange_device(index: int) -> int:
    """Make `index` current unless it is negative; return the device that was current (Dynamo's device interface)."""
    return _C.exchange_device(index)


def _maybe_exchange_device(index: int) -> int:
    """Do as `_exchange_device`; CUDA's second form avoids creating contexts, which quartz never does here."""
    return _C.exchange_device(index)


def synchronize(device: DeviceLike = None) -> None:
    """Wait until all work queued on a device is done; nothing is ever queued on host.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> torch.quartz.synchronize()
    """
    _C.synchronize(_checked_index(device))


class DeviceProperties(NamedTuple):
    """Properties of a host device, with the names of CUDA's.

    Attributes
    ----------
    name : str
        ``"Quartz host"`` and the processor's name.
    total_memory : int
        Memory of the machine in bytes.
    multi_processor_count : int
        Number of processor cores this process may use.
    major, minor : int
        0: a processor has no CUDA compute capability.
    """

    name: str
    total_memory: int
    multi_processor_count: int
    major: int = 0
    minor: int = 0


def get_device_properties(device: DeviceLike = None) -> Any:
    """Return the properties of a device: CUDA's on cuda, a `DeviceProperties` on host.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> torch.quartz.get_device_properties(0).total_memory > 0
    True
    """
    index = _checked_index(device)
    if _C.substrate() == "cuda":
        return torch.cuda.get_device_properties(index)
    return DeviceProperties(f"Quartz host ({_processor()})", _C.host_memory()[1], len(os.sched_getaffinity(0)))


def get_device_name(device: DeviceLike = None) -> str:
    """Return the name of a device: the GPU's on cuda, ``"Quartz host (<processor>)"`` on host.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> len(torch.quartz.get_device_name()) > 0
    True
    """
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """Return the CUDA compute capability of a device, (0, 0) on host.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> major, minor = torch.quartz.get_device_capability()
    """
    properties = get_device_properties(device)
    return properties.major, properties.minor


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return whether the current device computes in bfloat16; true on host.

    Parameters
    ----------
    including_emulation : bool
        Whether slow emulation counts.

    Examples
    --------
    >>> torch.quartz.is_bf16_supported()
    True
    """
    if _C.substrate() == "cuda":
        with torch.cuda.device(_C.current_device()):
            return torch.cuda.is_bf16_supported(including_emulation)
    return True


def is_tf32_supported() -> bool:
    """Return whether the current device has TF32 matrix products; false on host.

    Examples
    --------
    >>> torch.quartz.is_tf32_supported() in (True, False)
    True
    """
    return _C.substrate() == "cuda" and torch.cuda.is_tf32_supported()


def get_arch_list() -> list[str]:
    """Return the CUDA architectures PyTorch's kernels were compiled for, empty on host.

    Examples
    --------
    >>> isinstance(torch.quartz.get_arch_list(), list)
    True
    """
    return torch.cuda.get_arch_list() if _C.substrate() == "cuda" else []


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Return whether one device reads another's memory directly; true between host devices.

    Parameters
    ----------
    device, peer_device : torch.device, str or int
        Two different devices.

    Examples
    --------
    >>> torch.quartz.can_device_access_peer(0, 0)
    False
    """
    first, second = _checked_index(device), _checked_index(peer_device)
    if first == second:
        return False
    return torch.cuda.can_device_access_peer(first, second) if _C.substrate() == "cuda" else True


@functools.cache
def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.machine()
