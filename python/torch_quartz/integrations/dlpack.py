"""DLPack and the CUDA array interface: export a quartz tensor, without a copy, as the CPU or CUDA memory that it is.

``torch.Tensor.__dlpack_device__`` raises for a renamed PrivateUse1 backend, so no consumer could even ask. NumPy, CuPy,
JAX and others know the native device and nothing of quartz; `torch_quartz.device.from_dlpack` brings memory back.
"""

import torch

_NAMES = ("__dlpack__", "__dlpack_device__", "__cuda_array_interface__")
_originals: dict[str, object] = {}


def install() -> None:
    """Replace the export methods of ``torch.Tensor``; a quartz tensor's native alias goes to the originals."""
    from torch_quartz import _C

    _originals.update((name, getattr(torch.Tensor, name)) for name in _NAMES)
    export, device_of, array_interface = _originals.values()
    on_cuda = _C.substrate() == "cuda"

    def __dlpack__(self, **options):
        if self.device.type != "quartz":
            return export(self, **options)
        if self.requires_grad:  # the alias has no grad_fn any more: ask the tensor itself
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return export(_C.native_alias(self), **options)

    def __dlpack_device__(self):
        return device_of(_C.native_alias(self) if self.device.type == "quartz" else self)

    def __cuda_array_interface__(self):
        if self.device.type == "quartz" and on_cuda and not self.requires_grad:
            return array_interface.__get__(_C.native_alias(self))
        return array_interface.__get__(self)

    for wrapper, original in ((__dlpack__, export), (__dlpack_device__, device_of)):
        wrapper.__doc__, wrapper.__module__ = original.__doc__, original.__module__
        wrapper.__qualname__ = original.__qualname__
        setattr(torch.Tensor, wrapper.__name__, wrapper)
    torch.Tensor.__cuda_array_interface__ = property(__cuda_array_interface__, doc=array_interface.__doc__)


def undo() -> None:
    """Put PyTorch's own methods back."""
    for name, original in _originals.items():
        setattr(torch.Tensor, name, original)
    _originals.clear()
