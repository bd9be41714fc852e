"""Copies of sample arguments on the device under test, with the structure the samples have."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_flatten, tree_map


class Placer:
    """Copies tensors to one device and keeps strides, offsets, shared storages and repeated arguments.

    Parameters
    ----------
    native
        Device type on which the samples were generated; arguments that name it are replaced by `device`.
    device
        Device type of the copies.
    grad
        Whether a copy keeps ``requires_grad``; else every copy is a plain tensor.
    """

    def __init__(self, native: str, device: str, *, grad: bool) -> None:
        self.native = native
        self.device = device
        self.grad = grad
        self._copies: dict[int, torch.Tensor] = {}
        self._storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._sources: list[torch.Tensor] = []  # keeps ids and storage addresses from being reused

    def place(self, args):
        """Return `args` (any nest of containers) with each tensor, device and generator moved."""
        return tree_map(self._leaf, args)

    def _leaf(self, value):
        if isinstance(value, torch.Tensor):
            if id(value) not in self._copies:
                self._sources.append(value)
                self._copies[id(value)] = self._tensor(value)
            return self._copies[id(value)]
        if isinstance(value, torch.device) and value.type == self.native:
            return torch.device(self.device)
        if isinstance(value, str) and value in (self.native, f"{self.native}:0"):
            return self.device
        if isinstance(value, torch.Generator) and value.device.type == self.native:
            return torch.Generator(self.device).manual_seed(value.initial_seed())
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        on_device = self.device if tensor.device.type == self.native else tensor.device
        with torch.no_grad():
            if tensor.is_conj():
                copy = self._tensor(tensor.detach().conj()).conj()
            elif tensor.is_neg():
                copy = torch._neg_view(self._tensor(torch._neg_view(tensor.detach())))
            elif shares_plain_storage(tensor) and tensor.numel() > 0:
                copy = self._strided(tensor.detach(), on_device)
            else:
                same = tensor.device == torch.empty(0, device=on_device).device
                copy = tensor.detach().clone() if same else tensor.detach().to(on_device)
        return copy.requires_grad_(self.grad and tensor.requires_grad)

    def _strided(self, tensor: torch.Tensor, on_device) -> torch.Tensor:
        """Copy the whole storage once and lay the same window over the copy.

        The result is not a view in autograd's sense: a view made without gradients refuses in-place operators.
        """
        key = (tensor.untyped_storage().data_ptr(), tensor.dtype)
        if key not in self._storages:
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            whole.set_(tensor.untyped_storage(), 0, (count,))
            self._storages[key] = whole.to(on_device, copy=True)
        whole = self._storages[key]
        window = torch.empty(0, dtype=tensor.dtype, device=whole.device)
        return window.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def shares_plain_storage(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is an ordinary strided tensor over ordinary memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor._is_zerotensor()
    )


def tensors_in(args) -> list[torch.Tensor]:
    """All tensors of a nest of containers, in a fixed order."""
    return [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor)]
