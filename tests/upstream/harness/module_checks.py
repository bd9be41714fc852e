"""Checks of ``torch.nn`` modules: results, buffers, gradients, second-order gradients, transfer and state."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map

from .autograd_checks import differentiable, gradients, second_gradients
from .placement import Placer
from .records import Outcome
from .run import capture, pick
from .target import Target, start_counting


class ModuleRun:
    """The inputs of one module class and dtype, in training and evaluation mode.

    Parameters
    ----------
    target
        Device under test.
    info
        The ``ModuleInfo``.
    dtype
        Dtype of parameters and inputs.
    samples
        How many inputs a check may use at most in each mode.
    """

    def __init__(self, target: Target, info, dtype: torch.dtype, samples: int) -> None:
        self.target = target
        self.op = info
        self.dtype = dtype
        self.limit = samples
        self._samples = None

    def samples(self) -> list[tuple[str, bool, object]]:
        """(label, training, ModuleInput) of every input that is used."""
        if self._samples is None:
            self._samples = []
            for training in (True, False):
                torch.manual_seed(0)
                inputs = self.op.module_inputs_func(
                    self.op, device=self.target.native, dtype=self.dtype, requires_grad=True, training=training
                )
                mode = "training" if training else "evaluation"
                for number, sample in pick(inputs, self.limit):
                    if sample.forward_input is not None:
                        self._samples.append((f"{mode} input {number}", training, sample))
        return self._samples

    def build(self, sample, training: bool) -> torch.nn.Module:
        """Construct the module on the CPU with fixed random parameters and move it to the device."""
        torch.manual_seed(0)
        placer = Placer(self.target.native, "cpu", grad=True)
        args, kwargs = placer.place((sample.constructor_input.args, dict(sample.constructor_input.kwargs)))
        module = self.op.module_cls(*args, **kwargs).to(self.dtype).to(self.target.device)
        return module.train(training)

    def place(self, sample, *, grad: bool, change: Callable = lambda leaf: leaf) -> tuple[tuple, dict]:
        """Fresh copies of the forward arguments on the device."""
        source = sample.forward_input
        placer = Placer(self.target.native, self.target.device, grad=grad)
        placed = placer.place(tree_map(change, (source.args, dict(source.kwargs))))
        start_counting(self.target)
        return placed

    def each(self, check: Callable[[object, bool], tuple[dict, dict]]) -> list[Outcome]:
        """One outcome for each input."""
        return [
            capture(self.target, label, lambda: check(sample, training))  # noqa: B023
            for label, training, sample in self.samples()
        ]


def forward(run: ModuleRun) -> list[Outcome]:
    """Results without gradients, and parameters and buffers afterwards."""

    def check(sample, training):
        module = run.build(sample, training)
        args, kwargs = run.place(sample, grad=False)
        with torch.no_grad():
            output = module(*args, **kwargs)
        return {"output": output, "state": dict(module.state_dict())}, {}

    return run.each(check)


def _through(run: ModuleRun, take, change: Callable = lambda leaf: leaf):
    def check(sample, training):
        module = run.build(sample, training)
        args, kwargs = run.place(sample, grad=True, change=change)
        output = module(*args, **kwargs)
        inputs = [*differentiable((args, kwargs)), *(p for p in module.parameters() if p.requires_grad)]
        outputs = differentiable(output)
        if not outputs or not inputs:
            return {"output": output}, {"differentiable": False}
        return {"output": output, **take(outputs, inputs)}, {"differentiable": True}

    return run.each(check)


def backward(run: ModuleRun) -> list[Outcome]:
    """Gradients of inputs and parameters."""
    return _through(run, gradients)


def double_backward(run: ModuleRun) -> list[Outcome]:
    """Gradients of gradients, where the module has them; for the threads see ``autograd_checks.double_backward``."""
    if not run.op.supports_gradgrad:
        return []
    with torch.autograd.set_multithreading_enabled(run.target.substrate != "host"):
        return _through(run, second_gradients)


def noncontiguous_backward(run: ModuleRun) -> list[Outcome]:
    """Gradients for inputs that are spread out in memory."""
    from torch.testing._internal.common_utils import noncontiguous_like

    def spread(leaf):
        plain = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        return noncontiguous_like(leaf).detach().requires_grad_(leaf.requires_grad) if plain else leaf

    return _through(run, gradients, spread)


def transfer(run: ModuleRun) -> list[Outcome]:
    """Copies of the module: ``deepcopy`` on the device, ``load_state_dict``, and back to the CPU."""

    def check(sample, training):
        module = run.build(sample, training)
        args, kwargs = run.place(sample, grad=False)
        with torch.no_grad():
            module(*args, **kwargs)  # a lazy module gets its parameters here
            twin = copy.deepcopy(module)
            loaded = run.build(sample, training)
            loaded(*args, **kwargs)
            loaded.load_state_dict(module.state_dict())
        before = dict(module.named_parameters())
        states = {"copy": dict(twin.state_dict()), "loaded": dict(loaded.state_dict())}
        back = module.to("cpu")
        kept = [before[name] is parameter for name, parameter in back.named_parameters()]
        states["back on the CPU"] = {name: t.to(run.target.device) for name, t in back.state_dict().items()}
        return states, {"parameters kept": kept, "on the CPU": all(p.device.type == "cpu" for p in back.parameters())}

    return run.each(check)
