"""``torch.nn.DataParallel`` never chooses quartz.

It takes every accelerator of the process, and then splits batches with functions that only CUDA builds have. Without
this patch a program on the CPU that wraps its model in ``DataParallel`` would find the model on quartz, and fail,
because ``import torch`` registered the device. With it ``DataParallel`` runs the module where the module is, as on a
machine without an accelerator.
"""

import importlib

# torch.nn.parallel exports a function of the same name, which hides the module from `from ... import`.
data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")

PATCHES = (
    {
        "target": "torch.nn.parallel.data_parallel._get_available_device_type",
        "reason": "DataParallel takes any accelerator and then needs functions that only CUDA builds have",
    },
)

_original = None


def install() -> None:
    """Let ``DataParallel`` see no accelerator where PyTorch would answer quartz."""
    global _original
    original = _original = data_parallel._get_available_device_type

    def _get_available_device_type():
        device_type = original()
        return None if device_type == "quartz" else device_type

    data_parallel._get_available_device_type = _get_available_device_type


def undo() -> None:
    """Put PyTorch's own function back."""
    global _original
    data_parallel._get_available_device_type = _original
    _original = None
