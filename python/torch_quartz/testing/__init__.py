"""What tests and benchmarks share: comparison of bits, dtypes of the kernels, garbage around a tensor."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of a floating tensor as integers on the CPU, so that NaN equals NaN and 0 differs from -0.

    Parameters
    ----------
    tensor : Tensor
        float32, float16 or bfloat16.

    Returns
    -------
    Tensor
        int32 or int16, the same shape.

    Examples
    --------
    >>> bits(torch.tensor([1.0, -0.0])).tolist()
    [1065353216, -2147483648]
    """
    integer = torch.int32 if tensor.element_size() == 4 else torch.int16
    return tensor.detach().cpu().contiguous().view(integer)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape have the same bits.

    Parameters
    ----------
    first, second : Tensor
        On any device.

    Returns
    -------
    bool
        False also if dtype or shape differ.

    Examples
    --------
    >>> same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    True
    """
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if not first.is_floating_point():
        return torch.equal(first.cpu(), second.cpu())
    return torch.equal(bits(first), bits(second))


def surrounded(tensor: Tensor, fill: float = float("nan"), margin: int = 3) -> Tensor:
    """Return the same values as a view into a larger tensor that is filled with `fill`.

    Parameters
    ----------
    tensor : Tensor
        At least one dimension. The last dimension stays contiguous.
    fill : float
        What lies around it.
    margin : int
        Elements or rows before and behind, in every dimension.

    Returns
    -------
    Tensor
        A view with a storage offset.

    Examples
    --------
    >>> surrounded(torch.ones(2, 3)).shape, surrounded(torch.ones(2, 3)).stride()
    (torch.Size([2, 3]), (9, 1))
    """
    larger = torch.full([size + 2 * margin for size in tensor.shape], fill, dtype=tensor.dtype, device=tensor.device)
    view = larger[tuple(slice(margin, margin + size) for size in tensor.shape)]
    return view.copy_(tensor)
