"""``torch.nn.DataParallel`` never chooses quartz.

It takes every accelerator of the process, and then splits batches with functions that only CUDA builds have. Without
this patch a program on the CPU that wraps its model in ``DataParallel`` would find the model on quartz, and fail,
because ``import torch`` registered the device. With it ``DataParallel`` runs the module where the module is, as on a
machine without an accelerator.
"""

import importlib
from collections.abc import Callable

from torch_quartz.integrations.replacements import Replacements

# torch.nn.parallel exports a function of the same name, which hides the module from `from ... import`.
data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")

PATCHES = (
    {
        "target": "torch.nn.parallel.data_parallel._get_available_device_type",
        "reason": "DataParallel takes any accelerator and then needs functions that only CUDA builds have",
    },
)

_changes = Replacements()


def install() -> None:
    """Let ``DataParallel`` see no accelerator where PyTorch would answer quartz."""
    _changes.attribute(data_parallel, "_get_available_device_type", _without_quartz)


def undo() -> None:
    """Put PyTorch's own function back."""
    _changes.undo()


def _without_quartz(original: Callable) -> Callable:
    def _get_available_device_type():
        device_type = original()
        return None if device_type == "quartz" else device_type

    return _get_available_device_type
