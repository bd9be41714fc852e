"""Checks of operators on sparse layouts, for the operators whose database entry has such samples."""

from __future__ import annotations

import unittest

import torch
from torch.testing._internal.opinfo.core import SampleInput

from .autograd_checks import _through, gradients
from .records import Outcome
from .run import OpRun, pick

LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_SAMPLES_PER_LAYOUT = 3


def _sparse_samples(run: OpRun, layout: torch.layout) -> list[tuple[str, object]]:
    if not run.op.supports_sparse_layout(layout):
        return []
    name = str(layout).removeprefix("torch.")
    try:
        generated = run.op.sample_inputs_sparse(layout, run.target.native, run.dtype, requires_grad=run.differentiable)
        return [(f"{name} sample {number}", sample) for number, sample in pick(generated, _SAMPLES_PER_LAYOUT)]
    except unittest.SkipTest:  # no samples for this layout and dtype
        return []
    except NotImplementedError:  # the database says that the layout is supported and gives no samples
        return [(f"{name} own sample {n}", sample) for n, sample in enumerate(_own_samples(run, layout))]


def _own_samples(run: OpRun, layout: torch.layout) -> list[SampleInput]:
    """For operators of one tensor: a small matrix and one without any element that is stored."""
    blocks = {"blocksize": (2, 1)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    samples = []
    for high in (1, 0):
        dense = torch.zeros(4, 3, dtype=run.dtype, device=run.target.native)
        dense[1] = high
        dense[2, 2] = high
        sparse_input = dense.to_sparse(layout=layout, **blocks).requires_grad_(run.differentiable)
        samples.append(SampleInput(sparse_input))
    return samples


def sparse(run: OpRun) -> list[Outcome]:
    """A plain call on sparse inputs of every layout the operator takes."""
    outcomes = []
    for layout in LAYOUTS:
        for label, sample in _sparse_samples(run, layout):
            args, kwargs = run.place(sample, grad=False)
            outcomes.append(run.capture(label, lambda: run.call(args, kwargs)))  # noqa: B023
    return outcomes


def sparse_backward(run: OpRun) -> list[Outcome]:
    """Gradients through sparse inputs."""
    if not run.differentiable:
        return []
    outcomes = []
    for layout in LAYOUTS:
        for label, sample in _sparse_samples(run, layout):
            outcomes.append(run.capture(label, lambda: _through(run, sample, gradients)))  # noqa: B023
    return outcomes
