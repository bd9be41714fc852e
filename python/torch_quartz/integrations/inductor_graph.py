"""Move a graph that AOTAutograd traced with quartz tensors to the native device, for `inductor`.

The graph, its fake inputs and its constants get the native device in place of quartz; nothing else changes. Operators
that must run on quartz (an author's quartz kernel, or no native kernel at all) are replaced by bridges
(`inductor_bridge`).
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from torch_quartz.device import native_device
from torch_quartz.integrations import inductor_bridge


class Unsupported(Exception):
    """The graph holds something that cannot be moved; the text says what."""


@dataclass(frozen=True)
class NativeGraph:
    """A graph on the native device.

    Attributes
    ----------
    module : torch.fx.GraphModule
        The graph; the one it was made from is unchanged.
    inputs : list
        Its example inputs.
    output_devices : list of int or None
        For each output the index of its quartz device, None where the output was not on quartz.
    random_devices : list of int
        The quartz devices whose native generator the graph draws from.
    """

    module: torch.fx.GraphModule
    inputs: list
    output_devices: list[int | None]
    random_devices: list[int]


def is_quartz(value) -> bool:
    """True for a quartz tensor or device."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "quartz"
    return isinstance(value, torch.device) and value.type == "quartz"


def uses_quartz(module, inputs: Sequence) -> bool:
    """True if an input, a constant, a traced value or a device argument of the graph is on quartz.

    Parameters
    ----------
    module : torch.fx.GraphModule or callable
        What is to be compiled; of a callable that is no graph only the inputs count.
    inputs : sequence
        Its example inputs.
    """
    if any(map(is_quartz, inputs)):
        return True
    if not isinstance(module, torch.fx.GraphModule):
        return False
    for graph_module in _graph_modules(module):
        if any(map(is_quartz, _constants(graph_module).values())):
            return True
        for node in graph_module.graph.nodes:
            if any(map(is_quartz, (*_values(node), *_leaves((node.args, node.kwargs))))):
                return True
    return False


def to_native(module: torch.fx.GraphModule, inputs: Sequence) -> NativeGraph:
    """Make the native graph of a quartz graph.

    Parameters
    ----------
    module : torch.fx.GraphModule
        A graph of ATen operators, after AOTAutograd.
    inputs : sequence
        Its example inputs: fake or real tensors, symbolic or plain numbers.

    Raises
    ------
    Unsupported
        If something in it cannot be moved.
    """
    mode = _fake_mode(module, inputs)
    with _tracing(mode):
        native_inputs = [_native_example(value, mode) for value in inputs]
        native = _copy(module)
        for graph_module in _graph_modules(native):
            _move(graph_module, mode)
        _Propagation(native, mode=mode).propagate_dont_convert_inputs(*native_inputs)
    native.recompile()
    return NativeGraph(native, native_inputs, _output_devices(module), _random_devices(module, inputs))


class _Propagation(FakeTensorProp):
    # Traces values through the graph, but leaves the storages of its inputs as they are: Inductor looks at them next.
    def run_node(self, n):
        if n.op == "call_function" and n.target in _CHANGE_STORAGE:
            (tensor, *_), _ = self.fetch_args_kwargs_from_env(n)
            return tensor
        return super().run_node(n)


_CHANGE_STORAGE = {torch.ops.inductor.resize_storage_bytes_.default, torch.ops.aten.set_.source_Tensor}


def _move(module: torch.fx.GraphModule, mode) -> None:
    # Constants, device arguments and operators of one graph, and the traced values of a subgraph (those of the
    # whole graph are traced anew at the end).
    for name, value in _constants(module).items():
        if is_quartz(value):
            module._parameters.pop(name, None)
            module._buffers.pop(name, None)
            setattr(module, name, _native_example(value, mode))
    for node in module.graph.nodes:
        index = _device_of(node)
        replace = _replacer(index)
        node.args, node.kwargs = map_aggregate(node.args, replace), map_aggregate(node.kwargs, replace)
        if node.op == "call_function":
            node.target = replace(node.target)
        if node.op == "placeholder" and "val" in node.meta:
            node.meta["val"] = map_aggregate(node.meta["val"], lambda value: _native_example(value, mode))
    placeholders = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    if placeholders and not any(value is None for value in placeholders) and module.meta.get("quartz_subgraph"):
        _Propagation(module, mode=mode).propagate_dont_convert_inputs(*placeholders)
    module.recompile()


def _replacer(index: int) -> Callable:
    def replace(value):
        if is_quartz(value):
            return native_device(value.index)
        if isinstance(value, torch._ops.OpOverload):
            return inductor_bridge.native_operator(value, index)
        if isinstance(value, torch.Generator) and value.device.type == "quartz":
            raise Unsupported("a random generator is part of the graph")
        return value

    return replace


def _copy(module: torch.fx.GraphModule, subgraph: bool = False) -> torch.fx.GraphModule:
    # Copies the graphs, shares everything else; the node names stay.
    result = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    result.meta.update(module.meta)
    result.meta["quartz_subgraph"] = subgraph
    for name, child in module.named_children():
        if isinstance(child, torch.fx.GraphModule):
            setattr(result, name, _copy(child, subgraph=True))
    return result


def _native_example(value, mode):
    # The same value on the native device: a fake one for a fake tensor, the alias of a real one.
    if not is_quartz(value):
        return value
    if value.layout != torch.strided:
        raise Unsupported(f"a tensor of layout {value.layout}")
    if not isinstance(value, torch._subclasses.FakeTensor):
        from torch_quartz import _C

        return _C.native_alias(value)
    options = {"dtype": value.dtype, "device": native_device(value.device.index)}
    size, stride, offset = value.size(), value.stride(), value.storage_offset()
    with mode:
        if isinstance(offset, int) and offset == 0:
            result = torch.empty_strided(size, stride, **options)
        else:  # Inductor decides by the offset whether the address is aligned
            count = value.untyped_storage().nbytes() // value.element_size()
            result = torch.empty(count, **options).as_strided(size, stride, offset)
        result = torch._conj(result) if value.is_conj() else result
        return torch._neg_view(result) if value.is_neg() else result


@contextlib.contextmanager
def _tracing(mode) -> Iterator[None]:
    # Constants are real tensors beside fake ones; an autocast of the caller has done its work already.
    with (
        mock.patch.object(mode, "allow_non_fake_inputs", True),
        torch._dispatch.python.enable_python_dispatcher(),
        torch._C._DisableAutocast(),
        torch.no_grad(),
    ):
        yield


def _fake_mode(module: torch.fx.GraphModule, inputs: Sequence):
    values = [value for node in module.graph.nodes for value in _values(node)]
    mode = torch._guards.detect_fake_mode(inputs) or torch._guards.detect_fake_mode(values)
    return mode or torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)


def _graph_modules(module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    # Inner graphs (of cond, while_loop, flex_attention, ...) first.
    found = [child for child in module.modules() if isinstance(child, torch.fx.GraphModule)]
    return found[::-1]


def _constants(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    # Tensors that the module itself holds, whichever way.
    named = {**module._parameters, **module._buffers, **vars(module)}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def _values(node: torch.fx.Node) -> list:
    # What the node gave when it was traced.
    return _leaves(node.meta.get("val", node.meta.get("example_value")))


def _leaves(value) -> list:
    leaves: list = []
    map_aggregate(value, leaves.append)
    return leaves


def _device_of(node: torch.fx.Node) -> int:
    # The quartz device a node works on: of its result, else of its first argument there.
    for value in (*_values(node), *_leaves((node.args, node.kwargs))):
        for candidate in _values(value) if isinstance(value, torch.fx.Node) else (value,):
            if is_quartz(candidate):
                device = candidate.device if isinstance(candidate, torch.Tensor) else candidate
                return _index(device)
    return torch.quartz.current_device()


def _index(device: torch.device) -> int:
    return torch.quartz.current_device() if device.index is None else device.index


def _output_devices(module: torch.fx.GraphModule) -> list[int | None]:
    (output,) = module.graph.find_nodes(op="output")
    devices: list[int | None] = []
    for value in output.args[0]:
        tensors = [leaf for leaf in _values(value) if is_quartz(leaf)] if isinstance(value, torch.fx.Node) else []
        devices.append(_index(tensors[0].device) if tensors else None)
    return devices


def _random_devices(module: torch.fx.GraphModule, inputs: Sequence) -> list[int]:
    devices = set()
    for graph_module in _graph_modules(module):
        for node in graph_module.graph.nodes:
            operators = [leaf for leaf in _leaves((node.target, node.args)) if isinstance(leaf, torch._ops.OpOverload)]
            drawn = [op for op in operators if torch.Tag.nondeterministic_seeded in op.tags]
            if any(not inductor_bridge.needs_bridge(operator) for operator in drawn):
                devices.add(_device_of(node))
    return sorted(devices)
