"""Transformers: RMS norms, gated MLPs, rotary embeddings and routers of models on quartz use the fused operators.

What a class or function computes decides, not its name or its family: the first time one meets a quartz tensor, its
original runs on a small random tensor of the CPU, and if one of the fused operators' forms gives the same numbers, that
form is used from then on; otherwise the original stays. Weights and modules are not changed. Tensors of other devices,
and calls while ``torch.compile`` traces, go to the original.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_quartz.integrations.replacements import Replacements
from torch_quartz.integrations.transformers_probe import Forms, close, noise, quietly, remembered, stand_in
from torch_quartz.integrations.transformers_recurrent import make_replacement
from torch_quartz.integrations.transformers_router import make_router

PATCHES = (
    {
        "name": "transformers.rms_norm",
        "target": "forward of RMS norm classes of transformers.models",
        "reason": "one kernel, whose sums depend on the row alone, instead of six calls",
    },
    {
        "name": "transformers.gated_mlp",
        "target": "forward of MLP classes of transformers.models",
        "reason": "the activation and its product with the other half are one kernel",
    },
    {
        "name": "transformers.rotary",
        "target": "the functions apply_rotary_pos_emb of transformers.models",
        "reason": "queries and keys are rotated in one kernel instead of ten calls",
    },
    {
        "name": "transformers.router",
        "target": "forward of router classes of transformers.models",
        "reason": "scores, choice and weights of experts are one kernel, whose ties go to the lower expert",
    },
    {
        "name": "transformers.recurrent",
        "target": "the functions mamba_selective_scan, mamba_selective_state_update, torch_chunk_gated_delta_rule, "
        "torch_recurrent_gated_delta_rule of transformers.models",
        "reason": "a sequence and its tokens one by one run one operator, in the same order of arithmetic",
    },
)

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
_changes = Replacements()
_seen: set[str] = set()


def install() -> None:
    """Replace what the loaded model files define, and that of others when a model of theirs is built."""
    _changes.when_imported("transformers.modeling_utils", _watch_models)


def undo() -> None:
    """Put the originals back."""
    _changes.undo()
    _seen.clear()


@functools.cache
def _ops() -> ModuleType:
    from torch_quartz import ops  # imported with the first model, not with the package

    return ops


def _watch_models(module: ModuleType) -> None:
    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def post_init(self: Any) -> None:
            _scan(type(self).__module__)
            original(self)

        return post_init

    _changes.attribute(module.PreTrainedModel, "post_init", make)
    for name in list(sys.modules):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            _scan(name)


def _scan(name: str) -> None:
    """Replace the forward functions of a model file's norms, MLPs and routers, and its rotary functions."""
    module = sys.modules.get(name)
    if module is None or name in _seen or getattr(module.__spec__, "_initializing", False):
        return
    _seen.add(name)
    for key, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != name:
            if isinstance(value, type | FunctionType) and ".modeling_" in str(getattr(value, "__module__", "")):
                _scan(value.__module__)  # a part that another model file defines
            continue
        if (
            isinstance(value, type)
            and issubclass(value, nn.Module)
            and isinstance(vars(value).get("forward"), FunctionType)
        ):
            arguments = len(inspect.signature(value.forward).parameters)
            if "Norm" in key and arguments == 2:
                _changes.attribute(value, "forward", _make_norm)
            elif "MLP" in key and arguments == 2:
                _changes.attribute(value, "forward", _make_mlp)
            elif ("Router" in key or "Gate" in key) and arguments == 2:
                _changes.attribute(value, "forward", make_router)
        elif isinstance(value, FunctionType) and _is_rotary(key, value):
            _changes.function(module, key, _make_rotary)
        elif isinstance(value, FunctionType) and (make := make_replacement(key)) is not None:
            _changes.function(module, key, make)


def _is_rotary(name: str, function: FunctionType) -> bool:
    first = tuple(inspect.signature(function).parameters)[:4]
    return name.startswith("apply_rotary_pos_emb") and first == ("q", "k", "cos", "sin")


# ---- RMS norms ----------------------------------------------------------------------------------------------------


class _Norm(NamedTuple):
    eps: str  # name of the attribute
    offset: float
    round_first: bool


def _norm_of(module: nn.Module, original: Callable) -> _Norm | None:
    """Return the form of a norm, None if it is no RMS norm over the last dimension with one weight."""
    if set(module._parameters) != {"weight"} or module._buffers or module._modules or module.weight is None:
        return None
    names = [name for name in ("variance_epsilon", "eps") if isinstance(getattr(module, name, None), float)]
    if module.weight.dim() != 1 or len(names) != 1:
        return None
    size, eps = module.weight.shape[0], getattr(module, names[0])
    for offset in (0.0, 1.0):
        for round_first in (True, False):
            form = _Norm(names[0], offset, round_first)
            if all(
                _norm_matches(module, original, form, size, eps, dtype) for dtype in (torch.float32, torch.bfloat16)
            ):
                return form
    return None


def _norm_matches(
    module: nn.Module, original: Callable, form: _Norm, size: int, eps: float, dtype: torch.dtype
) -> bool:
    weight, x = noise(size, scale=0.5).to(dtype), noise(64, size, scale=3.0).to(dtype)
    x[0] *= 1e-4  # where eps matters
    result = quietly(lambda: original(stand_in(module, {"weight": weight}, {}), x))
    normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if form.round_first:
        normal = normal.to(dtype).float()
    expected = (normal * (weight.float() + form.offset)).to(dtype)
    if not close(result, expected):
        return False
    # The two orders of rounding differ in about a third of the elements.
    return dtype == torch.float32 or (result != expected).float().mean().item() < 0.02


def _make_norm(original: Callable) -> Callable:
    forms, find = Forms(), remembered(_norm_of, original)

    @functools.wraps(original)
    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        if hidden_states.device.type != "quartz" or torch.compiler.is_compiling():
            return original(self, hidden_states)
        weight = self._parameters.get("weight")
        if weight is None or weight.dtype is not hidden_states.dtype or weight.dtype not in _FLOATS:
            return original(self, hidden_states)
        form = forms.get(self, self.training, find)
        if form is None or hidden_states.shape[-1] != weight.shape[0]:
            return original(self, hidden_states)
        eps = self.__dict__[form.eps]
        return _ops().rms_norm(hidden_states, weight, eps, weight_offset=form.offset, round_first=form.round_first)

    forward.forms = forms
    return forward


# ---- gated MLPs ---------------------------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
}


def _mlp_of(module: nn.Module, original: Callable) -> str | None:
    """Return the activation of ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``, None for any other module."""
    children = module._modules
    if not {"gate_proj", "up_proj", "down_proj"} <= set(children) or module._buffers:
        return None
    if set(children) - {"gate_proj", "up_proj", "down_proj", "act_fn"} or module._parameters:
        return None
    size, act = 64, getattr(module, "act_fn", None)
    projections = {}
    for seed, name in enumerate(("gate_proj", "up_proj", "down_proj")):
        projections[name] = nn.Linear(size, size, bias=False, device="meta")  # draws no numbers
        weights = torch.randn(size, size, generator=torch.Generator().manual_seed(seed + 1))
        projections[name].weight = nn.Parameter(weights / 8, requires_grad=False)
    if isinstance(act, nn.Module):
        projections["act_fn"] = act if not list(act.parameters()) else copy.deepcopy(act).to("cpu")
    probe = stand_in(module, {}, projections)
    for name, function in _ACTIVATIONS.items():
        if all(_mlp_matches(probe, original, function, dtype) for dtype in (torch.float32, torch.bfloat16)):
            return name
    return None


def _mlp_matches(module: nn.Module, original: Callable, activation: Callable, dtype: torch.dtype) -> bool:
    module = module.to(dtype)
    x = noise(32, 64).to(dtype) * torch.logspace(-1, 3, 32)[:, None].to(dtype)  # clamps show on large values
    result = quietly(lambda: original(module, x))
    with torch.no_grad():
        expected = module.down_proj(activation(module.gate_proj(x)) * module.up_proj(x))
    return isinstance(result, Tensor) and result.dtype == expected.dtype and torch.equal(result, expected)


def _make_mlp(original: Callable) -> Callable:
    forms, find = Forms(), remembered(_mlp_of, original)

    @functools.wraps(original)
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if x.device.type != "quartz" or torch.compiler.is_compiling():
            return original(self, x)
        act = self._modules.get("act_fn") or self.__dict__.get("act_fn")
        activation = forms.get(self, (self.training, id(act)), find)
        if activation is None:
            return original(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if (
            gate.dtype is not up.dtype
            or gate.dtype not in _FLOATS
            or gate.shape != up.shape
            or gate.device != up.device
        ):
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(_ops().gated_activation(gate, up, activation, round_first=True))

    forward.forms = forms
    return forward


# ---- rotary embeddings --------------------------------------------------------------------------------------------


class _Rotation(NamedTuple):
    style: str
    pair_table: bool
    first_half: bool  # of the tables only
    in_float: bool  # instead of rounding each step


_ROTATIONS = tuple(
    _Rotation(*form, in_float)
    for in_float in (False, True)
    for form in (
        ("half", False, False),
        ("half", True, False),
        ("half", True, True),
        ("deinterleaved", True, True),
        ("deinterleaved", False, False),
        ("interleaved", True, False),
        ("interleaved", True, True),
        ("interleaved", False, False),
    )
)


def _rotate(form: _Rotation, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    if form.first_half:
        width = cos.shape[-1] // 2
        cos, sin = cos[..., :width], sin[..., :width]
    if form.in_float:
        cos, sin = cos.float(), sin.float()
    return _ops().rotary_qk(q, k, cos, sin, style=form.style, pair_table=form.pair_table, heads_dim=heads_dim)


def _rotation_of(
    original: Callable, size: int, size_k: int, width: int, dtype: torch.dtype, dtype_k: torch.dtype, table: torch.dtype
) -> _Rotation | None:
    """Return the form of a rotary function for heads of `size` and tables of `width` elements."""
    if size != size_k or dtype is not dtype_k or dtype not in _FLOATS:
        return None
    q, k = noise(1, 3, 4, size).to(dtype), noise(1, 2, 4, size).to(dtype)
    angles = noise(1, 4, width)
    halves = torch.cat((angles[..., : (width + 1) // 2],) * 2, -1)[..., :width]  # what models have: both halves equal
    for values in (angles, halves):
        cos, sin = values.cos().to(table), values.sin().to(table)
        result = quietly(lambda cos=cos, sin=sin: original(q, k, cos, sin))
        if result is None or len(result) != 2:
            return None
        for form in _ROTATIONS:
            got = quietly(lambda form=form, cos=cos, sin=sin: _rotate(form, q, k, cos, sin, -3))
            if got is not None and all(
                isinstance(a, Tensor) and torch.equal(a, b) for a, b in zip(result, got, strict=True)
            ):
                return form
    return None


def _make_rotary(original: Callable) -> Callable:
    names = tuple(inspect.signature(original).parameters)
    forms: dict[tuple, _Rotation | None] = {}

    @functools.wraps(original)
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
        if q.device.type != "quartz" or torch.compiler.is_compiling():
            return original(q, k, cos, sin, *rest, **options)
        heads = 1
        if rest or options:
            arguments = dict(zip(names[4:], rest, strict=False)) | options
            heads = arguments.pop("unsqueeze_dim", 1)
            if any(value is not None for value in arguments.values()):
                return original(q, k, cos, sin, *rest, **options)
        of_q, of_k, of_table = q.shape, k.shape, cos.shape
        fits = (
            len(of_q) == 4 == len(of_k)
            and len(of_table) == 3
            and heads in (1, 2)
            and of_q[3 - heads] == of_k[3 - heads] == of_table[1]
            and of_q[0] == of_k[0]
            and of_table[0] in (1, of_q[0])
            and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
        )
        if not fits:
            return original(q, k, cos, sin, *rest, **options)
        key = (of_q[3], of_k[3], of_table[2], q.dtype, k.dtype, cos.dtype)
        try:
            form = forms[key]
        except KeyError:
            form = forms[key] = _rotation_of(original, *key)
        if form is None:
            return original(q, k, cos, sin, *rest, **options)
        return _rotate(form, q, k, cos, sin, heads - 4)

    return apply_rotary_pos_emb
