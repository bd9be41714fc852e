"""safetensors: open files straight onto quartz.

The library's core has a closed list of device names and refuses ``device="quartz"``. The replacement of ``safe_open``
opens the file on the native device and adopts each tensor without a copy: on host memory that is the mapped file
itself, on a GPU the library's own CUDA path. Any other device goes to the original unchanged.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from torch_quartz.device._utils import _checked_index
from torch_quartz.integrations.replacements import Replacements

PATCHES = (
    {
        "name": "safetensors.safe_open",
        "target": "safetensors.safe_open (load_file and load_model of safetensors.torch call it)",
        "reason": "the core accepts a closed list of device names and has no hook for others",
    },
)

_changes = Replacements()


def install() -> None:
    """Replace ``safe_open`` once safetensors is imported."""
    _changes.when_imported("safetensors", _patch)


def undo() -> None:
    """Put the original back everywhere."""
    _changes.undo()


def quartz_index(device: Any) -> int | None:
    """Return the quartz index that a ``device=`` argument means, None if it means another device.

    Parameters
    ----------
    device : str, int, torch.device or anything else
        A bare index means the current accelerator, as in PyTorch.
    """
    if isinstance(device, str) and device.partition(":")[0] == "quartz":
        device = torch.device(device)
    elif isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        if torch.accelerator.current_accelerator() is None:
            return None
        device = torch.device(device)
    if not isinstance(device, torch.device) or device.type != "quartz":
        return None
    return _checked_index(device)


class QuartzFile:
    """An open safetensors file whose tensors come out on a quartz device; made by ``safe_open``.

    Parameters
    ----------
    handle : safe_open
        The library's own object, opened on the native device.
    index : int
        The quartz device.
    """

    def __init__(self, handle: Any, index: int):
        self._handle = handle
        self._index = index

    def __enter__(self) -> QuartzFile:
        self._handle.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._handle.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:  # keys, metadata, offset_keys: nothing of the device in them
        return getattr(self._handle, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        return _adopt(self._handle.get_tensor(name), self._index)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the file by name."""
        return {name: self.get_tensor(name) for name in self._handle.keys()}  # noqa: SIM118 (no mapping)

    def get_slice(self, name: str) -> QuartzSlice:
        """Return an object that reads parts of one tensor when it is indexed."""
        return QuartzSlice(self._handle.get_slice(name), self._index)


class QuartzSlice:
    """A tensor of a file that is read when it is indexed; made by `QuartzFile.get_slice`."""

    def __init__(self, part: Any, index: int):
        self._part = part
        self._index = index

    def __getitem__(self, key: Any) -> torch.Tensor:
        return _adopt(self._part[key], self._index)

    def __getattr__(self, name: str) -> Any:  # get_shape, get_dtype
        return getattr(self._part, name)


def _adopt(tensor: torch.Tensor, index: int) -> torch.Tensor:
    from torch_quartz import _C

    return _C.adopt(tensor, index)


def _native(index: int) -> str:
    from torch_quartz import _C

    return "cpu" if _C.substrate() == "host" else f"cuda:{index}"


def _patch(module: ModuleType) -> None:
    def make(original: type) -> type:
        class Opener(type):
            """Keeps ``isinstance(file, safe_open)`` true for the objects of both kinds."""

            def __call__(cls, filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
                index = quartz_index(device) if framework in ("pt", "torch", "pytorch") else None
                if index is None:
                    return original(filename, framework, device, **options)
                return QuartzFile(original(filename, framework, _native(index), **options), index)

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, (original, QuartzFile))

        class safe_open(metaclass=Opener):
            __doc__ = original.__doc__

        safe_open.__module__, safe_open.__qualname__ = original.__module__, original.__qualname__
        return safe_open

    _changes.function(module, "safe_open", make)
