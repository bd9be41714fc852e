"""FlexAttention takes a closed list of device names; quartz is served as its native device is.

The operator itself needs nothing: eager mode computes it from PyTorch's operators, and a compiled call reaches Inductor
on the native device (`inductor`). Where that is the CPU, its rule holds here too: no backward pass.
"""

import functools
from collections.abc import Callable
from types import ModuleType

from torch_quartz.integrations.import_hooks import on_import

PATCHES = [
    {
        "target": "torch.nn.attention.flex_attention._validate_device (when first imported)",
        "reason": "it refuses every device that is not in its list of names",
    }
]

_hook = None
_patched: tuple[ModuleType, Callable] | None = None


def install() -> None:
    """Wrap the check of the device, now if FlexAttention is imported, else when it is."""
    global _hook
    _hook = on_import("torch.nn.attention.flex_attention", _patch)


def undo() -> None:
    """Put PyTorch's own check back."""
    global _hook, _patched
    if _hook is not None:
        _hook.remove()
        _hook = None
    if _patched is not None:
        module, original = _patched
        module._validate_device = original
        _patched = None


def _patch(module: ModuleType) -> None:
    global _patched
    from torch_quartz import _C

    original = module._validate_device
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

    module._validate_device = _validate_device
    _patched = (module, original)
