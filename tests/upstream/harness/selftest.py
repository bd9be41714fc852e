"""A database of calls that go wrong on purpose, with which the tests of the harness show that it notices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from .records import Outcome, alias_facts
from .run import capture
from .target import Target


class Entry:
    """One misbehaviour: `body(tested, given)` is called on both sides and returns a tensor."""

    def __init__(self, body: Callable[[bool, torch.Tensor], torch.Tensor]) -> None:
        self.name = body.__name__
        self.dtypes = {torch.float32}
        self.body = body


class SelfRun:
    """Calls an entry; see :class:`harness.run.OpRun` for the parameters."""

    def __init__(self, target: Target, op: Entry, dtype: torch.dtype, samples: int) -> None:
        self.target = target
        self.op = op


def call(run: SelfRun) -> list[Outcome]:
    """The only check."""
    given = torch.arange(4.0, device=run.target.device)

    def body():
        result = run.op.body(run.target.role != "reference", given)
        return {"output": result}, {"aliases": alias_facts(given, result)}

    return [capture(run.target, "call", body)]


def right(tested: bool, given: torch.Tensor) -> torch.Tensor:
    return given + 1


def last_bit(tested: bool, given: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(given, given + 1) if tested else given.clone()


def sign_of_zero(tested: bool, given: torch.Tensor) -> torch.Tensor:
    return given * (-0.0 if tested else 0.0)


def value(tested: bool, given: torch.Tensor) -> torch.Tensor:
    return given + (2 if tested else 1)


def stride(tested: bool, given: torch.Tensor) -> torch.Tensor:
    square = given.reshape(2, 2)
    return square.clone() if tested else square.t().contiguous().t()


def copy_instead_of_view(tested: bool, given: torch.Tensor) -> torch.Tensor:
    return given[1:].clone() if tested else given[1:]


def place(tested: bool, given: torch.Tensor) -> torch.Tensor:
    return torch.empty(4, device="meta") if tested else given.clone()


def raises(tested: bool, given: torch.Tensor) -> torch.Tensor:
    if tested:
        raise ValueError("on purpose")
    return given


def reference_raises(tested: bool, given: torch.Tensor) -> torch.Tensor:
    if not tested:
        raise ValueError("on purpose")
    return given


def crash(tested: bool, given: torch.Tensor) -> torch.Tensor:
    if tested:
        os.abort()
    return given


def reference_crash(tested: bool, given: torch.Tensor) -> torch.Tensor:
    if not tested:
        os.abort()
    return given


def hang(tested: bool, given: torch.Tensor) -> torch.Tensor:
    if tested:
        time.sleep(3600)
    return given


def right_again(tested: bool, given: torch.Tensor) -> torch.Tensor:
    return given * 2


def entries() -> list[Entry]:
    """All entries; the right ones stand first and last, so that the sweep is seen to go on."""
    bodies = [
        right,
        last_bit,
        sign_of_zero,
        value,
        stride,
        copy_instead_of_view,
        place,
        raises,
        reference_raises,
        crash,
        reference_crash,
        hang,
        right_again,
    ]
    return [Entry(body) for body in bodies]
