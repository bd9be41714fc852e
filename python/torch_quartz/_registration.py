"""Register the device with PyTorch, once per process, in the order PyTorch needs."""

import atexit
import importlib
import sys

from torch_quartz import _load, environment

_registered = False


def register() -> None:
    """Load the compiled half, register ``torch.quartz`` and its methods, and install the patches of PyTorch."""
    global _registered
    if _registered:
        return
    _C = _load.load()
    import torch

    torch.utils.rename_privateuse1_backend("quartz")
    from torch_quartz import device
    from torch_quartz.integrations import patches

    torch._register_device_module("quartz", device)
    # `from torch.quartz.amp import autocast` must find these modules, not load second copies of their files.
    for name in device.SUBMODULES:
        sys.modules[f"torch.quartz.{name}"] = sys.modules[f"torch_quartz.device.{name}"]
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    patches.install_all()
    importlib.import_module("torch_quartz.ops")  # the fake kernels and the gradients of our operators
    atexit.register(_drain_autograd, _C.drain_autograd, device.is_initialized)
    _registered = True
    environment.warn_of_unknown()


def _drain_autograd(drain, is_initialized) -> None:
    # A device thread of the autograd engine may still hold the last graph of a finished backward(); releasing it needs
    # the interpreter, so wait for it here. A GPU that was never used, or belongs to the process this one was forked
    # from, has no such thread.
    if is_initialized():
        drain()
