"""Automatic mixed precision: ``torch.amp`` with the device filled in."""

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]


class autocast(torch.amp.autocast):
    """Context manager and decorator that lets quartz operators choose their dtype, as ``torch.autocast("quartz")``.

    Parameters
    ----------
    enabled : bool
        False computes as without it.
    dtype : torch.dtype or None
        ``torch.bfloat16`` or ``torch.float16``; None is ``torch.get_autocast_dtype("quartz")``, at first float16 as for
        CUDA, on both substrates.
    cache_enabled : bool
        Whether casts of weights are kept until the context ends.

    Examples
    --------
    >>> layer = torch.nn.Linear(4, 4, device="quartz")
    >>> with torch.quartz.amp.autocast(dtype=torch.bfloat16):
    ...     layer(torch.ones(2, 4, device="quartz")).dtype
    torch.bfloat16
    """

    def __init__(self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True):
        super().__init__("quartz", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """Loss scaling for float16 training, as ``torch.amp.GradScaler("quartz")``.

    Parameters
    ----------
    init_scale, growth_factor, backoff_factor : float
        First scale, and the factors by which it grows and shrinks.
    growth_interval : int
        Steps without overflow after which the scale grows.
    enabled : bool
        False makes every method do nothing.

    Examples
    --------
    >>> scaler = torch.quartz.amp.GradScaler(init_scale=8.0)
    >>> scaler.scale(torch.ones((), device="quartz")).item()
    8.0
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ):
        super().__init__("quartz", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


def custom_fwd(fwd: Callable | None = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate ``forward`` of a ``torch.autograd.Function`` for autocast, as ``torch.amp.custom_fwd``.

    Parameters
    ----------
    fwd : callable or None
        The method; None makes a decorator with `cast_inputs` set.
    cast_inputs : torch.dtype or None
        Cast floating-point quartz arguments to this and run with autocast off.

    Examples
    --------
    >>> class Square(torch.autograd.Function):
    ...     @staticmethod
    ...     @torch.quartz.amp.custom_fwd(cast_inputs=torch.float32)
    ...     def forward(ctx, x):
    ...         ctx.save_for_backward(x)
    ...         return x * x
    ...     @staticmethod
    ...     @torch.quartz.amp.custom_bwd
    ...     def backward(ctx, grad):
    ...         return 2 * ctx.saved_tensors[0] * grad
    >>> with torch.autocast("quartz"):
    ...     Square.apply(torch.ones(2, dtype=torch.float16, device="quartz")).dtype
    torch.float32
    """
    if fwd is None:
        return functools.partial(custom_fwd, cast_inputs=cast_inputs)
    return torch.amp.custom_fwd(fwd, device_type="quartz", cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable) -> Any:
    """Decorate ``backward`` of a ``torch.autograd.Function`` whose ``forward`` has `custom_fwd`.

    Parameters
    ----------
    bwd : callable
        The method.

    Examples
    --------
    See `custom_fwd`:

    >>> torch.quartz.amp.custom_bwd(lambda ctx, grad: grad).__name__
    '<lambda>'
    """
    return torch.amp.custom_bwd(bwd, device_type="quartz")


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes autocast may choose on quartz; ``torch.autocast`` asks by this name.

    Examples
    --------
    >>> torch.quartz.get_amp_supported_dtype()
    [torch.bfloat16, torch.float16]
    """
    return [torch.bfloat16, torch.float16]
