"""Which device a library means when the program names none, or only a number.

PyTorch itself reads a bare index as the current accelerator, so ``device_map=0`` is ``quartz:0`` once the device is
registered. A program that names *nothing* (a ``Trainer``, an ``Accelerator``, ``pipeline(...)``, ``device_map="auto"``)
is the business of `preferred`; docs/transformers.md states the rule.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import FrameType

import torch

import torch_quartz

# accelerate's own variable; Transformers reads it too. It is honoured wherever a library chooses a device by itself.
_VARIABLE = "ACCELERATE_TORCH_DEVICE"


def is_current() -> bool:
    """Return whether quartz is PyTorch's current accelerator, which a bare device index refers to."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == "quartz"


def preferred() -> bool:
    """Return whether a library that chooses a device by itself should choose quartz.

    ``ACCELERATE_TORCH_DEVICE`` decides where it is set. Otherwise the answer is yes after ``import torch_quartz``, and
    no where only ``import torch`` registered the device: a program that knows nothing of quartz keeps its device.
    """
    named = os.environ.get(_VARIABLE)
    if named:
        return named.partition(":")[0] == "quartz"
    return is_current() and not torch_quartz._autoloaded


def preferred_device() -> torch.device:
    """Return the device that `preferred` stands for: the one ``ACCELERATE_TORCH_DEVICE`` names, or the current one."""
    device = torch.device(os.environ.get(_VARIABLE) or "quartz")
    return torch.device("quartz", torch.quartz.current_device() if device.index is None else device.index)


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


class _WatchedSpec(ModuleSpec):
    """The spec of the package while only ``import torch`` has loaded it; notices that a program imports it too.

    An import statement of a loaded module runs none of its code, but asks its spec whether it is still initialising.
    """

    @property
    def _initializing(self) -> bool:
        frame = sys._getframe(1)
        while frame is not None and _package(frame) == "importlib":
            frame = frame.f_back
        if frame is not None and _package(frame) not in ("torch_quartz", "torch"):
            self.__class__ = ModuleSpec
            torch_quartz._autoloaded = False
        return False

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        pass  # importlib sets it around loading, which is over


def watch_import() -> None:
    """Make a later ``import torch_quartz`` count where ``import torch`` has loaded the package already."""
    if torch_quartz._autoloaded and type(torch_quartz.__spec__) is ModuleSpec:
        torch_quartz.__spec__.__class__ = _WatchedSpec
