"""Initialisation and forks, under the names that PyTorch asks for.

On host there is nothing to initialise, and a forked child goes on using the device. On cuda CUDA's rules hold: a
process that has used the GPU or asked for it cannot use it in a forked child; start children with ``spawn`` or
``forkserver``. Importing torch_quartz alone is no use.
"""

import torch

from torch_quartz import _C


def init() -> None:
    """Create the CUDA context now instead of at the first use; nothing to do on host.

    Examples
    --------
    >>> torch.quartz.init()
    """
    _lazy_init()


def is_initialized() -> bool:
    """Return whether the device is ready for use; always on host.

    Examples
    --------
    >>> torch.quartz.init()
    >>> torch.quartz.is_initialized()
    True
    """
    return _C.is_initialized() and not _is_in_bad_fork()


def _lazy_init() -> None:
    """Initialise the device; PyTorch calls this before the first tensor is made, and again in a forked child."""
    if _C.substrate() != "cuda":
        return
    if _is_in_bad_fork():
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess: a quartz device on GPU memory does not survive a fork. To "
            "use quartz with multiprocessing, you must use the 'spawn' (or 'forkserver') start method"
        )
    torch.cuda.init()


def _is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that had started CUDA."""
    return _C.in_bad_fork()


def _is_compiled() -> bool:
    """Return True: the device is built wherever this module exists."""
    return True
