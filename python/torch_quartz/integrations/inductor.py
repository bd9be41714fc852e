"""``torch.compile`` with Inductor on quartz tensors: Inductor never sees quartz.

Dynamo and AOTAutograd work with quartz as they are. Each graph they hand to Inductor is moved to the native device
(`inductor_graph`), compiled by PyTorch's own Inductor, and run on zero-copy aliases of the quartz tensors
(``_C.call_on_aliases``). So the code that runs is the code PyTorch has for the CPU or for CUDA.

Why PyTorch's hooks do not do:

- ``register_backend_for_device("quartz", ...)``: Inductor tests device names in many places (``"cpu"``, ``"cuda"``,
  ``GPU_TYPES``), and a scheduling class for another name fails at them; Triton's driver knows no such device either.
- a Dynamo backend of our own (``register_backend``): the user would have to name it, in place of the default.
- ``config.post_grad_custom_*_pass``: a pass sees one graph, but neither its example inputs nor the call at run time.

So `install` wraps ``torch._inductor.compile_fx.compile_fx``, when that module is first imported, to pass an
``inner_compile`` of ours. A graph without quartz goes to the original untouched.

Limits: AOTAutograd's cache is off for quartz graphs (its entries would call the native code with quartz tensors;
Inductor's own cache of compiled graphs is on), and ahead-of-time packages
(``torch._inductor.aoti_compile_and_package``) are refused. Where Inductor cannot serve (no C++ compiler, an operator
it does not know), the graph runs uncompiled on quartz, with one warning for each cause.
"""

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from torch_quartz.integrations.replacements import Replacements

PATCHES = [
    {
        "target": "torch._inductor.compile_fx.compile_fx (when first imported)",
        "reason": "Inductor generates code for device names it knows; quartz graphs are compiled for the native device",
    }
]

_changes = Replacements()
_warned: set[str] = set()
_generators_lock = threading.RLock()


def install() -> None:
    """Wrap ``compile_fx``, now if Inductor is imported, else when it is."""
    _changes.when_imported("torch._inductor.compile_fx", _patch)


def undo() -> None:
    """Put PyTorch's ``compile_fx`` back."""
    _changes.undo()


def _patch(module: ModuleType) -> None:
    _changes.attribute(module, "compile_fx", functools.partial(_moving_to_native, module))


def _moving_to_native(module: ModuleType, original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile_fx(*args, **kwargs):
        from torch_quartz.integrations.inductor_graph import uses_quartz

        bound = signature.bind(*args, **kwargs)
        arguments = bound.arguments
        inner = arguments.get("inner_compile", module.compile_fx_inner)
        if getattr(inner, "_quartz", False) or not uses_quartz(arguments["model_"], arguments["example_inputs_"]):
            return original(*args, **kwargs)
        if torch._inductor.virtualized.V.aot_compilation:
            raise RuntimeError(
                "AOTInductor cannot package a program of quartz tensors: export the model on "
                f"'{torch.quartz.native_device(0).type}' instead"
            )
        arguments["inner_compile"] = _native_compiler(inner)
        with _without_autograd_cache():
            return original(*bound.args, **bound.kwargs)

    return compile_fx


def _native_compiler(inner: Callable) -> Callable:
    # The inner_compile that moves quartz graphs to the native device and leaves others alone.
    @functools.wraps(inner)
    def native_compile(gm, example_inputs, **options):
        from torch_quartz.integrations import inductor_graph

        if not inductor_graph.uses_quartz(gm, example_inputs):
            return inner(gm, example_inputs, **options)
        try:
            graph = inductor_graph.to_native(gm, example_inputs)
            if len(graph.random_devices) > 1:
                raise inductor_graph.Unsupported("random numbers of several quartz devices in one graph")
            return _runner(inner(graph.module, graph.inputs, **options), graph)
        except _control_flow():
            raise
        except Exception as error:
            run = _uncompiled(gm)
            if run is None:
                raise
            _warn_once(error)
            return run

    native_compile._quartz = True
    return native_compile


def _runner(compiled: Callable, graph) -> Callable:
    # The compiled function as AOTAutograd calls it: a list of quartz tensors in, a list out.
    from torch_quartz import _C

    compiled = compiled if getattr(compiled, "_boxed_call", True) else _boxed(compiled)
    devices = graph.output_devices
    random_device = graph.random_devices[0] if graph.random_devices and _C.substrate() == "host" else None

    def run(args: list) -> list:
        if random_device is None:
            return _C.call_on_aliases(compiled, args, devices)
        with _native_generator_follows(random_device):
            return _C.call_on_aliases(compiled, args, devices)

    run._boxed_call = True
    return run


@contextlib.contextmanager
def _native_generator_follows(index: int) -> Iterator[None]:
    # Host: code for the CPU draws from the CPU's default generator, quartz has a native one of its own. For the call
    # they change places. (On cuda both names mean the same generator.)
    from torch_quartz import _C

    quartz, native = _C.native_generator(index), torch.default_generator
    with _generators_lock:
        saved = native.get_state()
        native.set_state(quartz.get_state())
        try:
            yield
        finally:
            quartz.set_state(native.get_state())
            native.set_state(saved)


def _uncompiled(gm: torch.fx.GraphModule) -> Callable | None:
    # The graph as traced, run operator by operator on quartz; None if Inductor's own operators in it have no such
    # meaning.
    from torch._inductor import inductor_prims

    replacements = {
        inductor_prims.random: _seeded_random,
        inductor_prims.randint: _seeded_randint,
    }
    plain = {inductor_prims.seed, inductor_prims.seeds, inductor_prims.lookup_seed}
    for node in gm.graph.nodes:
        if getattr(node.target, "namespace", None) != "prims" or not node.target.name().startswith("prims::inductor_"):
            continue
        if node.target in replacements:
            node.target = replacements[node.target]
        elif node.target not in plain:
            return None
    gm.recompile()
    return _boxed(gm)


def _boxed(function: Callable) -> Callable:
    def run(args: list):
        inputs = list(args)
        args.clear()
        return function(*inputs)

    run._boxed_call = True
    return run


def _seeded_random(size, seed, mode: str, *, align_dtype=None) -> torch.Tensor:
    generator = torch.Generator(seed.device).manual_seed(int(seed))
    draw = {"rand": torch.rand, "randn": torch.randn}[mode]
    return draw(size, generator=generator, device=seed.device, dtype=torch.float32)


def _seeded_randint(low, high, size, seed) -> torch.Tensor:
    generator = torch.Generator(seed.device).manual_seed(int(seed))
    return torch.randint(low, high, size, generator=generator, device=seed.device)


def _control_flow() -> tuple[type[BaseException], ...]:
    # Exceptions by which Dynamo steers itself; everything else means that this graph cannot be compiled.
    from torch._dynamo import exc

    return exc.SkipFrame, exc.RestartAnalysis


def _without_autograd_cache():
    from torch._functorch import config

    names = ("enable_autograd_cache", "enable_remote_autograd_cache", "bundled_autograd_cache")
    return config.patch({name: False for name in names if hasattr(config, name)})


def _warn_once(error: Exception) -> None:
    # The first line says what, e.g. "LoweringException: ...".
    cause = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    if cause not in _warned:
        _warned.add(cause)
        warnings.warn(
            "torch.compile: Inductor cannot compile a graph of quartz tensors, which runs uncompiled instead "
            f"({cause})",
            RuntimeWarning,
            stacklevel=2,
        )
