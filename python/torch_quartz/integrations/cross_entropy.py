"""``torch.nn.functional.linear_cross_entropy`` computes on quartz as it does on the native device.

Since 2.13 PyTorch chooses the chunk size and the dtype in which the loss is accumulated by the name of the device. For
a name it does not know it accumulates in the dtype of the input, so that a bfloat16 loss on quartz would be less exact
than the same loss on the CPU or on CUDA.
"""

from collections.abc import Callable

import torch

from torch_quartz.device.native import native_device
from torch_quartz.integrations.replacements import Replacements

PATCHES = (
    {
        "target": "torch.nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions._adjust",
        "reason": "PyTorch accumulates the chunked loss in a wider dtype only on devices whose names it knows",
    },
)

_changes = Replacements()


def install() -> None:
    """Let PyTorch choose for the native device where it would choose for quartz."""
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is not None:  # since torch 2.13
        _changes.attribute(options, "_adjust", _for_native_device)


def undo() -> None:
    """Put PyTorch's own method back."""
    _changes.undo()


def _for_native_device(original: Callable) -> Callable:
    def _adjust(self, num_batches, in_features, num_classes, dtype, device=None):
        if device is not None and device.type == "quartz":
            device = native_device(device)
        return original(self, num_batches, in_features, num_classes, dtype, device)

    return _adjust
