"""Checks of ``torch.optim``: some steps of every optimizer and implementation, its state, saving and loading."""

from __future__ import annotations

import copy

import torch

from .records import Outcome
from .run import capture
from .target import Target

_SHAPES = ((5, 4), (3, 4))  # two matrices: one optimizer (Muon) takes nothing else
_STEPS = 3


class OptimizerRun:
    """The configurations of one optimizer for one dtype of parameters.

    Parameters
    ----------
    target
        Device under test.
    info
        The ``OptimizerInfo``.
    dtype
        Dtype of the parameters.
    samples
        Not used: every configuration is run.
    """

    def __init__(self, target: Target, info, dtype: torch.dtype, samples: int) -> None:
        self.target = target
        self.op = info
        self.dtype = dtype

    def parameters(self) -> list[torch.nn.Parameter]:
        """Fixed random parameters on the device."""
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        generator = torch.Generator().manual_seed(5)
        values = [torch.randn(shape, dtype=wide, generator=generator) for shape in _SHAPES]
        return [torch.nn.Parameter(value.to(self.dtype).to(self.target.device)) for value in values]

    def loss(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        """A loss whose gradient depends on the parameters."""
        return sum((p.abs() ** 2).sum() + (p * 0.5).real.sum() for p in parameters)

    def each(self, implementation: str, sparse: bool = False) -> list[Outcome]:
        """One outcome for each configuration, with one implementation of the step."""
        flags = {} if implementation == "plain" else {implementation: True}
        outcomes = []
        for number, config in enumerate(self.op.optim_inputs_func(device=self.target.native)):
            kwargs = {**copy.deepcopy(config.kwargs), **flags}
            if implementation == "plain" and "foreach" in self.op.supported_impls:
                kwargs.setdefault("foreach", False)
            label = f"configuration {number} ({config.desc})"
            outcomes.append(capture(self.target, label, lambda: self._train(kwargs, sparse)))  # noqa: B023
        return outcomes

    def _train(self, kwargs: dict, sparse: bool) -> tuple[dict, dict]:
        parameters = self.parameters()
        optimizer = self.op.optim_cls(parameters, **kwargs)
        for _ in range(_STEPS):
            self._step(optimizer, parameters, sparse)
        saved = copy.deepcopy(optimizer.state_dict())
        middle = [p.detach().clone() for p in parameters]
        again = self.op.optim_cls(parameters, **copy.deepcopy(kwargs))
        again.load_state_dict(saved)
        self._step(again, parameters, sparse)
        states = [dict(again.state[p]) for p in parameters]
        facts = {}
        if self.target.native != "cpu":  # step counters and a tensor learning rate may stay on the CPU
            facts["states on the CPU"] = [k for s in states for k, v in s.items() if _on_cpu(v)]
        states = torch.utils._pytree.tree_map(lambda v: v.to(self.target.device) if _on_cpu(v) else v, states)
        return {"parameters": middle, "after loading": list(parameters), "state": states}, facts

    def _step(self, optimizer, parameters: list, sparse: bool) -> None:
        def closure():
            optimizer.zero_grad()
            loss = self.loss(parameters)
            loss.backward()
            if sparse:
                for p in parameters:
                    p.grad = p.grad.to_sparse()
            return loss

        if self.op.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _on_cpu(value) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def plain(run: OptimizerRun) -> list[Outcome]:
    """The loop over single tensors."""
    return [] if run.op.only_supports_sparse_grads else run.each("plain")


def foreach(run: OptimizerRun) -> list[Outcome]:
    """The implementation with ``torch._foreach_*`` operators."""
    return run.each("foreach") if "foreach" in run.op.supported_impls else []


def fused(run: OptimizerRun) -> list[Outcome]:
    """The implementation with one fused operator."""
    supported = "fused" in run.op.supported_impls and run.target.native in run.op.supports_fused_on
    return run.each("fused") if supported else []


def sparse_gradients(run: OptimizerRun) -> list[Outcome]:
    """Sparse gradients, for the optimizers that take them."""
    return run.each("plain", sparse=True) if run.op.supports_sparse or run.op.only_supports_sparse_grads else []
