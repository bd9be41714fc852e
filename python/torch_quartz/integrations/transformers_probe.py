"""Transformers: how the replaced parts of models find out what an original computes, by trying it on a few numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def quietly(call: Callable[[], Any]) -> Any:
    """Return what a probe returns, without gradients; None if it fails."""
    state = torch.get_rng_state()
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return call()
    except Exception:  # whatever a module does that is not of the known form
        return None
    finally:
        torch.set_rng_state(state)


def close(result: Any, expected: Tensor) -> bool:
    """Return whether a probe's result is the expected one, up to the last bits of float32 or one ulp of bfloat16."""
    if not isinstance(result, Tensor) or result.dtype != expected.dtype or result.shape != expected.shape:
        return False
    tolerance = 2e-6 if expected.dtype == torch.float32 else 2.0**-7
    return torch.allclose(result.float(), expected.float(), rtol=tolerance, atol=tolerance * 1e-2)


def noise(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale


def stand_in(module: nn.Module, parameters: dict[str, Tensor], children: dict[str, nn.Module]) -> nn.Module:
    """Return an object of the module's class with its plain attributes, and other parameters and children."""
    other = object.__new__(type(module))
    nn.Module.__init__(other)
    own = set(vars(other))
    for name, value in vars(module).items():
        if name not in own:
            other.__dict__[name] = value
    other.training = module.training
    for name, value in parameters.items():
        other.register_parameter(name, nn.Parameter(value, requires_grad=False))
    for name, child in children.items():
        other.add_module(name, child)
    return other


class Forms:
    """What was found out about modules, by their identity; forgotten with them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, Any, Any]] = {}

    def get(self, module: nn.Module, state: Any, find: Callable[[nn.Module], Any]) -> Any:
        """Return what is known of a module in a state, by default what `find` finds."""
        key = id(module)
        known = self._known.get(key)
        if known is not None and known[0]() is module and known[1] == state:
            return known[2]
        form = find(module)
        self._known[key] = weakref.ref(module, lambda _: self._known.pop(key, None)), state, form
        return form

    def values(self) -> list:
        """Return the forms of all modules, None for those that stay."""
        return [form for _, _, form in self._known.values()]


def key_of(module: nn.Module) -> tuple:
    """Return what modules of one form have in common: the class, the plain attributes, the names of their parts."""
    plain = tuple(v for k, v in vars(module).items() if k[0] != "_" and isinstance(v, bool | int | float | str))
    act = getattr(module, "act_fn", None)
    return type(module), plain, tuple(module._parameters), tuple(module._modules), type(act), str(act)


def remembered(find: Callable[[nn.Module, Callable], Any], original: Callable) -> Callable[[nn.Module], Any]:
    """Return `find` for one original, which tries the modules of one form only once."""
    found: dict[tuple, Any] = {}

    def once(module: nn.Module) -> Any:
        key = key_of(module)
        if key not in found:
            found[key] = find(module, original)
        return found[key]

    return once
