"""Transformers: the places that test device names and would leave quartz, waste memory or fail.

Forward, backward and ``generate`` need nothing of this: they follow the device of their tensors. The replacements cover
loading, ``pipeline``, ``Trainer``, the offloaded cache and what is sized or chosen by device name; they do nothing for
models on other devices. docs/transformers.md lists every place that was looked at.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from torch_quartz.integrations import choice
from torch_quartz.integrations.accelerate import load_rng_state, quartz_index, save_rng_state
from torch_quartz.integrations.replacements import Replacements

PATCHES = (
    {
        "name": "transformers.caching_allocator_warmup",
        "target": "transformers.modeling_utils.caching_allocator_warmup",
        "reason": "allocates the whole model at once, without a look at free memory, on devices it does not know",
    },
    {
        "name": "transformers.get_max_memory",
        "target": "transformers.integrations.accelerate.get_max_memory",
        "reason": "adds reserved but unused GPU memory beyond a max_memory whose key is no bare index",
    },
    {
        "name": "transformers.load_weights",
        "target": "transformers.core_model_loading._materialize_copy",
        "reason": "on host memory weights are adopted from the mapped file, as on the CPU, instead of being copied",
    },
    {
        "name": "transformers.pipeline_device",
        "target": "transformers.pipelines.base.Pipeline.__init__",
        "reason": "device=0 and no device end in a list of known devices, then in the CPU; the model is moved there",
    },
    {
        "name": "transformers.pipeline_placement",
        "target": "transformers.pipelines.base.Pipeline.device_placement",
        "reason": "only known devices are made current, so a pipeline on quartz:1 would allocate on quartz:0",
    },
    {
        "name": "transformers.trainer_device",
        "target": "transformers.training_args.TrainingArguments._setup_devices",
        "reason": "Trainer chooses from a closed list and ignores ACCELERATE_TORCH_DEVICE where CUDA is present",
    },
    {
        "name": "transformers.bf16_available",
        "target": "transformers.utils.import_utils.is_torch_bf16_gpu_available",
        "reason": "TrainingArguments(bf16=True) is refused where no known accelerator supports it",
    },
    {
        "name": "transformers.trainer_rng_state",
        "target": "transformers.trainer.Trainer._save_rng_state, _load_rng_state",
        "reason": "the random state of a device outside the list is not saved, so a resumed run would differ",
    },
    {
        "name": "transformers.offloaded_cache",
        "target": "transformers.cache_utils.Cache.update",
        "reason": "an offloaded key-value cache asks torch.cuda for the stream of its tensors, whatever their device",
    },
    {
        "name": "transformers.decode_experts",
        "target": "transformers.generation.utils.GenerationMixin._optimize_model_for_decode",
        "reason": "while decoding, experts would switch to an implementation that copies each token's weights",
    },
    {
        "name": "transformers.continuous_batching_memory",
        "target": "transformers.generation.continuous_batching.initialization.resolve_max_memory_percent",
        "reason": "on host memory the paged cache would take 90 % of the free memory instead of the CPU's 60 %",
    },
)

_changes = Replacements()


def install() -> None:
    """Install the replacements, each when its module is imported."""
    _changes.when_imported("transformers.modeling_utils", _patch_modeling)
    _changes.when_imported("transformers.integrations.accelerate", _patch_max_memory)
    _changes.when_imported("transformers.core_model_loading", _patch_loading)
    _changes.when_imported("transformers.pipelines.base", _patch_pipelines)
    _changes.when_imported("transformers.training_args", _patch_training_args)
    _changes.when_imported("transformers.utils.import_utils", _patch_import_utils)
    _changes.when_imported("transformers.trainer", _patch_trainer)
    _changes.when_imported("transformers.cache_utils", _patch_cache)
    _changes.when_imported("transformers.generation.utils", _patch_generation)
    _changes.when_imported("transformers.generation.continuous_batching.initialization", _patch_continuous_batching)


def undo() -> None:
    """Put the originals back everywhere."""
    _changes.undo()


def disable() -> None:
    """Take back every change of Transformers: of loading, of experts, of attention and of the fused modules.

    Models on quartz keep working, with Transformers' own code. `torch_quartz.install_patches` brings the changes back.

    Examples
    --------
    >>> from torch_quartz.integrations import patches, transformers
    >>> transformers.disable()
    >>> [name for name in patches.installed() if name.startswith("transformers")]
    []
    >>> torch_quartz.install_patches()
    """
    from torch_quartz.integrations import patches

    for name in patches.installed():
        if name.startswith("transformers"):
            patches.undo(name)


def _on_host() -> bool:
    from torch_quartz import _C

    return _C.substrate() == "host"


def _patch_modeling(module: ModuleType) -> None:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def caching_allocator_warmup(model: Any, expanded_device_map: dict, hf_quantizer: Any) -> Any:
            devices = {name: _warmup_device(device) for name, device in expanded_device_map.items()}
            return original(model, devices, hf_quantizer)

        return caching_allocator_warmup

    _changes.function(module, "caching_allocator_warmup", make)


def _warmup_device(device: Any) -> Any:
    """Return the device to warm up: CUDA's own for quartz on CUDA memory, the CPU (that is none) on host memory."""
    if device == "disk":
        return device
    target = torch.device(device)
    if target.type != "quartz":
        return device
    index = torch.quartz.current_device() if target.index is None else target.index
    if _on_host() or index >= torch.quartz.device_count():
        return torch.device("cpu")  # skipped by the original: malloc has nothing to warm up, and no device is there
    return torch.device("cuda", index)


def _patch_max_memory(module: ModuleType) -> None:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def get_max_memory(max_memory: dict | None = None) -> dict:
            result = original(max_memory)  # has turned the sizes of the caller's dict into bytes
            for key, size in (max_memory or {}).items():
                index = quartz_index(key)
                if index in result:
                    result[index] = min(result[index], size)
            return result

        return get_max_memory

    if hasattr(module, "get_max_memory"):  # older ones call accelerate's
        _changes.function(module, "get_max_memory", make)


def _patch_loading(module: ModuleType) -> None:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def _materialize_copy(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
            # A tensor, unlike a slice of a file, may be the program's own: the model must not share its memory.
            if device is None or isinstance(tensor, torch.Tensor) or not _on_host():
                return original(tensor, device, dtype)
            target = torch.device(device)
            if target.type != "quartz":
                return original(tensor, device, dtype)
            from torch_quartz import _C

            return _C.adopt(original(tensor, "cpu", dtype), -1 if target.index is None else target.index)

        return _materialize_copy

    _changes.function(module, "_materialize_copy", make)


def _patch_pipelines(module: ModuleType) -> None:
    def make_init(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
            given = options.get("device")
            mapped = getattr(model, "hf_device_map", None)
            if mapped is None and len(arguments) < 7:  # with seven, `device` was passed by position
                device = pipeline_device(model, given)
                if device is not None:
                    options["device"] = device
            original(self, model, *arguments, **options)
            if mapped is not None and given is None:
                first = next(iter(mapped.values()))  # the original takes it; a bare index then ends in its device list
                if isinstance(first, int) and torch.device(first).type == "quartz":
                    self.device = torch.device("quartz", first)

        return __init__

    def make_placement(original: Any) -> Any:
        @functools.wraps(original)
        @contextlib.contextmanager
        def device_placement(self: Any) -> Iterator[None]:
            on_quartz = self.device.type == "quartz"
            with torch.quartz.device(self.device) if on_quartz else contextlib.nullcontext(), original(self):
                yield

        return device_placement

    _changes.attribute(module.Pipeline, "__init__", make_init)
    _changes.attribute(module.Pipeline, "device_placement", make_placement)


def pipeline_device(model: Any, device: Any) -> torch.device | None:
    """Return the quartz device a pipeline should run on, None where Transformers decides by itself.

    Parameters
    ----------
    model : torch.nn.Module
        The pipeline's model.
    device : int, str, torch.device or None
        What the program passed. A bare index means PyTorch's current accelerator; no device means the model's own, or,
        for a model on the CPU, the device that `choice.preferred` decides.
    """
    where = getattr(model, "device", None)
    if not isinstance(where, torch.device):
        return None
    if device is None:
        if where.type == "quartz":
            return where
        return choice.preferred_device() if where.type == "cpu" and choice.preferred() else None
    if isinstance(device, int) and device >= 0 and where.type in ("cpu", "quartz") and choice.is_current():
        return torch.device("quartz", device)
    return None


def _patch_training_args(module: ModuleType) -> None:
    def make(original: functools.cached_property) -> functools.cached_property:
        def _setup_devices(self: Any) -> torch.device:
            device = original.func(self)
            single = getattr(getattr(self, "distributed_state", None), "distributed_type", None) == "NO"
            # A CPU that the program asked for (use_cpu) stays the CPU; `_n_gpu` is 0 then.
            asked_for_cpu = device.type == "cpu" and self.distributed_state is not None and self.distributed_state._cpu
            if single and not asked_for_cpu and device.type in ("cpu", "cuda", "quartz") and choice.preferred():
                device = choice.preferred_device()
                torch.quartz.set_device(device)
                self._n_gpu = 1
            return device

        replacement = functools.cached_property(functools.wraps(original.func)(_setup_devices))
        replacement.__set_name__(module.TrainingArguments, "_setup_devices")
        return replacement

    _changes.attribute(module.TrainingArguments, "_setup_devices", make)


def _patch_import_utils(module: ModuleType) -> None:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def is_torch_bf16_gpu_available() -> bool:
            return torch.quartz.is_bf16_supported() if choice.preferred() else original()

        return is_torch_bf16_gpu_available

    _changes.function(module, "is_torch_bf16_gpu_available", make)


def _patch_trainer(module: ModuleType) -> None:
    def make_save(original: Any) -> Any:
        @functools.wraps(original)
        def _save_rng_state(self: Any, output_dir: str) -> None:
            original(self, output_dir)
            if self.args.device.type == "quartz":
                save_rng_state(output_dir)

        return _save_rng_state

    def make_load(original: Any) -> Any:
        @functools.wraps(original)
        def _load_rng_state(self: Any, checkpoint: str | None) -> None:
            original(self, checkpoint)
            if checkpoint is not None and self.args.device.type == "quartz":
                load_rng_state(checkpoint)

        return _load_rng_state

    _changes.attribute(module.Trainer, "_save_rng_state", make_save)
    _changes.attribute(module.Trainer, "_load_rng_state", make_load)


def _patch_cache(module: ModuleType) -> None:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def update(
            self: Any, key_states: Any, value_states: Any, layer_idx: int, *arguments: Any, **options: Any
        ) -> Any:
            if not (self.offloading and key_states.device.type == "quartz"):
                return original(self, key_states, value_states, layer_idx, *arguments, **options)
            while self.layer_class_to_replicate is not None and len(self.layers) <= layer_idx:
                self.layers.append(self.layer_class_to_replicate())
            # The next layer comes back on its own stream; neither stream may touch what the other still uses.
            stream = torch.quartz.default_stream(key_states.device)
            stream.wait_stream(self.prefetch_stream)
            self.prefetch_stream.wait_stream(stream)
            self.prefetch(layer_idx + 1, self.only_non_sliding)
            self.offloading = False  # the rest of the original, without its torch.cuda calls
            try:
                result = original(self, key_states, value_states, layer_idx, *arguments, **options)
            finally:
                self.offloading = True
            self.offload(layer_idx, self.only_non_sliding)
            return result

        return update

    _changes.attribute(module.Cache, "update", make)


def _patch_generation(module: ModuleType) -> None:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def _optimize_model_for_decode(self: Any) -> Any:
            return contextlib.nullcontext() if self.device.type == "quartz" else original(self)

        return _optimize_model_for_decode

    _changes.attribute(module.GenerationMixin, "_optimize_model_for_decode", make)


def _patch_continuous_batching(module: ModuleType) -> None:
    def make(original: Any) -> Any:
        if "device" not in inspect.signature(original).parameters:
            return original  # Transformers before 5.20 does not tell the CPU from other devices here

        @functools.wraps(original)
        def resolve_max_memory_percent(*arguments: Any, device: torch.device | None = None, **options: Any) -> None:
            if device is not None and device.type == "quartz" and _on_host():
                device = torch.device("cpu")
            original(*arguments, device=device, **options)

        return resolve_max_memory_percent

    _changes.function(module, "resolve_max_memory_percent", make)
