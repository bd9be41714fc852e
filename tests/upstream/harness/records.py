"""What one run of an operator produced, in a form that can be sent between processes and compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .placement import shares_plain_storage, tensors_in

# Layouts whose tensors are described by the plain tensors they are made of.
_PARTS = {
    torch.sparse_coo: lambda t: [t._indices(), t._values()],
    torch.sparse_csr: lambda t: [t.crow_indices(), t.col_indices(), t.values()],
    torch.sparse_bsr: lambda t: [t.crow_indices(), t.col_indices(), t.values()],
    torch.sparse_csc: lambda t: [t.ccol_indices(), t.row_indices(), t.values()],
    torch.sparse_bsc: lambda t: [t.ccol_indices(), t.row_indices(), t.values()],
}


@dataclasses.dataclass
class TensorRecord:
    """One tensor: everything a user can see of it.

    Attributes
    ----------
    stride
        None where it has no meaning: fewer than two elements, or a layout without strides.
    place
        ``"device"`` for the device under test, else the device's name.
    bits
        Conjugate bit, negative bit, zero tensor; for COO the first one is "coalesced".
    data
        The elements in row-major order; None for layouts that consist of parts.
    parts
        The plain tensors of a sparse or nested tensor.
    """

    dtype: torch.dtype
    shape: tuple
    stride: tuple | None
    layout: str
    place: str
    requires_grad: bool
    bits: tuple[bool, bool, bool]
    data: bytes | None
    parts: list[TensorRecord]


@dataclasses.dataclass
class Outcome:
    """One call: the tensors it gave, the plain facts about it, or the exception it raised.

    Attributes
    ----------
    label
        Names the call inside its check, such as ``"sample 3"``; the two sides are matched by it.
    error
        (type name, message) of the exception, or None.
    tensors
        Every tensor that is compared, by a name that says what it is.
    facts
        Values that must be equal on both sides: scalars returned, aliasing pattern, identities.
    """

    label: str
    error: tuple[str, str] | None = None
    tensors: dict[str, TensorRecord] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class Reader:
    """Copies the elements of many tensors to the CPU at once, since each copy from a GPU waits for it."""

    def __init__(self) -> None:
        self._parts: list[tuple[TensorRecord, torch.Tensor]] = []

    def add(self, rec: TensorRecord, tensor: torch.Tensor) -> None:
        """Note that `rec` gets the elements of `tensor`."""
        rec.data = b""
        if tensor.numel() > 0:
            self._parts.append((rec, _row_major_bytes(tensor)))

    def read(self) -> None:
        """Fill all records."""
        by_device: dict[torch.device, list[tuple[TensorRecord, torch.Tensor]]] = {}
        for rec, flat in self._parts:
            by_device.setdefault(flat.device, []).append((rec, flat))
        for parts in by_device.values():
            together = torch.cat([flat for _, flat in parts]).cpu().numpy()
            start = 0
            for rec, flat in parts:
                rec.data = together[start : start + flat.numel()].tobytes()
                start += flat.numel()
        self._parts = []


def record(tensor: torch.Tensor, device: str, reader: Reader | None = None) -> TensorRecord:
    """Describe `tensor`; `device` is the device type under test, so that both sides write the same place.

    With a `reader` the elements are there after ``reader.read()``, else at once.
    """
    mine = reader or Reader()
    rec = _describe(tensor, device, mine)
    if reader is None:
        mine.read()
    return rec


def _describe(tensor: torch.Tensor, device: str, reader: Reader) -> TensorRecord:
    place = "device" if tensor.device.type == device else str(tensor.device)
    rec = TensorRecord(tensor.dtype, (), None, "strided", place, tensor.requires_grad, (False, False, False), None, [])
    tensor = tensor.detach()
    if shares_plain_storage(tensor) or tensor._is_zerotensor():
        rec.bits = (tensor.is_conj(), tensor.is_neg(), tensor._is_zerotensor())
        rec.shape = tuple(tensor.shape)
        rec.stride = tuple(tensor.stride()) if tensor.numel() > 1 else None
        if not tensor.is_meta:
            reader.add(rec, tensor)
    elif tensor.is_nested:
        rec.layout, rec.shape = f"nested {tensor.layout}", (tensor.size(0), tensor.dim())
        rec.parts = [_describe(part, device, reader) for part in tensor.unbind()]
    elif tensor.layout in _PARTS:
        rec.layout, rec.shape = str(tensor.layout), tuple(tensor.shape)
        if tensor.layout == torch.sparse_coo:
            rec.bits = (tensor.is_coalesced(), False, False)
        rec.parts = [_describe(part, device, reader) for part in _PARTS[tensor.layout](tensor)]
    else:
        raise TypeError(f"no record for a {type(tensor).__name__} of layout {tensor.layout}")
    return rec


def _row_major_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a one-dimensional uint8 tensor on the same device."""
    if tensor._is_zerotensor():
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor = tensor.contiguous()
    # Of a contiguous tensor the stride of a dimension of size 1 may be odd, which view(dtype) refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def values(rec: TensorRecord) -> torch.Tensor:
    """The elements of a strided record as a CPU tensor."""
    if not rec.data:
        return torch.empty(rec.shape, dtype=rec.dtype)
    raw = torch.frombuffer(bytearray(rec.data), dtype=torch.uint8)
    if rec.dtype.is_complex:
        real = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
        return torch.view_as_complex(raw.view(real[rec.dtype]).reshape(*rec.shape, 2))
    return raw.view(rec.dtype).reshape(rec.shape)


def alias_facts(inputs, outputs) -> list[tuple]:
    """Which outputs are an input or share memory with an input or an earlier output, and how.

    Returns
    -------
    list of tuple
        (output number, "same" or "shares", "input" or "output", number of the other tensor, storage offset, is a view).
    """
    seen: dict[int, tuple[str, int]] = {}
    objects = {id(tensor): number for number, tensor in enumerate(tensors_in(inputs))}
    for number, tensor in enumerate(tensors_in(inputs)):
        if address := _address(tensor):
            seen.setdefault(address, ("input", number))
    facts = []
    for number, tensor in enumerate(tensors_in(outputs)):
        if id(tensor) in objects:
            facts.append((number, "same", "input", objects[id(tensor)]))
            continue
        if not (address := _address(tensor)):
            continue
        if address in seen:
            facts.append((number, "shares", *seen[address], tensor.storage_offset(), tensor._is_view()))
        seen.setdefault(address, ("output", number))
    return facts


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if shares_plain_storage(tensor) else 0
