"""FlexAttention takes a closed list of device names; quartz is served as its native device is.

The operator itself needs nothing: eager mode computes it from PyTorch's operators, and a compiled call reaches Inductor
on the native device (`inductor`). Where that is the CPU, its rule holds here too: no backward pass.
"""

import functools
from collections.abc import Callable
from types import ModuleType

from torch_quartz.integrations.replacements import Replacements

PATCHES = [
    {
        "target": "torch.nn.attention.flex_attention._validate_device (when first imported)",
        "reason": "it refuses every device that is not in its list of names",
    }
]

_changes = Replacements()


def install() -> None:
    """Wrap the check of the device, now if FlexAttention is imported, else when it is."""
    _changes.when_imported("torch.nn.attention.flex_attention", _patch)


def undo() -> None:
    """Put PyTorch's own check back."""
    _changes.undo()


def _patch(module: ModuleType) -> None:
    _changes.attribute(module, "_validate_device", _checked_as_native)


def _checked_as_native(original: Callable) -> Callable:
    from torch_quartz import _C

    forward_only = _C.substrate() == "host"

    @functools.wraps(original)
    def _validate_device(query, key, value):
        if query.device.type != "quartz":
            original(query, key, value)
        elif forward_only and (query.requires_grad or key.requires_grad or value.requires_grad):
            raise NotImplementedError(
                "FlexAttention does not support backward on quartz in host memory, as on the CPU: "
                "set requires_grad of the inputs to False or use a GPU"
            )

    return _validate_device
