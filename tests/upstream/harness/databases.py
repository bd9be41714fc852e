"""PyTorch's databases of operators, modules and optimizers, and the checks that each gets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from . import autograd_checks, layout_checks, module_checks, op_checks, optimizer_checks, selftest
from .run import OpRun

OP_CHECKS = {
    "forward": op_checks.forward,
    "backward": autograd_checks.backward,
    "double_backward": autograd_checks.double_backward,
    "double_backward_threads": autograd_checks.double_backward_threads,
    "forward_mode": autograd_checks.forward_mode,
    "inplace": op_checks.inplace,
    "inplace_backward": autograd_checks.inplace_backward,
    "out": op_checks.out,
    "out_errors": op_checks.out_errors,
    "view": op_checks.view,
    "noncontiguous": op_checks.noncontiguous,
    "noncontiguous_backward": autograd_checks.noncontiguous_backward,
    "lazy_bits": op_checks.lazy_bits,
    "variants": op_checks.variants,
    "errors": op_checks.errors,
    "sparse": layout_checks.sparse,
    "sparse_backward": layout_checks.sparse_backward,
}
MODULE_CHECKS = {
    name: getattr(module_checks, name)
    for name in ("forward", "backward", "double_backward", "noncontiguous_backward", "transfer")
}
OPTIMIZER_CHECKS = {name: getattr(optimizer_checks, name) for name in ("plain", "foreach", "fused", "sparse_gradients")}
FOREACH_CHECKS = {name: OP_CHECKS[name] for name in ("forward", "backward", "inplace")}
NESTED_CHECKS = {name: OP_CHECKS[name] for name in ("forward", "backward")}

# Checks whose outcome is the exception.
ERROR_CHECKS = ("errors", "out_errors")
# Checks in which the order of sums, and so strides and last bits, depends on the autograd threads.
UNORDERED_CHECKS = ("double_backward_threads",)
# Error inputs do not depend on the dtype: they are run once for each operator.
_ONCE_PER_OPERATOR = ("errors",)


@dataclasses.dataclass(frozen=True)
class Database:
    """One source of variants.

    Attributes
    ----------
    load
        Gives the entries.
    checks
        The checks of its entries, by name.
    run
        Class that holds the samples of an entry and dtype.
    """

    load: Callable[[], list]
    checks: dict[str, Callable]
    run: type


def _op_db() -> list:
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def _foreach_db() -> list:
    from torch.testing._internal import common_methods_invocations as source

    names = ("unary", "binary", "pointwise", "reduce", "other")
    return [op for name in names for op in getattr(source, f"foreach_{name}_op_db")]


def _nested_db() -> list:
    from torch.testing._internal.opinfo.definitions.nested import njt_op_db

    return [op for op in njt_op_db if op.supports_njt]


def _module_db() -> list:
    from torch.testing._internal.common_modules import module_db

    return module_db


def _optim_db() -> list:
    from torch.testing._internal.common_optimizers import optim_db

    return optim_db


DATABASES = {
    "op_db": Database(_op_db, OP_CHECKS, OpRun),
    "foreach_db": Database(_foreach_db, FOREACH_CHECKS, OpRun),
    "nested_db": Database(_nested_db, NESTED_CHECKS, OpRun),
    "module_db": Database(_module_db, MODULE_CHECKS, module_checks.ModuleRun),
    "optim_db": Database(_optim_db, OPTIMIZER_CHECKS, optimizer_checks.OptimizerRun),
    "selftest": Database(selftest.entries, {"call": selftest.call}, selftest.SelfRun),
}
SWEPT = tuple(name for name in DATABASES if name != "selftest")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One entry of a database with one dtype; `checks` are run one after the other."""

    database: str
    name: str
    dtype: str
    checks: tuple[str, ...]


def entry_name(entry) -> str:
    """The name under which an entry is listed, with its variant."""
    return entry.formatted_name if isinstance(getattr(entry, "formatted_name", None), str) else entry.name


@functools.cache
def entries(database: str) -> dict:
    """The entries of a database by name; a name that repeats gets a number."""
    found: dict[str, object] = {}
    for entry in DATABASES[database].load():
        name = entry_name(entry)
        number = 2
        while name in found:
            name = f"{entry_name(entry)}#{number}"
            number += 1
        found[name] = entry
    return found


def _dtypes(database: str, entry, substrate: str) -> list[torch.dtype]:
    if database == "optim_db":
        base = [torch.float32, torch.float64, torch.bfloat16]
        return base + ([torch.complex64] if entry.supports_complex else [])
    if database == "nested_db":
        return [d for d in (torch.float32, torch.float16) if d in entry.dtypes]  # samples are drawn by randn
    on_cuda = substrate == "cuda" and hasattr(entry, "dtypesIfCUDA")
    return sorted(entry.dtypesIfCUDA if on_cuda else entry.dtypes, key=str)


def variants(database: str, substrate: str) -> Iterator[Variant]:
    """All variants of a database, in a fixed order."""
    for name, entry in entries(database).items():
        dtypes = _dtypes(database, entry, substrate)
        first = torch.float32 if torch.float32 in dtypes else (dtypes or [None])[0]
        for dtype in dtypes:
            checks = DATABASES[database].checks
            kept = tuple(check for check in checks if check not in _ONCE_PER_OPERATOR or dtype == first)
            yield Variant(database, name, str(dtype).removeprefix("torch."), kept)
