"""Operators that stay on quartz inside a graph that Inductor compiled for the native device.

A graph for the native device (`inductor_graph`) cannot call an operator that has a quartz kernel of its own, or none
for the native device. Such an operator is replaced by a bridge of the same schema: its kernel adopts the native
tensors it is given, without a copy, calls the operator on quartz, and hands out native aliases of the results. To
Inductor it is one more custom operator. """

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
# Operators of PyTorch and of this project: there a quartz kernel computes what the native kernel computes.
_OWN_NAMESPACES = {"aten", "prims", "quartz"}

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
    return _bridge(operator, index) if _needs_bridge(operator) else operator


def _needs_bridge(operator: torch._ops.OpOverload) -> bool:
    if operator.namespace == "quartz_bridge":
        return False
    name = operator.name()
    if name in _RAISING:
        return True
    native_key = torch._C._dispatch_key_for_device(native_device(0).type)
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

    def on_quartz(*args, **kwargs):
        from torch_quartz import _C

        native = native_device(index).type

        def adopt(value):
            if isinstance(value, torch.Tensor) and value.device.type == native:
                return _C.adopt(value) if native == "cuda" else _C.adopt(value, index)
            return torch.device("quartz", index) if isinstance(value, torch.device) and value.type == native else value

        def alias(value):
            return _C.native_alias(value) if isinstance(value, torch.Tensor) and value.device.type == "quartz" else value

        return tree_map(alias, operator(*tree_map(adopt, args), **tree_map(adopt, kwargs)))

    schema = str(operator._schema)
    _library.define(name + schema[schema.index("(") :], tags=operator.tags)
    _library.impl(name, on_quartz, torch._C._dispatch_key_for_device(native_device(0).type))
    torch.library.register_fake(f"quartz_bridge::{name}", operator, lib=_library)
    _bridges[name] = getattr(torch.ops.quartz_bridge, name).default
    return _bridges[name]
