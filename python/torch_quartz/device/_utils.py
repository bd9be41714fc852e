"""Device arguments: what every function of ``torch.quartz`` accepts for ``device``."""

import torch

from torch_quartz import _C

DeviceLike = torch.device | str | int | None


def _get_device_index(device: DeviceLike, optional: bool = False, allow_cpu: bool = False) -> int:
    """Return the index that `device` stands for; ``torch.load`` and others call it by this name.

    Parameters
    ----------
    device : torch.device, str, int or None
        An index is returned as it is.
    optional : bool
        Whether None and a device without an index mean the current device.
    allow_cpu : bool
        Whether the CPU is allowed; it gives -1.

    Raises
    ------
    ValueError
        If the device is of another type, or has no index and `optional` is False.
    """
    if isinstance(device, int):
        if not -(2**63) <= device < 2**63:
            raise RuntimeError(f"quartz: invalid device ordinal {device}")  # no integer of C++ holds it
        return device
    given = device
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type == "cpu" and allow_cpu:
            return -1
        if device.type != "quartz":
            raise ValueError(f"Expected a quartz device, but got: {given}")
        if device.index is not None:
            return device.index
    elif device is not None:
        index = getattr(device, "idx", None)  # the context manager torch.quartz.device
        if isinstance(index, int):
            return index
        raise TypeError(f"Expected a device (torch.device, str, int or None), but got: {type(given).__name__}")
    if not optional:
        raise ValueError(f"Expected a quartz device with an index or an integer, but got: {given}")
    return _C.current_device()


def _checked_index(device: DeviceLike) -> int:
    """Return the index of `device`, which must exist; None means the current device."""
    index = _get_device_index(device, optional=True)
    if not 0 <= index < _C.device_count():
        _C.set_device(index)  # raises the sentence for it
    return index


def _require_cuda(name: str) -> None:
    """Raise RuntimeError on host, for the function of ``torch.quartz`` called `name`."""
    if _C.substrate() != "cuda":
        raise RuntimeError(f"torch.quartz.{name} needs the cuda substrate; this process runs on host")
