"""Transformers' experts interface: `moe_experts` for the mixture-of-experts layers of models on quartz.

The interface gets the name ``"quartz"``. The implementations that Transformers chooses by itself (``"grouped_mm"``, and
``"batched_mm"`` while decoding) run the same function for tensors on quartz, and their own code for other devices and
for layers whose gate is none that the operator knows. What a layer's gate computes is found by trying it on a few
numbers, so that a new model needs no entry here. ``"eager"`` stays what it is.
"""

from __future__ import annotations

import functools
import itertools
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torch_quartz.integrations.replacements import Replacements

PATCHES = (
    {
        "name": "transformers.experts",
        "target": "transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS (entries grouped_mm, batched_mm; new: quartz)",
        "reason": "experts of models on quartz run quartz::moe_experts; other devices keep the original entries",
    },
)

_changes = Replacements()
_gates: WeakKeyDictionary[torch.nn.Module, dict[str, Any] | None] = WeakKeyDictionary()


def install() -> None:
    """Register the implementation when Transformers' experts interface is imported."""
    _changes.when_imported("transformers.integrations.moe", _patch_interface)


def undo() -> None:
    """Take the implementation out again."""
    _changes.undo()


def _patch_interface(module: ModuleType) -> None:
    mapping = getattr(getattr(module, "ALL_EXPERTS_FUNCTIONS", None), "_global_mapping", None)
    if mapping is None:  # a Transformers without the interface
        return
    before = dict(mapping)

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
            if hidden_states.device.type == "quartz" and (options := experts_options(self)) is not None:
                try:
                    return _forward(self, options, hidden_states, top_k_index, top_k_weights)
                except NotImplementedError:  # the GPU's kernels do not serve every dtype, size and activation
                    _gates[self] = None
            return original(self, hidden_states, top_k_index, top_k_weights)

        return experts_forward

    for name in ("grouped_mm", "batched_mm"):
        if name in mapping:
            mapping[name] = make(mapping[name])
    mapping["quartz"] = quartz_experts_forward
    _changes.on_undo(lambda: (mapping.clear(), mapping.update(before)))


def quartz_experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run an experts module with `moe_experts`: the implementation ``experts_implementation="quartz"``.

    Parameters
    ----------
    self : torch.nn.Module
        An experts module of Transformers.
    hidden_states : Tensor
        ``(tokens, hidden)``.
    top_k_index, top_k_weights : Tensor
        ``(tokens, k)``.

    Raises
    ------
    NotImplementedError
        If the module's gate or weights are none that the operator knows.
    """
    options = experts_options(self)
    if options is None:
        raise NotImplementedError(
            f"quartz experts: {type(self).__name__} computes its gate, stores its weights or normalises its outputs in "
            "a way that quartz::moe_experts does not know; use experts_implementation='grouped_mm' for this model"
        )
    return _forward(self, options, hidden_states, top_k_index, top_k_weights)


def _forward(self: Any, options: dict[str, Any], hidden_states: Any, ids: Any, weights: Any) -> torch.Tensor:
    from torch_quartz.ops import moe_experts

    up = "gate_up_proj" if self.has_gate else "up_proj"
    biases = {}
    if self.has_bias:
        biases = {"up_bias": getattr(self, f"{up}_bias"), "down_bias": self.down_proj_bias}
    return moe_experts(hidden_states, ids, weights, getattr(self, up), self.down_proj, **biases, **options)


def experts_options(module: torch.nn.Module) -> dict[str, Any] | None:
    """Return what `moe_experts` needs to know of an experts module, None if it cannot run it.

    Parameters
    ----------
    module : torch.nn.Module
        An experts module of Transformers.
    """
    if module not in _gates:
        _gates[module] = _find_options(module)
    return _gates[module]


def _find_options(module: Any) -> dict[str, Any] | None:
    up = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    down = getattr(module, "down_proj", None)
    served = (torch.float32, torch.float16, torch.bfloat16)
    if not isinstance(up, torch.Tensor) or not isinstance(down, torch.Tensor) or up.dtype not in served:
        return None
    if up.dim() != 3 or down.dtype != up.dtype or getattr(module, "has_post_expert_norm", False):
        return None
    gate = _find_gate(module) if module.has_gate else _find_activation(module)
    return None if gate is None else {"gated": module.has_gate, "transposed": module.is_transposed, **gate}


# Both signs, small and large numbers; beyond every limit in use.
_PROBE = torch.tensor([-300.0, -20.0, -9.0, -3.0, -1.3, -0.4, 0.0, 0.2, 0.9, 1.7, 2.5, 4.0, 6.5, 8.0, 15.0, 200.0])


def _find_activation(module: Any) -> dict[str, Any] | None:
    from torch_quartz.ops.moe_experts import ACTIVATIONS, activate

    with torch.no_grad():
        expected = module.act_fn(_PROBE)
        for name in ACTIVATIONS:
            if torch.allclose(activate(_PROBE, name), expected, rtol=1e-5, atol=1e-6):
                return {"activation": name}
    return None


def _find_gate(module: Any) -> dict[str, Any] | None:
    from torch_quartz.ops.moe_experts import ACTIVATIONS, activate

    generator = torch.Generator().manual_seed(0)
    values = _PROBE[torch.randperm(16, generator=generator)].repeat(4)[torch.randperm(64, generator=generator)]
    probe = values.view(4, 16)
    numbers = [value for value in vars(module).values() if type(value) in (int, float)]
    with torch.no_grad():
        expected = module._apply_gate(probe.clone())
        for interleaved, name, alpha, limit, offset in itertools.product(
            (False, True), ACTIVATIONS, (1.0, *numbers), (None, *numbers), (0.0, 1.0)
        ):
            if (alpha != 1.0 and name != "silu") or (limit is not None and limit <= 0):
                continue
            gate, up = (probe[:, 0::2], probe[:, 1::2]) if interleaved else probe.chunk(2, -1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h = activate(gate, name, alpha) * (up + offset)
            if h.shape == expected.shape and torch.allclose(h, expected, rtol=1e-5, atol=1e-6):
                return {
                    "interleaved": interleaved,
                    "activation": name,
                    "alpha": float(alpha),
                    "limit": None if limit is None else float(limit),
                    "up_offset": offset,
                }
    return None
