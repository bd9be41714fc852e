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
    """One tensor: everything a user can see of it. `data` holds the elements in row-major order."""

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


def record(tensor: torch.Tensor, device: str) -> TensorRecord:
    """Describe `tensor`; `device` is the device type under test, so that both sides write the same place."""
    place = "device" if tensor.device.type == device else str(tensor.device)
    requires_grad = tensor.requires_grad
    tensor = tensor.detach()
    flags = (False, False, False)
    parts, data, stride = [], None, None
    if shares_plain_storage(tensor) or tensor._is_zerotensor():
        flags = (tensor.is_conj(), tensor.is_neg(), tensor._is_zerotensor())
        stride = tuple(tensor.stride()) if tensor.numel() > 1 else None
        data = None if tensor.is_meta else _row_major_bytes(tensor)
        layout, shape = "strided", tuple(tensor.shape)
    elif tensor.is_nested:
        layout, shape = f"nested {tensor.layout}", (tensor.size(0), tensor.dim())
        parts = [record(part, device) for part in tensor.unbind()]
    elif tensor.layout in _PARTS:
        layout, shape = str(tensor.layout), tuple(tensor.shape)
        if tensor.layout == torch.sparse_coo:
            flags = (tensor.is_coalesced(), False, False)
        parts = [record(part, device) for part in _PARTS[tensor.layout](tensor)]
    else:
        raise TypeError(f"no record for a {type(tensor).__name__} of layout {tensor.layout}")
    return TensorRecord(tensor.dtype, shape, stride, layout, place, requires_grad, flags, data, parts)


def _row_major_bytes(tensor: torch.Tensor) -> bytes:
    host = tensor.resolve_conj().resolve_neg().cpu()
    if host._is_zerotensor():
        host = torch.zeros(host.shape, dtype=host.dtype)
    if host.is_complex():
        host = torch.view_as_real(host)
    flat = host.contiguous().as_strided((host.numel(),), (1,))  # also where the stride of a size-1 dimension is odd
    return flat.view(torch.uint8).numpy().tobytes()


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
