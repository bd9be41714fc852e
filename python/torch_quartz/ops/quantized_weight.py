"""Quantised weights as checkpoints hold them, for `linear_quantized` and `moe_experts_quantized`."""

import dataclasses
import math
import warnings

import torch
from torch import Tensor

from torch_quartz.ops.quantize import dequantize_fp8, dequantize_mxfp4, dequantize_nvfp4

FORMATS = ("fp8", "nvfp4", "mxfp4")
_GROUP = {"nvfp4": 16, "mxfp4": 32}


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A matrix ``(n, k)`` of codes and its scales, or a stack of them with a first dimension of experts.

    Parameters
    ----------
    codes : Tensor
        ``"fp8"``: float8_e4m3fn ``(..., n, k)``. ``"nvfp4"``, ``"mxfp4"``: uint8 ``(..., n, ceil(k / 2))``, the first
        of two codes in the low half.
    scales : Tensor
        ``"fp8"``: float32: one number; one for each matrix of a stack, ``(experts,)``; for each row, ``(..., n, 1)``;
        for each group or block of `block` elements, ``(..., n, ceil(k / block))`` or ``(..., ceil(n / block),
        ceil(k / block))``. ``"nvfp4"``: float8_e4m3fn ``(..., n, ceil(k / 16))``; ``"mxfp4"``: float8_e8m0fnu
        ``(..., n, ceil(k / 32))``.
    global_scale : Tensor or None
        float32, what a whole matrix (or each row) is multiplied with, for the fp4 formats; None is 1.
    format : str
        ``"fp8"``, ``"nvfp4"`` or ``"mxfp4"``.
    columns : int
        k.
    block : int
        Of ``"fp8"``.

    Examples
    --------
    >>> codes, scales = torch_quartz.ops.quantize_fp8(torch.eye(4, device="quartz"), "row")
    >>> torch_quartz.ops.QuantizedWeight(codes, scales).dequantize(torch.float32).diagonal().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None = None
    format: str = "fp8"
    columns: int = -1
    block: int = 128

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"QuantizedWeight: format must be one of {', '.join(FORMATS)}, got {self.format!r}")
        if self.columns < 0:
            object.__setattr__(self, "columns", self.codes.shape[-1] * (1 if self.format == "fp8" else 2))

    def __getitem__(self, expert: int) -> "QuantizedWeight":
        """Return one matrix of a stack, without a copy."""
        if self.codes.dim() != 3:
            raise IndexError(
                f"QuantizedWeight: only a stack has matrices, got codes of shape {tuple(self.codes.shape)}"
            )

        def of(scale: Tensor | None) -> Tensor | None:
            return scale if scale is None or scale.numel() == 1 else scale[expert]

        return dataclasses.replace(
            self, codes=self.codes[expert], scales=of(self.scales), global_scale=of(self.global_scale)
        )

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """Return it on another device."""
        total = None if self.global_scale is None else self.global_scale.to(device)
        return dataclasses.replace(self, codes=self.codes.to(device), scales=self.scales.to(device), global_scale=total)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the weight as a plain tensor, every element rounded once to `dtype`."""
        if self.codes.dim() == 3:
            return torch.stack([self[e].dequantize(dtype) for e in range(self.codes.shape[0])])
        if self.format == "fp8":
            scales = self.scales.unsqueeze(-1) if self.scales.dim() == 1 and self.scales.numel() > 1 else self.scales
            return dequantize_fp8(self.codes, scales, dtype, self.block)
        total = self.global_scale
        if total is None or total.numel() == 1:
            return _dequantize_fp4(self, total, dtype)
        return (_dequantize_fp4(self, None, torch.float32) * total.reshape(-1, 1)).to(dtype)


def _dequantize_fp4(weight: QuantizedWeight, total: Tensor | None, dtype: torch.dtype) -> Tensor:
    if weight.format == "nvfp4":
        return dequantize_nvfp4(weight.codes, weight.scales, total, weight.columns, dtype)
    if total is None:
        return dequantize_mxfp4(weight.codes, weight.scales, weight.columns, dtype)
    return (dequantize_mxfp4(weight.codes, weight.scales, weight.columns, torch.float32) * total).to(dtype)


def _magnitudes_are_zero(codes: Tensor) -> Tensor:
    """Return for each byte whether all it codes is zero."""
    codes = codes.view(torch.uint8)
    return (codes & 0x77) == 0


def _checked_total(total: Tensor | None, codes: Tensor, what: str) -> Tensor | None:
    """Scales of whole matrices: not finite is an error, unless every code it covers is zero."""
    if total is None or total.device.type == "meta" or bool(total.isfinite().all()):
        return total
    bad = ~total.isfinite()
    per_matrix = codes.dim() == 3 and total.numel() == codes.shape[0]
    zero = _magnitudes_are_zero(codes)
    zero = zero.flatten(1).all(1).reshape(total.shape) if per_matrix else zero.all().expand(total.shape)
    if bool((bad & ~zero).any()):
        raise ValueError(f"{what} must be finite, got {total[bad & ~zero][0].item()} for codes that are not all zero")
    warnings.warn(f"{what} is not finite where all codes are zero; 1 is taken", stacklevel=4)
    return torch.where(bad, torch.ones_like(total), total)


def _checked_scales(scales: Tensor, codes: Tensor, format: str, what: str) -> Tensor:
    """Scales of groups: NaN is an error, unless the codes of the group are all zero."""
    if scales.device.type == "meta" or scales.numel() == 0:
        return scales
    bytes_ = scales.view(torch.uint8)
    bad = (bytes_ & 0x7F) == 0x7F if format == "nvfp4" else bytes_ == 255
    if not bool(bad.any()):
        return scales
    per_group = _GROUP[format] // 2
    zero = torch.nn.functional.pad(
        _magnitudes_are_zero(codes), (0, bad.shape[-1] * per_group - codes.shape[-1]), value=True
    )
    zero = zero.unflatten(-1, (-1, per_group)).all(-1)
    if bool((bad & ~zero).any()):
        where = (bad & ~zero).nonzero()[0].tolist()
        raise ValueError(f"{what} must be numbers, got NaN at {where} for codes that are not all zero")
    warnings.warn(f"{what} has NaN where all codes are zero; the smallest scale is taken", stacklevel=4)
    return torch.where(bad, torch.zeros_like(bytes_), bytes_).view(scales.dtype)


def _fp4(
    codes: Tensor, scales: Tensor, total: Tensor | None, format: str, columns: int | None, names: tuple
) -> QuantizedWeight:
    codes = codes if codes.dtype == torch.uint8 else codes.view(torch.uint8)
    scales = _checked_scales(scales, codes, format, names[0])
    return QuantizedWeight(
        codes,
        scales,
        _checked_total(total, codes, names[1]),
        format,
        codes.shape[-1] * 2 if columns is None else columns,
    )


def _fp8(codes: Tensor, scales: Tensor, block: int, name: str) -> QuantizedWeight:
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"the weight must be float8_e4m3fn for an fp8 checkpoint, got {codes.dtype}")
    scales = scales.float()
    if scales.device.type != "meta" and not bool(scales.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {scales[~scales.isfinite()][0].item()}")
    return QuantizedWeight(codes, scales, None, "fp8", codes.shape[-1], block)


def from_compressed_tensors(
    *,
    weight_packed: Tensor | None = None,
    weight: Tensor | None = None,
    weight_scale: Tensor,
    weight_global_scale: Tensor | None = None,
    columns: int | None = None,
    block: int = 128,
) -> QuantizedWeight:
    """Take the tensors of a layer that compressed-tensors stored: NVFP4, MXFP4 or float8.

    ``weight_packed`` with ``weight_global_scale`` is NVFP4: compressed-tensors divides by the global scale, so its
    inverse is taken. ``weight_packed`` without one and scales of 32 elements is MXFP4. ``weight`` is float8 with scales
    of a tensor, of rows or of blocks. No copy of the codes is made.

    Parameters
    ----------
    weight_packed, weight, weight_scale, weight_global_scale : Tensor or None
        As in the checkpoint; stacks of experts have a first dimension more.
    columns : int or None
        Columns of the weight, if not two a byte of `weight_packed`.
    block : int
        Of float8 in blocks.

    Raises
    ------
    ValueError
        Scales that are NaN or infinite where the codes are not all zero, or tensors that make no format.

    Examples
    --------
    >>> packed = torch.tensor([[0x21] * 8], dtype=torch.uint8)
    >>> scale, total = torch.ones(1, 1).to(torch.float8_e4m3fn), torch.tensor([4.0])
    >>> weight = torch_quartz.ops.from_compressed_tensors(
    ...     weight_packed=packed, weight_scale=scale, weight_global_scale=total)
    >>> weight.dequantize()[0, :2].tolist()
    [0.125, 0.25]
    """
    if weight_packed is None:
        if weight is None:
            raise ValueError("from_compressed_tensors: weight_packed or weight must be given, got neither")
        return _fp8(weight, weight_scale, block, "from_compressed_tensors: weight_scale")
    names = ("from_compressed_tensors: weight_scale", "from_compressed_tensors: the inverse of weight_global_scale")
    if weight_scale.dtype == torch.float8_e4m3fn:
        if weight_global_scale is None:
            raise ValueError("from_compressed_tensors: weight_global_scale must be given for scales of float8_e4m3fn")
        # The inverse of an infinite one (experts that saw zeros alone) would make zeros of everything, unnoticed.
        total = weight_global_scale.float()
        total = torch.where(total.isfinite(), total.reciprocal(), torch.full_like(total, math.nan))
        return _fp4(weight_packed, weight_scale, total, "nvfp4", columns, names)
    if weight_global_scale is not None:
        raise ValueError(
            f"from_compressed_tensors: weight_scale must be float8_e4m3fn for NVFP4, got {weight_scale.dtype}"
        )
    return _fp4(weight_packed, weight_scale, None, "mxfp4", columns, names)


def from_modelopt(
    *, weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor | None = None, columns: int | None = None
) -> QuantizedWeight:
    """Take the tensors of a layer that modelopt stored: NVFP4 with ``weight_scale_2``, else float8 with one scale.

    ``input_scale`` belongs to activations of 4 or 8 bits and has no place here: the product is of the weight alone.

    Parameters
    ----------
    weight, weight_scale, weight_scale_2 : Tensor
        As in the checkpoint; stacks of experts have a first dimension more. ``weight_scale_2`` multiplies.
    columns : int or None
        Columns of the weight, if not two a byte.

    Raises
    ------
    ValueError
        As `from_compressed_tensors`.

    Examples
    --------
    >>> packed = torch.tensor([[0x21] * 8], dtype=torch.uint8)
    >>> weight = torch_quartz.ops.from_modelopt(
    ...     weight=packed, weight_scale=torch.ones(1, 1).to(torch.float8_e4m3fn), weight_scale_2=torch.tensor(0.25))
    >>> weight.dequantize()[0, :2].tolist()
    [0.125, 0.25]
    """
    if weight_scale_2 is None:
        return _fp8(weight, weight_scale, 128, "from_modelopt: weight_scale")
    names = ("from_modelopt: weight_scale", "from_modelopt: weight_scale_2")
    return _fp4(weight, weight_scale, weight_scale_2.float(), "nvfp4", columns, names)


def from_fp8(weight: Tensor, weight_scale_inv: Tensor, block: int = 128) -> QuantizedWeight:
    """Take a weight of a float8 checkpoint as Transformers loads it (DeepSeek, Qwen3-FP8).

    ``weight_scale_inv`` multiplies, in spite of its name. Scales of other types (bfloat16, float8_e8m0fnu) are
    converted.

    Parameters
    ----------
    weight : Tensor
        float8_e4m3fn ``(n, k)``, or a stack.
    weight_scale_inv : Tensor
        ``(ceil(n / block), ceil(k / block))``, or another shape of `QuantizedWeight`.
    block : int
        Side of a block.

    Raises
    ------
    ValueError
        Scales that are not finite, or a weight of another type.

    Examples
    --------
    >>> weight = torch.eye(2).to(torch.float8_e4m3fn)
    >>> torch_quartz.ops.from_fp8(weight, torch.tensor([[3.0]])).dequantize().tolist()
    [[3.0, 0.0], [0.0, 3.0]]
    """
    return _fp8(weight, weight_scale_inv, block, "from_fp8: weight_scale_inv")


def from_mxfp4(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """Take a weight of gpt-oss: ``*_blocks`` and ``*_scales``.

    Parameters
    ----------
    blocks : Tensor
        uint8 ``(..., n, k / 32, 16)``.
    scales : Tensor
        uint8 ``(..., n, k / 32)``: exponents with a bias of 127.

    Raises
    ------
    ValueError
        Shapes that do not fit, or a scale of 255 (NaN) where the codes are not all zero.

    Examples
    --------
    >>> blocks = torch.full((1, 1, 16), 0x21, dtype=torch.uint8)
    >>> scales = torch.tensor([[126]], dtype=torch.uint8)
    >>> torch_quartz.ops.from_mxfp4(blocks, scales).dequantize()[0, :2].tolist()
    [0.25, 0.5]
    """
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
        raise ValueError(
            f"from_mxfp4: blocks must have 16 bytes for each of scales, got {tuple(blocks.shape)} and "
            f"{tuple(scales.shape)}"
        )
    return _fp4(blocks.flatten(-2), scales, None, "mxfp4", None, ("from_mxfp4: scales", ""))


def unswizzle_scales(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return scales in rows and columns from the tiles of 128 x 4 that Blackwell's block-scaled products read.

    Element ``(r, c)`` of a tile lies at ``(r % 32) * 16 + (r // 32) * 4 + c``; tiles follow each other along the
    columns, then the rows, and the whole is padded to full tiles.

    Parameters
    ----------
    scales : Tensor
        One-byte elements, ``ceil(rows / 128) * ceil(columns / 4) * 512`` of them in any shape.
    rows, columns : int
        Of the scales: rows of the weight, and groups of a row.

    Raises
    ------
    ValueError
        Another number of elements.

    Examples
    --------
    >>> torch_quartz.ops.unswizzle_scales(torch.arange(512).to(torch.uint8), 128, 4)[:2].tolist()
    [[0, 1, 2, 3], [16, 17, 18, 19]]
    """
    down, across = -(-rows // 128), -(-columns // 4)
    if scales.numel() != down * across * 512:
        raise ValueError(f"unswizzle_scales: scales must have {down * across * 512} elements, got {scales.numel()}")
    tiles = scales.contiguous().view(torch.uint8).view(down, across, 32, 4, 4)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(down * 128, across * 4)
    return plain[:rows, :columns].contiguous().view(scales.dtype)
