"""accelerate: memory queries, the default device, GradScaler and checkpointed random numbers.

accelerate names every device it knows and asks ``torch.cuda`` about any other. The replacements here answer for quartz
and hand everything else to the originals. What accelerate offers itself is used, not patched:
``ACCELERATE_TORCH_DEVICE`` and device maps with explicit devices work as they are.
"""

from __future__ import annotations

import functools
import os
from types import FunctionType, ModuleType
from typing import Any

import torch

from torch_quartz.integrations import choice
from torch_quartz.integrations.replacements import Replacements

PATCHES = (
    {
        "name": "accelerate.get_max_memory",
        "target": "accelerate.utils.modeling.get_max_memory",
        "reason": 'device_map="auto" asks torch.cuda for memory, finds no device and puts the model on the CPU',
    },
    {
        "name": "accelerate.default_device",
        "target": "accelerate.state.PartialState.default_device",
        "reason": "Accelerator() and Trainer choose from a closed list of devices that ends in the CPU",
    },
    {
        "name": "accelerate.fp16_devices",
        "target": "the tuple of device names inside accelerate.accelerator.Accelerator.__init__",
        "reason": "fp16 mixed precision is refused for any device outside that tuple",
    },
    {
        "name": "accelerate.get_grad_scaler",
        "target": "accelerate.utils.modeling.get_grad_scaler",
        "reason": 'fp16 training would scale with GradScaler("cuda"), which disables itself or fails',
    },
    {
        "name": "accelerate.clear_device_cache",
        "target": "accelerate.utils.memory.clear_device_cache",
        "reason": "find_executable_batch_size frees the cache of known devices only before it tries again",
    },
    {
        "name": "accelerate.rng_state",
        "target": "accelerate.checkpointing.save_accelerator_state, load_accelerator_state",
        "reason": "the random state of a device outside the list is not saved, so a resumed run would differ",
    },
)

_changes = Replacements()


def install() -> None:
    """Install the replacements, each when its module is imported."""
    choice.watch_import()
    _changes.when_imported("accelerate.utils.modeling", _patch_modeling)
    _changes.when_imported("accelerate.utils.memory", _patch_memory)
    _changes.when_imported("accelerate.state", _patch_state)
    _changes.when_imported("accelerate.checkpointing", _patch_checkpointing)
    _changes.when_imported("accelerate.accelerator", _patch_accelerator)


def undo() -> None:
    """Put the originals back everywhere."""
    _changes.undo()


def _patch_modeling(module: ModuleType) -> None:
    _changes.function(module, "get_max_memory", lambda original: _get_max_memory(original, module))
    _changes.function(module, "get_grad_scaler", _get_grad_scaler)


def _get_max_memory(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def get_max_memory(max_memory: dict | None = None) -> dict:
        from torch_quartz import _C

        if max_memory is None:
            # On CUDA memory the original is right: torch.cuda counts the same memory and the same indices.
            return _host_memory() if choice.preferred() and _C.substrate() == "host" else original()
        indices = {key: index for key in max_memory if (index := quartz_index(key)) is not None}
        if not indices:
            return original(max_memory)
        for key, size in max_memory.items():  # in the caller's dict, as the original does: Transformers relies on it
            if isinstance(size, str):
                max_memory[key] = module.convert_file_size_to_int(size)
        count = torch.quartz.device_count()
        for key, index in indices.items():
            if index >= count:
                raise ValueError(f"max_memory: device {key!r} does not exist: there are {count} quartz devices")
        rest = original({key: size for key, size in max_memory.items() if key not in indices})
        ordered = sorted(indices.items(), key=lambda item: item[1])  # accelerators first, as the original orders them
        return {**{index: max_memory[key] for key, index in ordered}, **rest}

    return get_max_memory


def _host_memory() -> dict[int, int]:
    # The devices share the machine's memory among themselves and with the CPU, so there is no entry for the CPU that
    # could take the same bytes again (accelerate does the same for MPS).
    count = torch.quartz.device_count()
    return {index: torch.quartz.mem_get_info(index)[0] // count for index in range(count)}


def quartz_index(key: Any) -> int | None:
    """Return the quartz index that a key of ``max_memory`` means, None if it means something else.

    Parameters
    ----------
    key : int, str or torch.device
        A bare index means PyTorch's current accelerator.
    """
    if isinstance(key, int):
        return key if choice.is_current() and key >= 0 else None
    if isinstance(key, torch.device) or (isinstance(key, str) and key.partition(":")[0] == "quartz"):
        device = torch.device(key)
        return (device.index or 0) if device.type == "quartz" else None
    return None


def _get_grad_scaler(original: Any) -> Any:
    @functools.wraps(original)
    def get_grad_scaler(distributed_type: Any = None, **options: Any) -> Any:
        if distributed_type in (None, "NO") and _state_device_is_quartz():
            return torch.amp.GradScaler("quartz", **options)
        return original(distributed_type, **options)

    return get_grad_scaler


def _state_device_is_quartz() -> bool:
    from accelerate.state import PartialState

    device = PartialState._shared_state.get("device")
    return device is not None and device.type == "quartz"


def _patch_memory(module: ModuleType) -> None:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def clear_device_cache(*arguments: Any, **options: Any) -> None:
            original(*arguments, **options)
            torch.quartz.empty_cache()

        return clear_device_cache

    _changes.function(module, "clear_device_cache", make)


def _patch_state(module: ModuleType) -> None:
    def make(original: property) -> property:
        def default_device(self: Any) -> torch.device:
            return torch.device("quartz") if choice.preferred() else original.fget(self)

        return property(functools.wraps(original.fget)(default_device))

    _changes.attribute(module.PartialState, "default_device", make)


def _patch_accelerator(module: ModuleType) -> None:
    # The list is a constant inside a function of several hundred lines: the code object gets a longer constant.
    def make(original: Any) -> Any:
        code = original.__code__
        constants = tuple(
            (*constant, "quartz") if isinstance(constant, tuple) and {"cuda", "mlu"} <= set(constant) else constant
            for constant in code.co_consts
        )
        replacement = FunctionType(
            code.replace(co_consts=constants),
            original.__globals__,
            original.__name__,
            original.__defaults__,
            original.__closure__,
        )
        replacement.__kwdefaults__ = original.__kwdefaults__
        return functools.wraps(original)(replacement)

    _changes.attribute(module.Accelerator, "__init__", make)


def _patch_checkpointing(module: ModuleType) -> None:
    def make_save(original: Any) -> Any:
        @functools.wraps(original)
        def save_accelerator_state(output_dir: str, *arguments: Any, **options: Any) -> Any:
            result = original(output_dir, *arguments, **options)
            if _state_device_is_quartz():
                save_rng_state(output_dir)
            return result

        return save_accelerator_state

    def make_load(original: Any) -> Any:
        @functools.wraps(original)
        def load_accelerator_state(input_dir: str, *arguments: Any, **options: Any) -> Any:
            result = original(input_dir, *arguments, **options)
            if _state_device_is_quartz():
                load_rng_state(input_dir)
            return result

        return load_accelerator_state

    _changes.function(module, "save_accelerator_state", make_save)
    _changes.function(module, "load_accelerator_state", make_load)


def _rng_file(folder: str | os.PathLike) -> str:
    return os.path.join(folder, f"quartz_rng_state_{os.environ.get('RANK', '0')}.pth")


def save_rng_state(folder: str | os.PathLike) -> None:
    """Save the state of every device's generator in a checkpoint folder, beside the library's own random states.

    Parameters
    ----------
    folder : str or os.PathLike
        The checkpoint.
    """
    torch.save(torch.quartz.get_rng_state_all(), _rng_file(folder))


def load_rng_state(folder: str | os.PathLike) -> None:
    """Load what `save_rng_state` saved, where the folder has it and as many devices as this process.

    Parameters
    ----------
    folder : str or os.PathLike
        The checkpoint; one that another device wrote has no quartz states and changes nothing.
    """
    if not os.path.isfile(_rng_file(folder)):
        return
    states = torch.load(_rng_file(folder), map_location="cpu", weights_only=True)
    if len(states) == torch.quartz.device_count():
        torch.quartz.set_rng_state_all(states)
