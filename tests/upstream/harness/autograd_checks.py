"""Checks of gradients: reverse mode, second order, in-place, non-contiguous inputs, and forward mode."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils._pytree import tree_map

from .placement import tensors_in
from .records import Outcome
from .run import OpRun

_COTANGENT_SEED = 77


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers drawn on the CPU, so that they are the same for every device; for other layouts, something simple."""
    if tensor.is_nested:
        return torch.ones_like(tensor)
    if tensor.layout != torch.strided:
        return tensor.detach().clone()
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.randn(tensor.shape, dtype=wide, generator=generator).to(tensor.dtype).to(tensor.device)


def differentiable(nest) -> list[torch.Tensor]:
    """The tensors of a result through which a gradient flows."""
    return [tensor for tensor in tensors_in(nest) if tensor.requires_grad]


def gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> dict:
    """First-order gradients for fixed random cotangents, by input number; None where there is none."""
    generator = torch.Generator().manual_seed(_COTANGENT_SEED)
    cotangents = [_random_like(output, generator) for output in outputs]
    return {"gradient": torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)}


def second_gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> dict:
    """Gradients of the first-order gradients with respect to the inputs and the cotangents."""
    generator = torch.Generator().manual_seed(_COTANGENT_SEED)
    cotangents = [_random_like(output, generator).requires_grad_() for output in outputs]
    first = torch.autograd.grad(outputs, inputs, cotangents, create_graph=True, allow_unused=True)
    firsts = differentiable(first)
    if not firsts:
        return {"gradient": first}
    seeds = [_random_like(gradient, generator) for gradient in firsts]
    second = torch.autograd.grad(firsts, [*inputs, *cotangents], seeds, allow_unused=True)
    return {"gradient": first, "second gradient": second}


def _through(run: OpRun, sample, take, function=None, *, clone_input: bool = False) -> tuple[dict, dict]:
    args, kwargs = run.place(sample, grad=True)
    inputs = differentiable((args, kwargs))
    if clone_input:  # an in-place operator may not write to a leaf
        args = (args[0].clone(), *args[1:])
    output = (function or run.op)(*args, **kwargs)
    outputs = differentiable(sample.output_process_fn_grad(output))
    if not outputs or not inputs:
        return {"output": output}, {"differentiable": False}
    return {"output": output, **take(outputs, inputs)}, {"differentiable": True}


def backward(run: OpRun) -> list[Outcome]:
    """Results in grad mode and the gradient of every input that asks for one."""
    if not run.differentiable:
        return []
    return [run.capture(f"sample {n}", lambda: _through(run, s, gradients)) for n, s in run.samples()]  # noqa: B023


def double_backward(run: OpRun) -> list[Outcome]:
    """Gradients of gradients.

    Autograd orders the nodes that are ready by a number that each thread counts for itself. A device has a thread of
    its own, so the order in which second-order gradients are summed differs from the CPU's. On the host substrate all
    work is therefore done in the calling thread here, which makes bits comparable.
    """
    if not (run.differentiable and run.op.supports_gradgrad):
        return []
    with torch.autograd.set_multithreading_enabled(run.target.substrate != "host"):
        return [run.capture(f"sample {n}", lambda: _through(run, s, second_gradients)) for n, s in run.samples(2)]  # noqa: B023


def double_backward_threads(run: OpRun) -> list[Outcome]:
    """The same on the host substrate with the device's own thread, as users have it: equal within the tolerance."""
    if not (run.differentiable and run.op.supports_gradgrad) or run.target.substrate != "host":
        return []
    return [run.capture(f"sample {n}", lambda: _through(run, s, second_gradients)) for n, s in run.samples(1)]  # noqa: B023


def inplace_backward(run: OpRun) -> list[Outcome]:
    """Gradients through the in-place variant."""
    function = run.op.get_inplace()
    if not run.differentiable or function is None or not run.op.supports_inplace_autograd:
        return []
    outcomes = []
    for number, sample in run.samples(2):
        if not sample.broadcasts_input and isinstance(sample.input, torch.Tensor):
            call = lambda: _through(run, sample, gradients, function, clone_input=True)  # noqa: B023, E731
            outcomes.append(run.capture(f"sample {number}", call))
    return outcomes


def noncontiguous_backward(run: OpRun) -> list[Outcome]:
    """Gradients for inputs that are spread out in memory."""
    if not run.differentiable:
        return []
    outcomes = []
    for number, sample in run.samples(2):
        try:
            spread = sample.noncontiguous()
        except Exception:  # the sample holds something that cannot be spread, such as a sparse tensor
            continue
        outcomes.append(run.capture(f"sample {number}", lambda: _through(run, spread, gradients)))  # noqa: B023
    return outcomes


def forward_mode(run: OpRun) -> list[Outcome]:
    """Tangents of forward-mode differentiation."""
    if not (run.differentiable and run.op.supports_forward_ad):
        return []
    return [run.capture(f"sample {n}", lambda: _tangents(run, s)) for n, s in run.samples(2)]  # noqa: B023


def _tangents(run: OpRun, sample) -> tuple[dict, dict]:
    args, kwargs = run.place(sample, grad=True)
    generator = torch.Generator().manual_seed(_COTANGENT_SEED)

    def dual(leaf):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.layout == torch.strided:
            return forward_ad.make_dual(leaf.detach(), _random_like(leaf, generator))
        return leaf

    with forward_ad.dual_level():
        args, kwargs = tree_map(dual, (args, kwargs))
        pairs = [forward_ad.unpack_dual(tensor) for tensor in tensors_in(run.op(*args, **kwargs))]
        primals = [pair.primal.detach().clone() for pair in pairs]
        tangents = [None if pair.tangent is None else pair.tangent.detach().clone() for pair in pairs]
    return {"primal": primals, "tangent": tangents}, {}
