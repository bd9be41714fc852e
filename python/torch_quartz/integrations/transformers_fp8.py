"""Transformers' float8 checkpoints (``quant_method: "fp8"``) on quartz: the weights stay float8.

`FP8Linear` and `FP8Experts` run `linear_quantized` and `moe_experts_quantized` on quartz tensors. Both take the weight
alone: the input is not rounded to float8, so the results are those of the model with its weights dequantised to the
dtype of the input, whatever the checkpoint's activation scheme.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torch_quartz.integrations.replacements import Replacements
from torch_quartz.integrations.transformers_experts import _find_activation, _find_gate

PATCHES = (
    {
        "name": "transformers.fp8_environment",
        "target": "transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer.validate_environment",
        "reason": "float8 checkpoints are dequantised where neither CUDA nor XPU is found",
    },
    {
        "name": "transformers.fp8_linear",
        "target": "transformers.integrations.finegrained_fp8.fp8_linear",
        "reason": "the kernels it chooses from are for CUDA tensors; those on quartz run quartz::linear_quantized",
    },
    {
        "name": "transformers.fp8_experts",
        "target": "transformers.integrations.finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS (its entries; new: quartz)",
        "reason": "experts of float8 weights on quartz run quartz::moe_experts_quantized",
    },
)

_changes = Replacements()
_gates: WeakKeyDictionary[torch.nn.Module, dict[str, Any] | None] = WeakKeyDictionary()


def install() -> None:
    """Replace the functions when their modules are imported."""
    _changes.when_imported("transformers.quantizers.quantizer_finegrained_fp8", _patch_quantizer)
    _changes.when_imported("transformers.integrations.finegrained_fp8", _patch_functions)


def undo() -> None:
    """Put the originals back."""
    _changes.undo()


def is_on_quartz(device_map: Any) -> bool:
    """Return whether a ``device_map`` names quartz devices alone.

    Parameters
    ----------
    device_map : object
        A device, its name, or a dictionary of them.

    Examples
    --------
    >>> is_on_quartz("quartz:0"), is_on_quartz({"": "cpu"}), is_on_quartz("auto")
    (True, False, False)
    """
    places = list(device_map.values()) if isinstance(device_map, dict) else [device_map]
    return bool(places) and all(isinstance(p, (str, torch.device)) and str(p).startswith("quartz") for p in places)


def _patch_quantizer(module: ModuleType) -> None:
    quantizer = getattr(module, "FineGrainedFP8HfQuantizer", None)
    if quantizer is None:
        return

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def validate_environment(self: Any, *arguments: Any, **options: Any) -> Any:
            if self.pre_quantized and is_on_quartz(options.get("device_map")):
                return None
            return original(self, *arguments, **options)

        return validate_environment

    _changes.attribute(quantizer, "validate_environment", make)


def _weight(codes: torch.Tensor, scales: torch.Tensor, block_size: Any) -> Any:
    """A weight of `FP8Linear` or `FP8Experts` as the operators take it."""
    from torch_quartz.ops import QuantizedWeight

    if codes.dtype == torch.int8:  # fp4 of DeepSeek V4: two codes a byte, a power of two for 32
        return QuantizedWeight(codes.view(torch.uint8), scales.to(torch.float8_e8m0fnu), None, "mxfp4")
    scales = scales.float()
    if block_size is None or scales.numel() == 1:
        return QuantizedWeight(codes, scales.squeeze() if scales.numel() == 1 else scales)
    rows, columns = block_size
    count, height = scales.shape[-2], codes.shape[-2]
    if rows != columns or count != -(-height // rows):  # rows of their own for each row of the weight
        starts = torch.arange(height, device=scales.device)
        if count != -(-height // rows):  # gates and ups joined, the last block of each smaller
            starts = starts % (height // 2) + starts // (height // 2) * (count // 2 * rows)
        scales = scales.index_select(-2, starts // rows)
    return QuantizedWeight(codes, scales, block=columns)


def _patch_functions(module: ModuleType) -> None:
    def make_linear(original: Any) -> Any:
        @functools.wraps(original)
        def fp8_linear(
            input: Any, weight: Any, weight_scale_inv: Any, block_size: Any = None, *arguments: Any, **options: Any
        ) -> Any:
            if input.device.type != "quartz":
                return original(input, weight, weight_scale_inv, block_size, *arguments, **options)
            from torch_quartz.ops import linear_quantized

            bias = arguments[0] if arguments else options.get("bias")
            quantized = _weight(weight.detach(), weight_scale_inv.detach(), block_size)
            return linear_quantized(input, quantized, None if bias is None else bias.to(input.dtype))

        return fp8_linear

    if hasattr(module, "fp8_linear"):
        _changes.function(module, "fp8_linear", make_linear)
    mapping = getattr(getattr(module, "ALL_FP8_EXPERTS_FUNCTIONS", None), "_global_mapping", None)
    if mapping is None:
        return
    before = dict(mapping)

    def make_experts(original: Any) -> Any:
        @functools.wraps(original)
        def experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            if hidden_states.device.type != "quartz":
                return original(self, hidden_states, top_k_index, top_k_weights)
            return quartz_fp8_experts_forward(self, hidden_states, top_k_index, top_k_weights)

        return experts_forward

    for name, function in before.items():
        mapping[name] = make_experts(function)
    mapping["quartz"] = quartz_fp8_experts_forward
    _changes.on_undo(lambda: (mapping.clear(), mapping.update(before)))


def quartz_fp8_experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run Transformers' `FP8Experts` with `moe_experts_quantized`, or expert by expert where that cannot.

    Parameters
    ----------
    self : torch.nn.Module
        An `FP8Experts` module.
    hidden_states : Tensor
        ``(tokens, hidden)``.
    top_k_index, top_k_weights : Tensor
        ``(tokens, k)``.
    """
    from torch_quartz.ops import moe_experts_quantized

    if self not in _gates:
        gate = _find_gate(self) if self.has_gate else _find_activation(self)
        _gates[self] = None if gate is None or self.has_bias else {"gated": self.has_gate, **gate}
    up_name = "gate_up_proj" if self.has_gate else "up_proj"
    up, down = getattr(self, up_name).detach(), self.down_proj.detach()
    if _gates[self] is not None and up.element_size() == 1:
        up_scales, down_scales = (getattr(self, f"{n}_scale_inv").detach() for n in (up_name, "down_proj"))
        try:
            return moe_experts_quantized(
                hidden_states,
                top_k_index,
                top_k_weights,
                _weight(up, up_scales, self.block_size),
                _weight(down, down_scales, self.block_size),
                **_gates[self],
            )
        except NotImplementedError:  # the GPU's kernels do not serve every dtype, size and activation
            _gates[self] = None
    return inspect.unwrap(type(self).forward)(self, hidden_states, top_k_index, top_k_weights)
