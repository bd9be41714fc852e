"""Transformers' attention interface: the attention operators for models on quartz.

The interface gets the names ``"quartz"`` and ``"paged|quartz"``. Models that choose nothing run the same operators on
quartz: Transformers' ``"sdpa"`` does already (it is PyTorch's operator), and its masks tell the operator where padded
sequences begin (transformers_masks.py); a model without ``"sdpa"`` has its own ``eager_attention_forward``, which is
replaced if it computes what the operator computes. That is found by trying it on a few numbers. ``"eager"`` that
somebody has asked for, calls that want the attention's weights, and other devices keep the original functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torch_quartz.engine import paged_context
from torch_quartz.integrations.replacements import Replacements
from torch_quartz.integrations.transformers_masks import describing, visible_of

PATCHES = (
    {
        "name": "transformers.attention",
        "target": "transformers.modeling_utils.AttentionInterface (new: quartz, paged|quartz, quartz_engine; "
        "entry sdpa)",
        "reason": "masked calls on quartz run quartz::attention without copies of the keys; others are untouched",
    },
    {
        "name": "transformers.attention_masks",
        "target": "transformers.masking_utils.AttentionMaskInterface (new: quartz; entries sdpa, eager)",
        "reason": "masks on quartz also say in lengths what they hide, so that padding changes no bits",
    },
    {
        "name": "transformers.default_attention",
        "target": "transformers.modeling_utils.PreTrainedModel.get_correct_attn_implementation, "
        "set_attn_implementation, AttentionInterface.get_interface",
        "reason": "models that Transformers gives eager attention by default run quartz::attention on quartz",
    },
)

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
# "eager" as Transformers chose it, told from the program's own by identity: configurations copy it, pickles lose it,
# and everything that compares strings sees "eager".
BY_DEFAULT = str(b"eager", "ascii")
# "quartz" for a model that works with its masks itself, and expects the additive ones of "eager".
_ADDITIVE = str(b"quartz", "ascii")
# What an attention function may be given without a change of what it computes.
_WITHOUT_EFFECT = frozenset(
    [
        "position_ids",
        "use_cache",
        "cache_position",
        "output_hidden_states",
        "output_attentions",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "logits_to_keep",
        "position_embeddings",
        "sliding_window",
        "is_causal",
    ]
)

_changes = Replacements()


def install() -> None:
    """Register the implementations when Transformers' interfaces are imported."""
    _changes.when_imported("transformers.masking_utils", _patch_masks)
    _changes.when_imported("transformers.modeling_utils", _patch_interface)


def undo() -> None:
    """Take the implementations out again."""
    _changes.undo()


def _restore(mapping: dict[str, Any]) -> None:
    before = dict(mapping)
    _changes.on_undo(lambda: (mapping.clear(), mapping.update(before)))


def _patch_masks(module: ModuleType) -> None:
    mapping = module.AttentionMaskInterface._global_mapping
    _restore(mapping)
    for name in ("sdpa", "eager"):
        mapping[name] = describing(mapping[name], module)
    sdpa_mask, eager_mask = mapping["sdpa"], mapping["eager"]

    def quartz_mask(*arguments: Any, **options: Any) -> Tensor | None:
        additive = getattr(options.get("config"), "_attn_implementation", None) is _ADDITIVE
        return (eager_mask if additive else sdpa_mask)(*arguments, **options)

    mapping["quartz"] = quartz_mask


def _patch_interface(module: ModuleType) -> None:
    interface, model = module.AttentionInterface, module.PreTrainedModel
    mapping = interface._global_mapping
    _restore(mapping)
    sdpa = mapping["sdpa"]

    @functools.wraps(sdpa)
    def sdpa_attention_forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is None or not _is_plain_sdpa(query, key, value, attention_mask, options):
            return sdpa(module, query, key, value, attention_mask, **options)
        return _attend(query, key, value, attention_mask, False, options.get("scaling")), None

    def quartz_attention_forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        return _forward(sdpa, module, query, key, value, attention_mask, **options), None

    mapping["sdpa"] = sdpa_attention_forward
    interface.register("quartz", quartz_attention_forward)
    interface.register("paged|quartz", quartz_attention_forward)
    interface.register("quartz_engine", quartz_attention_forward)  # inside a step of torch_quartz's own engine

    def make_interface(original: Callable) -> Callable:
        @functools.wraps(original)
        def get_interface(self: Any, attn_implementation: str, default: Callable) -> Callable:
            function = original(self, attn_implementation, default)
            if attn_implementation is BY_DEFAULT and function is default:
                return _instead_of(default, quartz_attention_forward)
            return function

        return get_interface

    def make_choice(original: Callable) -> Callable:
        @functools.wraps(original)
        def get_correct_attn_implementation(
            self: Any, requested_attention: str | None, *rest: Any, **named: Any
        ) -> str:
            chosen = original(self, requested_attention, *rest, **named)
            if requested_attention is None and chosen == "eager":
                return BY_DEFAULT
            if chosen == "quartz":
                return "quartz" if self._supports_sdpa or self._supports_flash_attn else _ADDITIVE
            return chosen

        return get_correct_attn_implementation

    def make_setter(original: Callable) -> Callable:
        @functools.wraps(original)
        def set_attn_implementation(self: Any, attn_implementation: Any, *rest: Any, **named: Any) -> Any:
            result = original(self, attn_implementation, *rest, **named)
            if attn_implementation is not BY_DEFAULT:
                _forget_default(self)
            return result

        return set_attn_implementation

    _changes.attribute(interface, "get_interface", make_interface)
    _changes.attribute(model, "get_correct_attn_implementation", make_choice)
    _changes.attribute(model, "set_attn_implementation", make_setter)


def _forget_default(model: Any) -> None:
    """Whatever a program sets is its own choice from then on."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation_internal", None) is BY_DEFAULT:
            config._attn_implementation_internal = "eager"


# ---- calls ----


def _is_served(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the operator takes these tensors as they are."""
    return (
        query.device.type == key.device.type == value.device.type == "quartz"
        and query.dtype in _FLOATS
        and query.dtype == key.dtype == value.dtype
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[1] % max(key.shape[1], 1) == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
    )


def _tracks(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _is_plain_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: dict[str, Any]) -> bool:
    """Whether a masked call of ``"sdpa"`` runs the operator directly: the same numbers, without copies of the keys."""
    if torch.compiler.is_compiling() or not _is_served(query, key, value):
        return False
    if options.get("dropout", 0.0) or options.get("position_bias") is not None or options.get("softcap") is not None:
        return False
    if torch.is_autocast_enabled("quartz") or not torch.backends.cuda.flash_sdp_enabled():
        return False
    # PyTorch's fused backward pass needs less memory. On a GPU it does not know where a padded sequence begins.
    beginning = (visible := visible_of(mask)) is not None and visible.key_begin is not None
    return not _tracks(query, key, value, mask) or (beginning and torch.quartz.substrate() == "cuda")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    from torch_quartz.ops import attention

    options: dict[str, Any] = {"scale": scaling, "soft_cap": soft_cap, "sinks": sinks}
    visible = visible_of(mask)
    if visible is None:
        # As in `scaled_dot_product_attention`, a triangle without a mask begins at the first key.
        output = attention(query, key, value, mask, causal=causal, query_offset=0 if causal else None, **options)
    elif not visible.exact:
        output = attention(query, key, value, mask, key_begin=visible.key_begin, key_end=visible.key_end, **options)
    else:
        output = attention(
            query,
            key,
            value,
            causal=visible.causal,
            window=visible.window,
            query_offset=visible.query_offset,
            key_begin=visible.key_begin,
            key_end=visible.key_end,
            **options,
        )
    return output.transpose(1, 2)


def _forward(
    sdpa: Callable,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> Tensor:
    step = paged_context.active()
    if step is not None:  # torch_quartz's own engine: blocks and lengths come with the step
        return step.attend(module, query, key, value, scaling, softcap, s_aux)
    if getattr(module.config, "_attn_implementation", None) == "quartz_engine":
        raise RuntimeError(
            f"quartz attention: {type(module).__name__} was called while an engine of another thread runs the same "
            "model, so its masks are not made; call the model while the engine waits, or give the thread a model of "
            "its own (weights may be shared)"
        )
    if "cu_seq_lens_q" in options and ("quartz_paged" in options or options.get("cache") is not None):
        from torch_quartz.integrations.transformers_paged import forward

        return forward(module, query, key, value, scaling, softcap, s_aux, options)
    if getattr(module.config, "_attn_implementation", None) == "paged|quartz":
        raise ValueError(
            "attn_implementation='paged|quartz' needs the paged cache of continuous batching (generate_batch), got a "
            "call without one; use 'quartz' for a forward pass of the model"
        )
    needs_own = softcap is not None or s_aux is not None
    if query.device.type != "quartz" and needs_own:
        raise ValueError(
            f"attn_implementation='quartz' computes {'a soft cap' if softcap is not None else 'attention sinks'} on "
            f"the device 'quartz' only, got tensors on '{query.device}'; use 'eager' on this device"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    if torch.is_autocast_enabled("quartz") and needs_own:
        query, key, value = (x.to(torch.get_autocast_dtype("quartz")) for x in (query, key, value))
    own = position_bias is None and not dropout and _is_served(query, key, value)
    if needs_own and not own:
        raise NotImplementedError(
            "quartz attention: a soft cap and sinks are computed without dropout, without a position bias and for "
            f"float32, float16 or bfloat16, got dropout {dropout}, "
            f"{'a' if position_bias is not None else 'no'} position bias and {query.dtype}, {key.dtype} and "
            f"{value.dtype}; use attn_implementation='eager' for this"
        )
    # Training without a soft cap and sinks: the same kernel, with PyTorch's fused backward pass.
    visible = visible_of(attention_mask)
    beginning = visible is not None and visible.key_begin is not None and torch.quartz.substrate() == "cuda"
    fused = _tracks(query, key, value, attention_mask) and not beginning
    if not needs_own and (not own or fused or torch.is_autocast_enabled("quartz")):
        extra = {"position_bias": position_bias} if position_bias is not None else {}
        return sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **extra
        )[0]
    return _attend(query, key, value, attention_mask, causal, scaling, softcap, s_aux)


# ---- models with an attention of their own ----


@functools.cache
def _instead_of(eager: Callable, quartz: Callable) -> Callable:
    """Return an attention function that runs a model's own one, or `quartz` where both compute the same."""

    @functools.wraps(eager)
    def attention_forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *rest: Any,
        **o: Any,
    ) -> tuple[Tensor, Tensor | None]:
        wants_weights = o.get("output_attentions") or getattr(module.config, "output_attentions", False)
        if (
            not rest
            and not wants_weights
            and not torch.compiler.is_compiling()
            and not o.get("dropout")
            and not torch.is_autocast_enabled("quartz")
            and _is_served(query, key, value)
        ):
            known = computes_attention(eager, module, o)
            if known is not None:
                named = {name: o[name] for name in ("scaling", "softcap", "cu_seq_lens_q") if name in o}
                sinks = getattr(module, "sinks", None) if known == "sinks" else None
                # These functions know no triangle but the mask's.
                return quartz(module, query, key, value, attention_mask, is_causal=False, s_aux=sinks, **named)
        return eager(module, query, key, value, attention_mask, *rest, **o)

    return attention_forward


def computes_attention(function: Callable, module: torch.nn.Module, options: dict[str, Any]) -> str | None:
    """Find out whether a model's attention function computes what `torch_quartz.ops.attention` computes.

    Parameters
    ----------
    function : callable
        An ``eager_attention_forward`` of Transformers.
    module : torch.nn.Module
        The attention module that calls it.
    options : dict
        The call's keyword arguments.

    Returns
    -------
    str or None
        ``"plain"``, or ``"sinks"`` if the parameter ``sinks`` of the module takes part; None if it is neither.
    """
    soft_cap = options.get("softcap")
    if soft_cap is not None and "softcap" not in inspect.signature(function).parameters:
        soft_cap = None
    unknown = {name for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT} - {
        "scaling",
        "dropout",
        "softcap",
        "s_aux",
    }
    if unknown & set(inspect.signature(function).parameters):
        return None  # an argument that the function uses and the operator does not know
    has_sinks = isinstance(getattr(module, "sinks", None), Tensor)
    return _probe(function, soft_cap, has_sinks, options.get("softcap") is not None)


@functools.cache
def _probe(function: Callable, soft_cap: float | None, has_sinks: bool, given: bool) -> str | None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu")

    query, key, value, sinks = draw(2, 4, 3, 8), draw(2, 2, 5, 8), draw(2, 2, 5, 8), draw(4)
    hidden = torch.arange(5) > torch.arange(3).unsqueeze(1) + 2
    mask = torch.zeros(3, 5).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
    scaling = 3.0  # scores at which a soft cap shows
    stub = SimpleNamespace(num_key_value_groups=2, training=False, head_dim=8, config=SimpleNamespace())
    if has_sinks:
        stub.sinks = sinks
    named = {"softcap": soft_cap} if given else {}
    state = torch.get_rng_state()
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            got = function(stub, query, key, value, mask, scaling=scaling, dropout=0.0, **named)[0]
    except Exception:  # whatever a function does that is not of the known form
        return None
    finally:
        torch.set_rng_state(state)
    wide_key, wide_value = (x.double().repeat_interleave(2, 1) for x in (key, value))
    scores = query.double() @ wide_key.transpose(2, 3) * scaling
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores + mask
    for form in ("sinks", "plain") if has_sinks else ("plain",):
        logits = (
            torch.cat([scores, sinks.double().view(1, 4, 1, 1).expand(2, 4, 3, 1)], -1) if form == "sinks" else scores
        )
        expected = (logits.softmax(-1)[..., :5] @ wide_value).transpose(1, 2)
        if got.shape == expected.shape and torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-5):
            return form
    return None
