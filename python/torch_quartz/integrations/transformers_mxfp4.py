"""MXFP4 checkpoints of gpt-oss on quartz: the experts keep their codes and run `moe_experts_quantized`."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from torch_quartz.integrations.replacements import Replacements
from torch_quartz.integrations.transformers_fp8 import is_on_quartz

PATCHES = (
    {
        "name": "transformers.mxfp4",
        "target": "transformers.quantizers.quantizer_mxfp4.Mxfp4HfQuantizer.validate_environment, "
        "_process_model_before_weight_loading, get_weight_conversions",
        "reason": "MXFP4 checkpoints are dequantised without Triton kernels; on quartz the experts keep their codes",
    },
)

_changes = Replacements()


def install() -> None:
    """Replace the methods when their module is imported."""
    _changes.when_imported("transformers.quantizers.quantizer_mxfp4", _patch_quantizer)


def undo() -> None:
    """Put the originals back."""
    _changes.undo()


class Mxfp4Experts(torch.nn.Module):
    """The experts of gpt-oss with the tensors of the checkpoint, under its names.

    Parameters
    ----------
    experts : torch.nn.Module
        The `GptOssExperts` whose place it takes.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts, self.hidden_size = experts.num_experts, experts.hidden_size
        self.intermediate_size, self.alpha, self.limit = experts.intermediate_size, experts.alpha, experts.limit
        for name, rows, columns in (
            ("gate_up_proj", 2 * self.intermediate_size, self.hidden_size),
            ("down_proj", self.hidden_size, self.intermediate_size),
        ):
            if columns % 32 != 0:
                raise ValueError(f"MXFP4 on quartz: {name} must have a multiple of 32 columns, got {columns}")
            shape = (self.num_experts, rows, columns // 32)
            for part, size in (("blocks", (*shape, 16)), ("scales", shape)):
                empty = torch.empty(size, dtype=torch.uint8)
                setattr(self, f"{name}_{part}", torch.nn.Parameter(empty, requires_grad=False))
            bias = getattr(experts, f"{name}_bias")
            setattr(self, f"{name}_bias", torch.nn.Parameter(torch.empty_like(bias), requires_grad=False))

    def _weight(self, name: str) -> Any:
        from torch_quartz.ops import QuantizedWeight

        blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
        return QuantizedWeight(blocks.flatten(-2), scales, None, "mxfp4")

    def forward(
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs, as `GptOssExperts` does."""
        from torch_quartz.ops import moe_experts_quantized

        return moe_experts_quantized(
            hidden_states,
            router_indices,
            routing_weights,
            self._weight("gate_up_proj"),
            self._weight("down_proj"),
            up_bias=self.gate_up_proj_bias.to(hidden_states.dtype),
            down_bias=self.down_proj_bias.to(hidden_states.dtype),
            interleaved=True,
            alpha=self.alpha,
            limit=self.limit,
            up_offset=1.0,
        )


def _patch_quantizer(module: ModuleType) -> None:
    quantizer = getattr(module, "Mxfp4HfQuantizer", None)
    if quantizer is None:
        return

    def kept(self: Any) -> bool:
        return getattr(self, "_kept_on_quartz", False)

    def make_validate(original: Any) -> Any:
        @functools.wraps(original)
        def validate_environment(self: Any, *arguments: Any, **options: Any) -> Any:
            on_quartz = is_on_quartz(options.get("device_map"))
            self._kept_on_quartz = self.pre_quantized and on_quartz and not self.quantization_config.dequantize
            return None if kept(self) else original(self, *arguments, **options)

        return validate_environment

    def make_before(original: Any) -> Any:
        @functools.wraps(original)
        def _process_model_before_weight_loading(self: Any, model: Any, *arguments: Any, **options: Any) -> Any:
            if not kept(self):
                return original(self, model, *arguments, **options)
            self.modules_to_not_convert = self.get_modules_to_not_convert(
                model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
            )
            for name, child in list(model.named_modules()):
                skipped = any(part in name for part in self.modules_to_not_convert)
                if type(child).__name__ == "GptOssExperts" and not skipped:
                    with torch.device("meta"):
                        model.set_submodule(name, Mxfp4Experts(child))
            return None

        return _process_model_before_weight_loading

    def make_conversions(original: Any) -> Any:
        @functools.wraps(original)
        def get_weight_conversions(self: Any) -> Any:
            return [] if kept(self) else original(self)

        return get_weight_conversions

    _changes.attribute(quantizer, "validate_environment", make_validate)
    _changes.attribute(quantizer, "_process_model_before_weight_loading", make_before)
    if "get_weight_conversions" in vars(quantizer):
        _changes.attribute(quantizer, "get_weight_conversions", make_conversions)
    else:  # inherited in newer versions
        quantizer.get_weight_conversions = make_conversions(quantizer.get_weight_conversions)
        _changes.on_undo(lambda: delattr(quantizer, "get_weight_conversions"))
