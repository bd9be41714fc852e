"""Quantised weights: float8, NVFP4 and MXFP4, and linear layers on them. Page: docs/ops/quantize.md."""

import torch
from torch import Tensor


def quantize_fp8(w: Tensor, granularity: str = "tensor", block: int = 128) -> tuple[Tensor, Tensor]:
    """Quantise to float8 e4m3: ``scale = max|w| / 448`` of what a scale covers, ``code = e4m3(w / scale)``.

    Parameters
    ----------
    w : Tensor
        Any shape; float32, float16 or bfloat16.
    granularity : str
        What a scale covers: the ``"tensor"``, a ``"row"`` (token) of the last dimension, a ``"group"`` of `block`
        elements of a row, or a ``"block"`` of `block` x `block` elements of a matrix.
    block : int
        See `granularity`.

    Returns
    -------
    tuple of Tensor
        Codes, float8_e4m3fn in the shape of `w`, and scales, float32. What is all zeros has scale 1.

    Raises
    ------
    RuntimeError
        A dtype or shape that does not fit.
    ValueError
        An unknown `granularity`.

    Examples
    --------
    >>> codes, scale = torch_quartz.ops.quantize_fp8(torch.tensor([[448.0, -1.0]], device="quartz"))
    >>> torch_quartz.ops.dequantize_fp8(codes, scale, torch.float32).tolist()
    [[448.0, -1.0]]
    """
    return torch.ops.quartz.quantize_fp8(w, granularity, block)


def dequantize_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16, block: int = 128) -> Tensor:
    """Return ``code * scale``, rounded once to `dtype`.

    Parameters
    ----------
    codes : Tensor
        float8_e4m3fn.
    scales : Tensor
        float32; what one covers is read from its shape: one number, ``(..., 1)``, ``(..., ceil(K / block))`` or
        ``(ceil(N / block), ceil(K / block))``.
    dtype : torch.dtype
        float32, float16 or bfloat16.
    block : int
        As in `quantize_fp8`.

    Examples
    --------
    >>> codes = torch.tensor([[1.0, 2.0]], device="quartz").to(torch.float8_e4m3fn)
    >>> torch_quartz.ops.dequantize_fp8(codes, torch.tensor(0.5, device="quartz"), torch.float32).tolist()
    [[0.5, 1.0]]
    """
    return torch.ops.quartz.dequantize_fp8(codes, scales, dtype, block)


def quantize_nvfp4(w: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise rows to NVFP4: two e2m1 codes a byte, an e4m3 scale for 16 elements, a float32 scale for all.

    ``scale = e4m3(max|w| / 6 / global)`` (0 for zeros, at least 2^-9 otherwise), ``code = e2m1(w / (scale * global))``.

    Parameters
    ----------
    w : Tensor
        ``(..., K)``; float32, float16 or bfloat16. A last group of less than 16 elements has a scale of its own.
    global_scale : Tensor or None
        One float32 number; None takes ``max|w| / 2688``, 1 for zeros. modelopt stores this number, compressed-tensors
        its inverse.

    Returns
    -------
    tuple of Tensor
        Packed codes, uint8 ``(..., ceil(K / 2))`` with the first element in the low half; scales, float8_e4m3fn
        ``(..., ceil(K / 16))``; the global scale.

    Examples
    --------
    >>> packed, scales, total = torch_quartz.ops.quantize_nvfp4(torch.tensor([[2688.0, 448.0]], device="quartz"))
    >>> torch_quartz.ops.dequantize_nvfp4(packed, scales, total, 2, torch.float32).tolist()
    [[2688.0, 448.0]]
    """
    return torch.ops.quartz.quantize_nvfp4(w, global_scale)


def dequantize_nvfp4(
    packed: Tensor, scales: Tensor, global_scale: Tensor | None, columns: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return ``(code * scale) * global``, rounded once; without `global_scale` exact in bfloat16.

    Parameters
    ----------
    packed, scales, global_scale : Tensor
        As `quantize_nvfp4` returns them; scales may be given as bytes.
    columns : int
        Elements of a row.
    dtype : torch.dtype
        float32, float16 or bfloat16.

    Examples
    --------
    >>> packed, scales, total = torch_quartz.ops.quantize_nvfp4(torch.zeros(1, 16, device="quartz"))
    >>> torch_quartz.ops.dequantize_nvfp4(packed, scales, total, 16).sum().item()
    0.0
    """
    return torch.ops.quartz.dequantize_nvfp4(packed, scales, global_scale, columns, dtype)


def quantize_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to MXFP4: two e2m1 codes a byte, a power of two for 32 elements.

    Parameters
    ----------
    w : Tensor
        ``(..., K)``; float32, float16 or bfloat16.

    Returns
    -------
    tuple of Tensor
        Packed codes, uint8 ``(..., ceil(K / 2))``, and scales, float8_e8m0fnu ``(..., ceil(K / 32))``:
        ``2**(floor(log2(max|w|)) - 2)``.

    Examples
    --------
    >>> packed, scales = torch_quartz.ops.quantize_mxfp4(torch.tensor([[6.0, -0.5]], device="quartz"))
    >>> torch_quartz.ops.dequantize_mxfp4(packed, scales, 2, torch.float32).tolist()
    [[6.0, -0.5]]
    """
    return torch.ops.quartz.quantize_mxfp4(w)


def dequantize_mxfp4(packed: Tensor, scales: Tensor, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return ``code * scale``, exact in bfloat16 (a scale byte of 255 gives NaN).

    Parameters
    ----------
    packed, scales : Tensor
        As `quantize_mxfp4` returns them; scales may be given as bytes (gpt-oss).
    columns : int
        Elements of a row.
    dtype : torch.dtype
        float32, float16 or bfloat16.

    Examples
    --------
    >>> packed = torch.tensor([[0x21]], dtype=torch.uint8, device="quartz")
    >>> scale = torch.tensor([[128]], dtype=torch.uint8, device="quartz")
    >>> torch_quartz.ops.dequantize_mxfp4(packed, scale, 2, torch.float32).tolist()
    [[1.0, 2.0]]
    """
    return torch.ops.quartz.dequantize_mxfp4(packed, scales, columns, dtype)


def _last(like: Tensor, size: int) -> tuple[int, ...]:
    return (*like.shape[:-1], size)


@torch.library.register_fake("quartz::quantize_fp8")
def _(w, granularity="tensor", block=128):
    groups = -(-w.shape[-1] // block)
    shapes = {"tensor": (), "row": _last(w, 1), "group": _last(w, groups)}
    if granularity == "block":
        shapes["block"] = (*w.shape[:-2], -(-w.shape[-2] // block), groups)
    return (
        torch.empty_like(w, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format),
        w.new_empty(shapes[granularity], dtype=torch.float32),
    )


@torch.library.register_fake("quartz::dequantize_fp8")
def _(codes, scales, dtype, block=128):
    return torch.empty_like(codes, dtype=dtype, memory_format=torch.contiguous_format)


@torch.library.register_fake("quartz::quantize_nvfp4")
def _(w, global_scale=None):
    return (
        w.new_empty(_last(w, -(-w.shape[-1] // 2)), dtype=torch.uint8),
        w.new_empty(_last(w, -(-w.shape[-1] // 16)), dtype=torch.float8_e4m3fn),
        w.new_empty((), dtype=torch.float32) if global_scale is None else torch.empty_like(global_scale),
    )


@torch.library.register_fake("quartz::quantize_mxfp4")
def _(w):
    return (
        w.new_empty(_last(w, -(-w.shape[-1] // 2)), dtype=torch.uint8),
        w.new_empty(_last(w, -(-w.shape[-1] // 32)), dtype=torch.float8_e8m0fnu),
    )


@torch.library.register_fake("quartz::dequantize_nvfp4")
def _(packed, scales, global_scale, columns, dtype):
    return packed.new_empty(_last(packed, columns), dtype=dtype)


@torch.library.register_fake("quartz::dequantize_mxfp4")
def _(packed, scales, columns, dtype):
    return packed.new_empty(_last(packed, columns), dtype=dtype)
