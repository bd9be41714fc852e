"""Comparison of what quartz produced with what the reference produced."""

from __future__ import annotations

import dataclasses
import math

import torch

from .records import Outcome, TensorRecord, values

PASSED, FAILED, ERROR, NO_REFERENCE = "passed", "failed", "error", "no_reference"


@dataclasses.dataclass
class Rules:
    """How strict a comparison is.

    Attributes
    ----------
    bit_equal
        Whether equality within the tolerance is not enough.
    values
        Whether elements are compared at all (not for operators that return uninitialised memory).
    strides
        Whether strides are compared.
    tolerance
        (rtol, atol), or None for PyTorch's default of the dtype.
    scale
        Adds this times the largest magnitude of the reference to the absolute tolerance: second derivatives are sums of
        terms that are larger than the sum.
    random
        Whether elements are random numbers of another generator: only their kind is compared.
    """

    bit_equal: bool
    values: bool = True
    strides: bool = True
    tolerance: tuple[float, float] | None = None
    scale: float = 0.0
    random: bool = False


@dataclasses.dataclass
class Verdict:
    """Result of one check (one kind of one operator and dtype) over all its samples."""

    status: str = NO_REFERENCE
    message: str = ""
    compared: int = 0
    without_reference: int = 0
    bit_equal: int = 0
    only_close: int = 0

    def lower(self, status: str, message: str) -> None:
        """Record a failure; the first one is kept."""
        if self.status not in (FAILED, ERROR):
            self.status, self.message = status, message.replace("\n", " ")[:400]


class Mismatch(Exception):
    """The two sides differ; the text says in what."""


def compare(reference: list[Outcome], got: list[Outcome], rules: Rules, *, errors: bool = False) -> Verdict:
    """Compare two lists of outcomes; with `errors` the exception types are what is compared."""
    verdict = Verdict()
    by_label = {outcome.label: outcome for outcome in got}
    for outcome in got:
        if outcome.label not in {ref.label for ref in reference}:
            verdict.lower(FAILED, f"{outcome.label}: the reference has no such result")
    for ref in reference:
        other = by_label.get(ref.label)
        if (ref.error is None) == errors:
            verdict.without_reference += 1
            if ref.error and verdict.status == NO_REFERENCE:
                verdict.message = verdict.message or f"{ref.label}: {ref.error[0]}: {ref.error[1]}"
            continue
        verdict.compared += 1
        try:
            if other is None:
                raise Mismatch("no such result")
            if errors:
                _compare_errors(ref, other)
            elif other.error is not None:
                verdict.lower(ERROR, f"{ref.label}: {other.error[0]}: {other.error[1]}")
                continue
            else:
                _compare_results(ref, other, rules, verdict)
        except Mismatch as difference:
            verdict.lower(FAILED, f"{ref.label}: {difference}")
    if verdict.compared and verdict.status == NO_REFERENCE:
        verdict.status, verdict.message = PASSED, ""
    return verdict


def _compare_errors(ref: Outcome, got: Outcome) -> None:
    if got.error is None:
        raise Mismatch(f"raised nothing, expected {ref.error[0]}: {ref.error[1][:150]}")
    if got.error[0] != ref.error[0]:
        raise Mismatch(f"{got.error[0]}: {got.error[1][:150]}, expected {ref.error[0]}: {ref.error[1][:150]}")


def _compare_results(ref: Outcome, got: Outcome, rules: Rules, verdict: Verdict) -> None:
    if ref.facts != got.facts:
        wrong = [
            key
            for key in ref.facts.keys() | got.facts.keys()
            if ref.facts.get(key) != got.facts.get(key)
            and not (not rules.bit_equal and _close_numbers(ref.facts.get(key), got.facts.get(key)))
        ]
        if wrong:
            raise Mismatch("; ".join(f"{key} is {got.facts.get(key)}, expected {ref.facts.get(key)}" for key in wrong))
    if ref.tensors.keys() != got.tensors.keys():
        raise Mismatch(f"tensors {list(got.tensors)}, expected {list(ref.tensors)}")
    for name, expected in ref.tensors.items():
        _compare_tensor(name, expected, got.tensors[name], rules, verdict)


def _close_numbers(expected: object, got: object) -> bool:
    # The text of a number that a program computed from tensors (a step length of LBFGS).
    try:
        return math.isclose(float(expected), float(got), rel_tol=1e-5)
    except (TypeError, ValueError):
        return False


def _compare_tensor(name: str, ref: TensorRecord, got: TensorRecord, rules: Rules, verdict: Verdict) -> None:
    for field in ("place", "dtype", "shape", "layout", "stride", "requires_grad", "bits"):
        if getattr(ref, field) != getattr(got, field) and (field != "stride" or rules.strides):
            raise Mismatch(f"{name}: {field} is {getattr(got, field)}, expected {getattr(ref, field)}")
    if len(ref.parts) != len(got.parts):
        raise Mismatch(f"{name}: {len(got.parts)} parts, expected {len(ref.parts)}")
    for number, (part, other) in enumerate(zip(ref.parts, got.parts, strict=True)):
        _compare_tensor(f"{name}[{number}]", part, other, rules, verdict)
    if ref.data is None or not rules.values:
        return
    if ref.data == got.data or _equal_with_nan(values(ref), values(got)):
        verdict.bit_equal += 1
        return
    if rules.random:
        _compare_kind(name, values(ref), values(got))
        verdict.only_close += 1
        return
    rtol, atol = rules.tolerance or (None, None)
    if rules.scale and not rules.tolerance and values(ref).is_floating_point():
        largest = values(ref).double().nan_to_num(0, 0, 0).abs().max().item()
        default = {torch.float32: 1.3e-6, torch.float64: 1e-7, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
        rtol = default.get(values(ref).dtype, 1e-2)
        atol = 1e-5 + rules.scale * largest
    try:
        torch.testing.assert_close(values(got), values(ref), rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as difference:
        raise Mismatch(f"{name}: {difference}") from None
    if rules.bit_equal:
        raise Mismatch(f"{name}: close, but not bit-equal; {_largest_difference(values(ref), values(got))}")
    verdict.only_close += 1


def _compare_kind(name: str, ref: torch.Tensor, got: torch.Tensor) -> None:
    """Random numbers: what all elements of the reference are, all elements must be."""
    ref, got = ((torch.view_as_real(x) if x.is_complex() else x).double() for x in (ref, got))
    kinds = {"finite": torch.isfinite}
    if ref.numel() >= 16:  # of fewer elements the signs may be a chance
        kinds |= {
            "not negative": lambda x: x >= 0,
            "whole": lambda x: x == x.trunc(),
        }
    for kind, test in kinds.items():
        if test(ref).all() and not test(got).all():
            raise Mismatch(f"{name}: elements are {kind} in the reference, here {got[~test(got)][0].item()}")


def _equal_with_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, except that every NaN counts as equal to every NaN."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return False
    nan = a.float().isnan()  # 8-bit floats have no isnan of their own
    if not torch.equal(nan, b.float().isnan()):
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(bits)[~nan], b.contiguous().view(bits)[~nan])


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return f"largest difference {(a.to(wide) - b.to(wide)).abs().max().item():.3g}"
