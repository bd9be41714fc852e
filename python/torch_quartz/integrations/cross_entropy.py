"""``torch.nn.functional.linear_cross_entropy`` computes on quartz as it does on the native device.

Since 2.13 PyTorch chooses the chunk size and the dtype in which the loss is accumulated by the name of the device. For
a name it does not know it accumulates in the dtype of the input, so that a bfloat16 loss on quartz would be less exact
than the same loss on the CPU or on CUDA.
"""

import torch

from torch_quartz.device.native import native_device

PATCHES = (
    {
        "target": "torch.nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions._adjust",
        "reason": "PyTorch accumulates the chunked loss in a wider dtype only on devices whose names it knows",
    },
)

_original = None


def install() -> None:
    """Let PyTorch choose for the native device where it would choose for quartz."""
    global _original
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None:  # before torch 2.13
        return
    original = _original = options._adjust

    def _adjust(self, num_batches, in_features, num_classes, dtype, device=None):
        if device is not None and device.type == "quartz":
            device = native_device(device)
        return original(self, num_batches, in_features, num_classes, dtype, device)

    options._adjust = _adjust


def undo() -> None:
    """Put PyTorch's own method back."""
    global _original
    if _original is not None:
        torch.nn.LinearCrossEntropyOptions._adjust = _original
        _original = None
