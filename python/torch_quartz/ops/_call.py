"""Calls of operators whose gradients are written in Python, without the way through Python where none is needed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_transforms = torch._C._functorch.peek_interpreter_stack  # None outside of torch.func's transforms


def _is_recorded(arguments: tuple) -> bool:
    """Return whether anything but the plain result may be wanted of a call: gradients, tangents, a trace."""
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
        return True
    return forward_ad._current_level >= 0 or _transforms() is not None or torch.compiler.is_compiling()


def refuse_gradients(name: str, *tensors: Tensor | None) -> None:
    """Raise if a call of an operator without a gradient would have to record one.

    Parameters
    ----------
    name : str
        The operator.
    *tensors : Tensor or None
        Its arguments.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(
            f"quartz::{name}: has no gradient, got an argument that requires one; call it within torch.no_grad(), or "
            "detach the argument"
        )


def direct(op: Callable) -> Callable:
    """Return a function that calls an operator below autograd where nothing is recorded.

    A gradient that `torch.library.register_autograd` has registered costs several microseconds a call, also where no
    argument requires one; that is more than a small kernel takes.

    Parameters
    ----------
    op : torch._ops.OpOverload
        The operator.

    Returns
    -------
    callable
        Takes the operator's arguments.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        if _is_recorded(arguments):
            return op(*arguments, **options)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments, **options)

    return call
