"""Checks of operators without autograd: results, in-place, ``out=``, views, layouts of inputs, error inputs."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map

from .exclusions import ARGUMENTS_ON_CPU
from .placement import Placer, tensors_in
from .records import Outcome, alias_facts
from .run import OpRun


def forward(run: OpRun) -> list[Outcome]:
    """Values, dtypes, strides, devices, aliasing and version counters of a plain call."""
    outcomes = []
    for number, sample in run.samples():
        args, kwargs = run.place(sample, grad=False)
        outcomes.append(run.capture(f"sample {number}", lambda: run.call(args, kwargs)))  # noqa: B023
    return outcomes


def noncontiguous(run: OpRun) -> list[Outcome]:
    """The same with every input spread out in memory."""
    outcomes = []
    for number, sample in run.samples(2):
        try:
            spread = sample.noncontiguous()
        except Exception:  # the sample holds something that cannot be spread, such as a sparse tensor
            continue
        args, kwargs = run.place(spread, grad=False)
        outcomes.append(run.capture(f"sample {number}", lambda: run.call(args, kwargs)))  # noqa: B023
    return outcomes


def lazy_bits(run: OpRun) -> list[Outcome]:
    """Inputs that carry the conjugate bit (complex dtypes) or the negative bit."""
    outcomes = []
    for number, sample in run.samples(1):
        for name, transform in (("conjugate", _conjugated), ("negative", _negated)):
            args, kwargs = run.place(sample, grad=False)
            lazy = tree_map(lambda leaf: transform(leaf) if isinstance(leaf, torch.Tensor) else leaf, args)  # noqa: B023
            if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors_in(lazy)):
                label = f"sample {number}, {name} bit"
                outcomes.append(run.capture(label, lambda: run.call(lazy, kwargs)))  # noqa: B023
    return outcomes


def _conjugated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj() if tensor.is_complex() and tensor.layout == torch.strided else tensor


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    numeric = tensor.layout == torch.strided and (tensor.is_floating_point() or tensor.is_complex())
    return torch._neg_view(tensor) if numeric else tensor


def variants(run: OpRun) -> list[Outcome]:
    """Method, Python operator and alias spellings of the operator."""
    spellings = {"method": run.op.get_method(), "operator": run.op.get_operator()}
    for alias in run.op.aliases:
        spellings[f"alias {alias.name}"] = alias.op
        spellings[f"alias method {alias.name}"] = alias.method_variant
    outcomes = []
    for number, sample in run.samples(1):
        for name, function in spellings.items():
            if function is None or function is run.op.op:
                continue
            args, kwargs = run.place(sample, grad=False)
            label = f"sample {number}, {name}"
            outcomes.append(run.capture(label, lambda: run.call(args, kwargs, function)))  # noqa: B023
    return outcomes


def inplace(run: OpRun) -> list[Outcome]:
    """In-place variants: the object that is passed comes back, in the same memory."""
    functions = {"method": run.op.get_inplace(), "operator": run.op.get_inplace_operator()}
    for alias in run.op.aliases:
        functions[f"alias {alias.name}"] = alias.inplace_variant
    outcomes = []
    for number, sample in run.samples(3):
        if sample.broadcasts_input:
            continue
        for name, function in functions.items():
            if function is None:
                continue
            args, kwargs = run.place(sample, grad=False)
            label = f"sample {number}, {name}"
            outcomes.append(run.capture(label, lambda: _call_inplace(run, function, args, kwargs)))  # noqa: B023
    return outcomes


def _call_inplace(run: OpRun, function, args: tuple, kwargs: dict) -> tuple[dict, dict]:
    addresses = [tensor.data_ptr() for tensor in tensors_in(args[0]) if tensor.layout == torch.strided]
    nests, facts = run.call(args, kwargs, function)
    facts["returned the input"] = nests["output"] is args[0]
    after = [tensor.data_ptr() for tensor in tensors_in(args[0]) if tensor.layout == torch.strided]
    facts["memory kept"] = addresses == after
    return nests, facts


def out(run: OpRun) -> list[Outcome]:
    """``out=``: the right size, empty, with other strides, and with a dtype that does not fit."""
    if not run.op.supports_out:
        return []
    outcomes = []
    for number, sample in run.samples(3):
        args, kwargs = run.place(sample, grad=False)
        try:
            torch.manual_seed(0)
            expected = run.op(*args, **kwargs)
        except Exception:  # charged to the forward check
            continue
        plain = all(tensor.layout == torch.strided for tensor in tensors_in(expected))
        for name in ("sized", "empty", "reversed strides") if plain else ("sized",):
            args, kwargs = run.place(sample, grad=False)
            given = tree_map(lambda leaf: _out_tensor(leaf, name), expected)  # noqa: B023
            outcomes.append(run.capture(f"sample {number}, {name}", lambda: _call_out(run, args, kwargs, given)))  # noqa: B023
    return outcomes


def out_errors(run: OpRun) -> list[Outcome]:
    """``out=`` of a dtype to which the result cannot be cast is refused with the same exception."""
    if not run.op.supports_out or not (run.dtype.is_floating_point or run.dtype.is_complex):
        return []
    outcomes = []
    for number, sample in run.samples(1):
        args, kwargs = run.place(sample, grad=False)
        try:
            expected = run.op(*args, **kwargs)
        except Exception:  # charged to the forward check
            continue
        given = tree_map(lambda leaf: _out_tensor(leaf, "wrong dtype"), expected)
        outcomes.append(run.capture(f"sample {number}", lambda: _call_out(run, args, kwargs, given)))  # noqa: B023
    return outcomes


def _out_tensor(leaf, kind: str):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout != torch.strided:
        return leaf.clone()
    if kind == "empty":
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    if kind == "wrong dtype":
        return torch.empty_like(leaf, dtype=torch.int64)
    strides = leaf.stride()
    if kind == "reversed strides":
        strides = torch.empty(leaf.shape[::-1], device="meta").permute(tuple(reversed(range(leaf.dim())))).stride()
    return torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=leaf.device).fill_(1)


def _call_out(run: OpRun, args: tuple, kwargs: dict, given) -> tuple[dict, dict]:
    tensors = [tensor for tensor in tensors_in(given) if tensor.layout == torch.strided]
    before = [tensor.data_ptr() for tensor in tensors]
    sized = [tensor.numel() > 0 for tensor in tensors]
    returned = run.op(*args, **kwargs, out=given)
    same = [a is b for a, b in zip(tensors_in(given), tensors_in(returned), strict=False)]  # some return None
    after = [tensor.data_ptr() for tensor in tensors]
    kept = [a == b for a, b, had_elements in zip(after, before, sized, strict=True) if had_elements]
    facts = {"returned the out tensors": same, "memory kept": kept}
    return {"out": given}, facts


def view(run: OpRun) -> list[Outcome]:
    """Results that share memory with an input: a write to the result is seen in the input."""
    outcomes = []
    for number, sample in run.samples():
        args, kwargs = run.place(sample, grad=False)
        try:
            torch.manual_seed(0)
            output = run.op(*args, **kwargs)
        except Exception:  # charged to the forward check
            continue
        aliases = alias_facts((args, kwargs), output)
        if any(relation[1] == "shares" and relation[2] == "input" for relation in aliases):
            label = f"sample {number}"
            given = args[0] if run.op.name in ARGUMENTS_ON_CPU else (args, kwargs)
            outcomes.append(run.capture(label, lambda: _write_through(given, output, aliases)))  # noqa: B023
    return outcomes


def _write_through(given, output, aliases: list) -> tuple[dict, dict]:
    outputs = tensors_in(output)
    for relation in aliases:
        result = outputs[relation[0]]
        if result.is_floating_point() or result.is_complex():
            result.mul_(2)
        else:
            result.zero_()
    return {"input": given, "output": output}, {"aliases": aliases}


def errors(run: OpRun) -> list[Outcome]:
    """Inputs that the database says are wrong: the same type of exception."""
    if run.op.error_inputs_func is None:
        return []
    outcomes = []
    for number, wrong in enumerate(run.op.error_inputs(run.target.native)):
        sample = wrong.sample_input
        placer = Placer(run.target.native, run.target.device, grad=True)
        try:
            args, kwargs = placer.place(((sample.input, *sample.args), dict(sample.kwargs)))
        except Exception:  # the wrong thing is the tensor itself (memory that overlaps), which cannot be copied
            continue
        outcomes.append(run.capture(f"error input {number}", lambda: run.call(args, kwargs)))  # noqa: B023
    return outcomes
