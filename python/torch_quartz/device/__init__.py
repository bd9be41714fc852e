# ruff: noqa: F401 (names re-exported, some private because PyTorch asks for them by that name)
"""``torch.quartz``: what ``torch.cuda`` is for CUDA devices, one file a subject.

The names, arguments and meanings are those of ``torch.cuda``; docstrings say where a substrate differs. What
``torch.cuda`` has and this module has not is listed in ``docs/README.md``.
"""

from typing import Any

from torch_quartz import _C
from torch_quartz.device import (
    _utils,
    amp,
    devices,
    graphs,
    lifecycle,
    memory,
    monitor,
    native,
    nvtx,
    profiler,
    random,
    streams,
)
from torch_quartz.device.amp import get_amp_supported_dtype
from torch_quartz.device.devices import (
    DeviceProperties,
    _exchange_device,
    _maybe_exchange_device,
    can_device_access_peer,
    current_device,
    device,
    device_count,
    device_of,
    get_arch_list,
    get_device_capability,
    get_device_name,
    get_device_properties,
    is_available,
    is_bf16_supported,
    is_tf32_supported,
    set_device,
    synchronize,
)
from torch_quartz.device.graphs import (
    Graph,
    graph,
    graph_pool_handle,
    is_current_stream_capturing,
    make_graphed_callables,
)
from torch_quartz.device.lifecycle import _is_compiled, _is_in_bad_fork, _lazy_init, init, is_initialized
from torch_quartz.device.memory import (
    MemPool,
    OutOfMemoryError,
    empty_cache,
    get_per_process_memory_fraction,
    ipc_collect,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
    use_mem_pool,
)
from torch_quartz.device.monitor import (
    clock_rate,
    device_memory_used,
    get_sync_debug_mode,
    memory_usage,
    power_draw,
    set_sync_debug_mode,
    temperature,
    utilization,
)
from torch_quartz.device.native import adopt, from_dlpack, native_alias, native_device, substrate, substrate_reason
from torch_quartz.device.profiler import OpCount, op_counts, reset_op_counts
from torch_quartz.device.random import (
    _get_generator,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from torch_quartz.device.streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    get_stream_from_external,
    native_stream,
    set_stream,
    stream,
)

# Modules that `import torch.quartz.<name>` finds.
SUBMODULES = ("amp", "devices", "graphs", "memory", "monitor", "native", "nvtx", "profiler", "random", "streams")

__all__ = [
    "DeviceProperties",
    "Event",
    "Graph",
    "MemPool",
    "OpCount",
    "OutOfMemoryError",
    "Stream",
    "StreamContext",
    "adopt",
    "amp",
    "can_device_access_peer",
    "clock_rate",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_memory_used",
    "device_of",
    "empty_cache",
    "from_dlpack",
    "get_amp_supported_dtype",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "get_rng_state_all",
    "get_stream_from_external",
    "get_sync_debug_mode",
    "graph",
    "graph_pool_handle",
    "init",
    "initial_seed",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "is_tf32_supported",
    "make_graphed_callables",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "memory_usage",
    "native_alias",
    "native_device",
    "native_stream",
    "nvtx",
    "op_counts",
    "power_draw",
    "random",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_op_counts",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "set_sync_debug_mode",
    "stream",
    "substrate",
    "substrate_reason",
    "synchronize",
    "temperature",
    "use_mem_pool",
    "utilization",
]

# Names of torch.cuda that are called otherwise here.
_INSTEAD = {"CUDAGraph": "Graph", "ExternalStream": "get_stream_from_external"}


def __getattr__(name: str) -> Any:
    if name == "default_generators":  # made at the first use, so that an import touches no generator
        generators = tuple(_C.default_generator(index) for index in range(_C.device_count()))
        globals()[name] = generators
        return generators
    if name == "_initialized":  # torch.utils.checkpoint asks this before it saves generator states
        return lifecycle.is_initialized()
    hint = f": use torch.quartz.{_INSTEAD[name]}" if name in _INSTEAD else ""
    raise AttributeError(f"module 'torch.quartz' has no attribute '{name}'{hint}")
