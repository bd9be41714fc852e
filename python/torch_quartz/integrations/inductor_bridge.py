"""Operators that stay on quartz inside a graph that Inductor compiled for the native device.

A graph for the native device (`inductor_graph`) cannot call an operator that has a quartz kernel of its own, or none
for the native device. Such an operator is replaced by a bridge of the same schema: its kernel adopts the native
tensors it is given, without a copy, calls the operator on quartz, and hands out native aliases of the results. To
Inductor it is one more custom operator.
"""

import functools
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map

from torch_quartz.device import native_device

# Composite kernels that exist and only raise: PyTorch dispatches to them for out-of-tree devices alone.
_RAISING = {
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_fused_attention_overrideable_backward",
    "aten::convolution_overrideable",
    "aten::convolution_backward_overrideable",
}
# Results that PyTorch's meta functions promise in the layout of an argument, in the order of the results. The flash
# kernel behind the quartz kernels has layouts of its own where it pads the head size, which eager programs take as
# they are, while generated code reads what was promised.
_LAYOUT_OF = {
    "aten::_scaled_dot_product_fused_attention_overrideable": ("query",),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": ("query", "key", "value"),
}
# Operators whose quartz kernel takes dtypes that the CPU's refuses (csrc/aten/histogram.cpp).
_WIDER_THAN_CPU = {"aten::histc"}
# Operators of PyTorch and of this project: there a quartz kernel computes what the native kernel computes.
_OWN_NAMESPACES = {
    *("quartz", "aten", "prim", "prims", "rngprims", "debugprims", "inductor", "profiler", "streams"),
    *("quantized", "_quantized", "quantized_decomposed", "mkldnn", "onednn"),
    *("c10d", "_c10d_functional", "_dtensor", "fsdp"),
}

_library: torch.library.Library | None = None
_bridges: dict[str, torch._ops.OpOverload] = {}


def native_operator(operator: torch._ops.OpOverload, index: int) -> torch._ops.OpOverload:
    """Return the operator itself, or its bridge if it has to run on quartz.

    Parameters
    ----------
    operator : torch._ops.OpOverload
        An operator of the traced graph.
    index : int
        The quartz device it runs on.
    """
    return _bridge(operator, index) if needs_bridge(operator) else operator


def needs_bridge(operator: torch._ops.OpOverload) -> bool:
    """Return whether the operator has to run on quartz.

    Parameters
    ----------
    operator : torch._ops.OpOverload
        An operator of the traced graph.
    """
    from torch._inductor import config

    if operator.namespace == "quartz_bridge":
        return False
    name = operator.name()
    if name in _RAISING:
        return True
    # With `fallback_random` compiled code draws what eager code draws: the counter of quartz's generator.
    if config.fallback_random and operator.namespace == "aten" and torch.Tag.nondeterministic_seeded in operator.tags:
        return True
    native_key = torch._C._dispatch_key_for_device(native_device(0).type)
    if native_key == "CPU" and name in _WIDER_THAN_CPU:
        return True
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, native_key):
        return torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "PrivateUse1")
    if operator.namespace in _OWN_NAMESPACES:
        return False
    # Somebody else's: a quartz kernel of its own, or one kernel for all devices, which may look at the tensors'
    # device.
    explicit = torch._C._dispatch_has_kernel_for_dispatch_key
    return explicit(name, "PrivateUse1") or not explicit(name, native_key)


def _bridge(operator: torch._ops.OpOverload, index: int) -> torch._ops.OpOverload:
    # The name says all that the kernel depends on: Inductor's cache of compiled graphs knows operators by name.
    global _library
    name = f"{operator.namespace}__{operator._opname}__{operator._overloadname}__{index}"
    if name in _bridges:
        return _bridges[name]
    if _library is None:
        _library = torch.library.Library("quartz_bridge", "FRAGMENT")

    def run(*args, **kwargs):
        from torch_quartz import _C

        adopt = functools.partial(_C.adopt, device_index=-1 if native_device(index).type == "cuda" else index)
        return as_promised(operator, _on_quartz(operator, index, adopt, _C.native_alias, args, kwargs), args, kwargs)

    def trace(*args, **kwargs):
        move = functools.partial(_fake_on, torch.device("quartz", index))
        return _on_quartz(operator, index, move, functools.partial(_fake_on, native_device(index)), args, kwargs)

    schema = str(operator._schema)
    _library.define(name + schema[schema.index("(") :], tags=operator.tags)
    takes_tensors = any("Tensor" in str(argument.type) for argument in operator._schema.arguments)
    native_key = torch._C._dispatch_key_for_device(native_device(0).type)
    _library.impl(name, run, native_key if takes_tensors else "CompositeExplicitAutograd")
    torch.library.register_fake(f"quartz_bridge::{name}", trace, lib=_library)
    _bridges[name] = getattr(torch.ops.quartz_bridge, name).default
    return _bridges[name]


def as_promised(operator: torch._ops.OpOverload, results, args: tuple, kwargs: dict):
    """Return the results of an operator in the layouts that its meta function promises; copies those that differ.

    Parameters
    ----------
    operator : torch._ops.OpOverload
        The operator.
    results : Any
        What its kernel gave.
    args, kwargs
        What it was called with.
    """
    names = _LAYOUT_OF.get(operator.name())
    if names is None:
        return results
    given = {**{argument.name: value for argument, value in zip(operator._schema.arguments, args)}, **kwargs}  # noqa: B905
    promised = [_in_layout_of(given[name], result) for name, result in zip(names, results)]  # noqa: B905
    return (*promised, *results[len(promised) :])


def _in_layout_of(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    # Strides as of empty_like(like); with another last size, dense in the order of like's dimensions.
    if tensor.shape == like.shape:
        strides = torch.empty_like(like, device="meta").stride()
    else:
        order = sorted(range(like.dim()), key=like.stride().__getitem__, reverse=True)
        dense = torch.empty([tensor.shape[i] for i in order], device="meta").stride()
        strides = tuple(dense[order.index(i)] for i in range(like.dim()))
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _on_quartz(operator: torch._ops.OpOverload, index: int, adopt: Callable, alias: Callable, args, kwargs):
    # Calls the operator with what `adopt` makes of native tensors, and gives what `alias` makes of quartz ones. A
    # tensor that comes back from the operator comes back from here.
    native = native_device(index).type
    adopted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def enter(value):
        if isinstance(value, torch.Tensor) and value.device.type == native:
            tensor = adopt(value)
            adopted[id(tensor)] = (tensor, value)
            return tensor
        if isinstance(value, torch.device) and value.type == native:
            return torch.device("quartz", index)
        return value

    def leave(value):
        if id(value) in adopted:
            return adopted[id(value)][1]
        quartz = isinstance(value, torch.Tensor) and value.device.type == "quartz"
        return alias(value) if quartz else value

    return tree_map(leave, operator(*tree_map(enter, args), **tree_map(enter, kwargs)))


def _fake_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
