"""DLPack: export a quartz tensor, without a copy, as the CPU or CUDA memory that it is.

``torch.Tensor.__dlpack_device__`` raises for a renamed PrivateUse1 backend, so no consumer could even ask. NumPy,
CuPy, JAX and others know the native device and nothing of quartz; `torch_quartz.device.from_dlpack` brings memory
back.
"""

import torch

_originals: tuple | None = None


def install() -> None:
    """Replace both DLPack methods of ``torch.Tensor``; a quartz tensor's native alias goes to the originals."""
    global _originals
    from torch_quartz import _C

    export, device_of = _originals = (torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__)

    def __dlpack__(self, **options):
        if self.device.type != "quartz":
            return export(self, **options)
        if self.requires_grad:  # the alias has no grad_fn any more: ask the tensor itself
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return export(_C.native_alias(self), **options)

    def __dlpack_device__(self):
        return device_of(_C.native_alias(self) if self.device.type == "quartz" else self)

    for wrapper, original in ((__dlpack__, export), (__dlpack_device__, device_of)):
        wrapper.__doc__, wrapper.__module__, wrapper.__qualname__ = (
            original.__doc__,
            original.__module__,
            original.__qualname__,
        )
    torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__ = __dlpack__, __dlpack_device__


def undo() -> None:
    """Put PyTorch's own methods back."""
    global _originals
    torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__ = _originals
    _originals = None
