"""Random numbers from a seed and an offset, the same on host and CUDA. Page: docs/ops/random_fill.md."""

import torch
from torch import Tensor


def uniform_(x: Tensor, seed: int, offset: int = 0, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Fill a tensor with uniform numbers in ``[low, high)``.

    Element ``i``, in row-major order, is a function of seed, offset and ``i``: the same bits on host and CUDA, whatever
    the strides. ``n`` elements use up ``ceil(n / 4)`` offsets (float64: ``ceil(n / 2)``); the next call that shall not
    repeat them starts there.

    Parameters
    ----------
    x : Tensor
        float32, float16, bfloat16 or float64.
    seed : int
        64 bits.
    offset : int
        At least 0.
    low, high : float
        The bounds.

    Returns
    -------
    Tensor
        `x`.

    Raises
    ------
    RuntimeError
        Another dtype, numbers out of range.

    Examples
    --------
    >>> x = torch_quartz.ops.uniform_(torch.empty(1000, device="quartz"), seed=1)
    >>> bool((x >= 0).all() and (x < 1).all())
    True
    """
    torch.ops.quartz.random_fill_(x, "uniform", seed, offset, low, high)
    return x


def normal_(x: Tensor, seed: int, offset: int = 0, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Fill a tensor with normal numbers. Seed and offset as for `uniform_`.

    Parameters
    ----------
    x : Tensor
        float32, float16, bfloat16 or float64.
    seed, offset : int
        As for `uniform_`.
    mean, std : float
        Mean and standard deviation.

    Returns
    -------
    Tensor
        `x`.

    Raises
    ------
    RuntimeError
        Another dtype, numbers out of range.

    Examples
    --------
    >>> x = torch_quartz.ops.normal_(torch.empty(10000, device="quartz"), seed=1)
    >>> abs(x.mean().item()) < 0.05
    True
    """
    torch.ops.quartz.random_fill_(x, "normal", seed, offset, mean, std)
    return x


def exponential_(x: Tensor, seed: int, offset: int = 0, rate: float = 1.0) -> Tensor:
    """Fill a tensor with exponential numbers, never 0 in float32. Seed and offset as for `uniform_`.

    Parameters
    ----------
    x : Tensor
        float32, float16, bfloat16 or float64.
    seed, offset : int
        As for `uniform_`.
    rate : float
        One over the mean.

    Returns
    -------
    Tensor
        `x`.

    Raises
    ------
    RuntimeError
        Another dtype, numbers out of range.

    Examples
    --------
    >>> x = torch_quartz.ops.exponential_(torch.empty(1000, device="quartz"), seed=1)
    >>> bool((x > 0).all())
    True
    """
    torch.ops.quartz.random_fill_(x, "exponential", seed, offset, rate, 0.0)
    return x


def bernoulli_(x: Tensor, p: float, seed: int, offset: int = 0) -> Tensor:
    """Fill a tensor with 1 at probability `p` and 0 otherwise. Seed and offset as for `uniform_`.

    Parameters
    ----------
    x : Tensor
        float32, float16, bfloat16 or float64.
    p : float
        From 0 to 1.
    seed, offset : int
        As for `uniform_`.

    Returns
    -------
    Tensor
        `x`.

    Raises
    ------
    RuntimeError
        Another dtype, numbers out of range.

    Examples
    --------
    >>> torch_quartz.ops.bernoulli_(torch.empty(4, device="quartz"), 1.0, seed=1).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    torch.ops.quartz.random_fill_(x, "bernoulli", seed, offset, p, 0.0)
    return x


@torch.library.register_fake("quartz::random_fill_")
def _(x, distribution, seed, offset, first, second):
    return None
