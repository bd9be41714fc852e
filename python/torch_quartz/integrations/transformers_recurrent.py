"""Transformers: models that carry a state over a sequence run `selective_scan` and `gated_delta_rule` on quartz.

Transformers has two functions for each recurrence, one for a whole sequence and one for a token with a state, which add
in different orders. Both become one operator, which takes token after token: the bits are then the same. As with the
fused modules (transformers_fused.py, which looks through the model files), a function is replaced if it gives on a few
numbers what the operator gives; gradients are those of the original, computed when they are wanted.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Call = dict[str, Any]
_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))


def make_replacement(name: str) -> Callable[[Callable], Callable] | None:
    """Return what makes the replacement of a function of that name, None if there is none.

    Parameters
    ----------
    name : str
        Its name in a model file of Transformers.
    """
    run = _FUNCTIONS.get(name)
    return None if run is None else functools.partial(_replace, run)


def _replace(run: Callable[[Call], Any | None], original: Callable) -> Callable:
    signature = inspect.signature(original)
    allowed: list[bool] = []

    @functools.wraps(original)
    def recurrence(*arguments: Any, **options: Any) -> Any:
        first = arguments[0] if arguments else next(iter(options.values()), None)
        if not isinstance(first, Tensor) or first.device.type != "quartz" or torch.compiler.is_compiling():
            return original(*arguments, **options)
        if not allowed:
            allowed.append(_agrees(run, original))
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        call = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        if not allowed[0] or not _is_served(call):
            return original(*arguments, **options)
        tensors = {key: value for key, value in call.items() if isinstance(value, Tensor)}
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
            return _with_gradients(run, original, bound, tensors)
        return run(call)

    return recurrence


def _is_served(call: Call) -> bool:
    if call.get("cu_seqlens") is not None or call.get("seq_idx") is not None or call.get("use_mambapy"):
        return False
    tensors = [value for value in call.values() if isinstance(value, Tensor)]
    return all(tensor.device.type in ("quartz", "cpu") and tensor.dtype in _FLOATS for tensor in tensors)


def _agrees(run: Callable[[Call], Any], original: Callable) -> bool:
    """Whether a function and the operator give the same on the CPU, up to rounding."""
    signature, state = inspect.signature(original), torch.get_rng_state()
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for example in _EXAMPLES[run]():
                known = {key: value for key, value in example.items() if key in signature.parameters}
                if example.get("newer") and not _accepts(original, known):
                    continue
                results = []
                for function in (original, _called_with(run, signature)):
                    given = {key: v.clone() if isinstance(v, Tensor) else v for key, v in known.items()}
                    results.append((_tensors(function(**given)), [v for v in given.values() if isinstance(v, Tensor)]))
                for got, expected in zip(*(result + changed for result, changed in results), strict=True):
                    if got.shape != expected.shape or not torch.allclose(got, expected, rtol=1e-3, atol=1e-4):
                        return False
        return True
    except Exception:  # whatever a function does that is not of the known form
        return False
    finally:
        torch.set_rng_state(state)


def _accepts(function: Callable, call: Call) -> bool:
    try:
        function(**call)
    except Exception:  # of whatever type: an older form of the function
        return False
    return True


def _called_with(run: Callable[[Call], Any], signature: inspect.Signature) -> Callable:
    def call(**options: Any) -> Any:
        bound = signature.bind(**options)
        bound.apply_defaults()
        return run({**bound.arguments, **bound.arguments.get("kwargs", {})})

    return call


def _tensors(result: Any) -> list[Tensor]:
    return [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, Tensor)]


def _with_gradients(
    run: Callable, original: Callable, bound: inspect.BoundArguments, tensors: dict[str, Tensor]
) -> Any:
    names = list(tensors)
    whole: list[Any] = []

    class Recurrence(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
            ctx.save_for_backward(*given)
            result = run({**bound.arguments, **dict(zip(names, given, strict=True))})
            whole.append(result)
            return tuple(_tensors(result))

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
                again = inspect.BoundArguments(bound.signature, dict(bound.arguments))
                again.arguments.update(zip(names, leaves, strict=True))
                outputs = _tensors(original(*again.args, **again.kwargs))
                pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None]
                wanted = [leaf for leaf in leaves if leaf.requires_grad]
                found = iter(
                    torch.autograd.grad(
                        [o for o, _ in pairs], wanted, [g.to(o.dtype) for o, g in pairs], allow_unused=True
                    )
                )
            return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)

    results = Recurrence.apply(*tensors.values())
    if not isinstance(whole[0], tuple):
        return results[0]
    parts = iter(results)
    return tuple(next(parts) if isinstance(part, Tensor) else part for part in whole[0])


# ---- the functions ----


def _selective_scan(call: Call) -> Any:
    from torch_quartz.ops import selective_scan

    y, state = selective_scan(
        call["hidden_states"],
        call["dt"],
        call["A"],
        call["B"].transpose(1, 2),
        call["C"].transpose(1, 2),
        D=call["D"],
        z=call["z"],
        dt_bias=call["delta_bias"],
        dt_softplus=call["delta_softplus"],
    )
    return (y, state) if call["return_last_state"] else y


def _selective_state_update(call: Call) -> Tensor:
    from torch_quartz.ops import selective_scan

    x, z = call["hidden_states"], call["z"]
    y, state = selective_scan(
        x.unsqueeze(2),
        call["dt"].unsqueeze(2),
        call["A"],
        call["B"].unsqueeze(1),
        call["C"].unsqueeze(1),
        D=call["D"],
        z=None if z is None else z.unsqueeze(2),
        dt_bias=call["dt_bias"],
        dt_softplus=call["dt_softplus"],
        state=call["state"],
    )
    call["state"].copy_(state)
    return y.squeeze(2).to(x.dtype)


def _gated_delta_rule(call: Call) -> tuple[Tensor, Tensor | None]:
    from torch_quartz.ops import gated_delta_rule

    query, key = call["query"].float(), call["key"].float()
    if call["use_qk_l2norm_in_kernel"]:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    output, state = gated_delta_rule(
        query * query.shape[-1] ** -0.5, key, call["value"], call["g"], call["beta"], state=call["initial_state"]
    )
    return output.to(call["query"].dtype), state if call["output_final_state"] else None


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cpu")


def _scan_examples() -> list[Call]:
    torch.manual_seed(0)
    example = {
        "hidden_states": _random(2, 3, 5),
        "dt": _random(2, 3, 5),
        "A": -_random(3, 4).exp(),
        "B": _random(2, 4, 5),
        "C": _random(2, 4, 5),
        "D": _random(3),
        "z": _random(2, 3, 5),
        "delta_bias": _random(3),
        "delta_softplus": True,
        "return_last_state": True,
    }
    return [example, {**example, "z": None, "D": None, "delta_bias": None}]


def _update_examples() -> list[Call]:
    torch.manual_seed(0)
    return [
        {
            "state": _random(2, 3, 4),
            "hidden_states": _random(2, 3),
            "dt": _random(2, 3),
            "A": -_random(3, 4).exp(),
            "B": _random(2, 4),
            "C": _random(2, 4),
            "D": _random(3),
            "z": _random(2, 3),
            "dt_bias": _random(3),
            "dt_softplus": True,
        }
    ]


def _rule_examples() -> list[Call]:
    torch.manual_seed(0)
    example = {
        "query": _random(2, 5, 4, 8),
        "key": F.normalize(_random(2, 5, 4, 8), dim=-1),
        "value": _random(2, 5, 4, 3),
        "g": -_random(2, 5, 4).exp(),
        "beta": _random(2, 5, 4).sigmoid(),
        "initial_state": _random(2, 4, 8, 3),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    fewer_keys = {"query": example["query"][:, :, :2], "key": example["key"][:, :, :2], "newer": True}
    return [
        example,
        {**example, "use_qk_l2norm_in_kernel": False, "initial_state": None},
        {**example, **fewer_keys},  # Transformers before 5.20 repeats the heads outside of the function
    ]


_FUNCTIONS: dict[str, Callable[[Call], Any]] = {
    "mamba_selective_scan": _selective_scan,
    "mamba_selective_state_update": _selective_state_update,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _gated_delta_rule,
}
_EXAMPLES: dict[Callable[[Call], Any], Callable[[], list[Call]]] = {
    _selective_scan: _scan_examples,
    _selective_state_update: _update_examples,
    _gated_delta_rule: _rule_examples,
}
