"""One variant (an operator and a dtype) in one process: its samples, their copies on the device, captured calls."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable

import torch

from . import exclusions
from .placement import Placer, tensors_in
from .records import Outcome, Reader, alias_facts, record
from .target import Target, start_counting, stop_counting, synchronize

SEED = 1234
# Samples taken from the generator, in this order: the first ones are the plainest, the later ones add variety.
_PICKS = (0, 1, 2, 4, 8, 16, 3, 5, 6, 7)


def pick(items: Iterable, count: int) -> list[tuple[int, object]]:
    """At most `count` (number, item) pairs, spread over the first items of a generator that may be long."""
    wanted = _PICKS[:count]
    found = list(itertools.islice(items, max(wanted) + 1)) if wanted else []
    chosen = [number for number in wanted if number < len(found)]
    chosen += [number for number in range(len(found)) if number not in chosen][: count - len(chosen)]
    return [(number, found[number]) for number in sorted(chosen)]


def seed() -> None:
    """Give the same random numbers to both sides."""
    torch.manual_seed(SEED)


def capture(target: Target, label: str, call: Callable[[], tuple[dict, dict]]) -> Outcome:
    """Run `call`, which returns named nests of tensors and facts, and describe what came out.

    Operator calls are counted from the last placement of samples inside `call` to its end.
    Non-tensor leaves (numbers, sizes) of a nest become facts, so that they are compared for equality.
    """
    try:
        seed()
        start_counting(target)
        nests, facts = call()
        stop_counting(target)
        outcome = Outcome(label, facts=facts)
        reader = Reader()
        for name, nest in nests.items():
            leaves, structure = torch.utils._pytree.tree_flatten(nest)
            facts[f"{name} structure"] = repr(structure)
            for number, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    outcome.tensors[f"{name}[{number}]"] = record(leaf, target.device, reader)
                elif leaf is None or isinstance(leaf, (bool, int, float, complex, str, torch.dtype)):
                    facts[f"{name}[{number}]"] = repr(leaf)
        reader.read()
        synchronize(target)
        return outcome
    except Exception as error:
        return Outcome(label, error=(type(error).__name__, str(error)[:300]))


class OpRun:
    """The samples of one operator and dtype, and calls of the operator on copies of them.

    Parameters
    ----------
    target
        Device under test.
    op
        The ``OpInfo``.
    dtype
        Dtype the samples are made for.
    samples
        How many samples a check may use at most.
    """

    def __init__(self, target: Target, op, dtype: torch.dtype, samples: int) -> None:
        self.target = target
        self.op = op
        self.dtype = dtype
        self.limit = samples
        self._samples = None

    @property
    def differentiable(self) -> bool:
        """Whether gradients exist for this dtype on the substrate."""
        floating = self.dtype.is_floating_point or self.dtype.is_complex
        on_cuda = self.target.substrate == "cuda"
        dtypes = self.op.backward_dtypesIfCUDA if on_cuda else self.op.backward_dtypes
        return bool(self.op.supports_autograd and floating and self.dtype in dtypes)

    def samples(self, limit: int | None = None) -> list[tuple[int, object]]:
        """At most `limit` numbered samples on the native device."""
        if self._samples is None:
            generated = self.op.sample_inputs(self.target.native, self.dtype, requires_grad=self.differentiable)
            self._samples = pick(generated, self.limit)
        return self._samples[: min(limit or self.limit, self.limit)]

    def place(self, sample, *, grad: bool) -> tuple[tuple, dict]:
        """Fresh copies of the arguments of `sample` on the device: (args, kwargs)."""
        placer = Placer(self.target.native, self.target.device, grad=grad)
        args = (sample.input, *sample.args)
        if self.op.name in exclusions.ARGUMENTS_ON_CPU:
            moved = (placer.place(sample.input), *sample.args)
            start_counting(self.target)
            return moved, dict(sample.kwargs)
        moved, kwargs = placer.place((args, dict(sample.kwargs)))
        if not tensors_in((moved, kwargs)) and "device" not in kwargs and accepts_device(self.op):
            kwargs["device"] = self.target.device
        start_counting(self.target)
        return moved, kwargs

    def capture(self, label: str, call: Callable[[], tuple[dict, dict]]) -> Outcome:
        """See :func:`capture`."""
        return capture(self.target, label, call)

    def call(self, args: tuple, kwargs: dict, function: Callable | None = None) -> tuple[dict, dict]:
        """Call the operator and describe outputs, changed inputs and aliasing."""
        inputs = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in inputs]
        output = (function or self.op)(*args, **kwargs)
        changes = [tensor._version - before for tensor, before in zip(inputs, versions, strict=True)]
        changed = {str(number): inputs[number] for number, count in enumerate(changes) if count}
        facts = {"aliases": alias_facts(inputs, output), "version changes": changes}
        return {"output": output, "changed input": changed}, facts


def accepts_device(op) -> bool:
    """Whether the operator is a factory: it makes tensors and takes ``device=``."""
    if getattr(op, "is_factory_function", False) or op.name in exclusions.FACTORIES:
        return True
    try:
        return "device" in inspect.signature(op.op).parameters
    except (TypeError, ValueError):
        return False
