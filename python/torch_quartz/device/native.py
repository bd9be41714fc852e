"""The native device below quartz, and what crosses the border between both without a copy."""

from typing import Any

import torch

from torch_quartz import _C
from torch_quartz.device._utils import DeviceLike, _checked_index


def substrate() -> str:
    """Return what quartz runs on in this process: ``"cuda"`` or ``"host"``.

    Examples
    --------
    >>> torch.quartz.substrate() in ("cuda", "host")
    True
    """
    return _C.substrate()


def substrate_reason() -> str:
    """Return one sentence that says why the process runs on this substrate.

    Examples
    --------
    >>> len(torch.quartz.substrate_reason()) > 0
    True
    """
    return _C.substrate_reason()


def native_device(device: DeviceLike = None) -> torch.device:
    """Return the device whose memory a quartz device uses: ``cuda:i``, or ``cpu`` on host.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> torch.quartz.native_device(0).type in ("cuda", "cpu")
    True
    """
    index = _checked_index(device)
    return torch.device("cuda", index) if _C.substrate() == "cuda" else torch.device("cpu")


def native_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the native device over the same memory, with the same sizes and strides.

    Autograd does not see through it. Use it to hand quartz memory to code that knows only CUDA or CPU tensors. While it
    lives, neither its memory nor that of `tensor` can be resized (``resize_``, an ``out=`` of another size): that is
    PyTorch's ``RuntimeError``, as for a tensor after ``numpy()``.

    Parameters
    ----------
    tensor : torch.Tensor
        A quartz tensor.

    Examples
    --------
    >>> x = torch.zeros(3, device="quartz")
    >>> alias = torch.quartz.native_alias(x)
    >>> alias.data_ptr() == x.data_ptr()
    True
    >>> alias += 1
    >>> x.tolist()
    [1.0, 1.0, 1.0]
    """
    return _C.native_alias(tensor, lock=True)


def adopt(tensor: torch.Tensor, device: DeviceLike = None) -> torch.Tensor:
    """Return a quartz tensor over the memory of a tensor of the native device.

    Parameters
    ----------
    tensor : torch.Tensor
        A tensor of the native device; it need not be kept. While it is, neither of both can be resized.
    device : torch.device, str, int or None
        The quartz device. None is the one that belongs to the memory: that of the same index on cuda, the current one
        on host.

    Examples
    --------
    >>> native = torch.ones(3, device=torch.quartz.native_device())
    >>> x = torch.quartz.adopt(native)
    >>> x.device.type, x.data_ptr() == native.data_ptr()
    ('quartz', True)
    """
    return _C.adopt(tensor, -1 if device is None else _checked_index(device), lock=True)


def from_dlpack(external: Any, device: DeviceLike = None) -> torch.Tensor:
    """Return a quartz tensor over the memory of another library's array, without a copy.

    Parameters
    ----------
    external : object
        An array with ``__dlpack__``, or a DLPack capsule, in memory of the native device (CPU memory on host).
    device : torch.device, str, int or None
        As for `adopt`.

    Examples
    --------
    >>> x = torch.arange(3, device="quartz")
    >>> y = torch.quartz.from_dlpack(x)
    >>> y.device.type, y.data_ptr() == x.data_ptr()
    ('quartz', True)
    """
    tensor = torch.from_dlpack(external)
    return tensor if tensor.device.type == "quartz" else adopt(tensor, device)
