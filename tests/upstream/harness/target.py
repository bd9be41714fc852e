"""The two sides of a comparison: which device a process works on, and how it is loaded."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import sys

ROLES = ("reference", "quartz", "control")
NATIVE_DEVICE = {"host": "cpu", "cuda": "cuda"}


@dataclasses.dataclass(frozen=True)
class Target:
    """What a worker process computes on.

    Attributes
    ----------
    role
        ``"reference"`` (plain PyTorch), ``"quartz"``, or ``"control"``: plain PyTorch in the place of quartz, which
        shows what two runs of the native device agree on, and thereby what the harness itself gets wrong.
    substrate
        ``"host"`` or ``"cuda"``.
    native
        Device type of the substrate: ``"cpu"`` or ``"cuda"``. Samples are generated there in every role.
    device
        Device type under test in this process.
    """

    role: str
    substrate: str

    @property
    def native(self) -> str:
        return NATIVE_DEVICE[self.substrate]

    @property
    def device(self) -> str:
        return "quartz" if self.role == "quartz" else self.native


def provide_expecttest() -> None:
    """Make ``import expecttest`` work where the package is missing (PyTorch's test helpers import it)."""
    if importlib.util.find_spec("expecttest") is None:
        sys.path.append(str(pathlib.Path(__file__).parent / "standins"))


def python_path() -> str:
    """``PYTHONPATH`` of the workers: this harness, and the source tree where the package is not installed."""
    here = pathlib.Path(__file__).parents[1]
    paths = [str(here), os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("torch_quartz") is None:
        paths.append(str(here.parents[1] / "python"))
    return os.pathsep.join(path for path in paths if path)


def load(role: str, substrate: str) -> Target:
    """Prepare this process for its role; only the quartz role imports ``torch_quartz``.

    The other roles must not: on a CUDA build of PyTorch the presence of a second accelerator breaks the backward
    passes of plain ``"cuda"`` tensors.
    """
    provide_expecttest()
    if role != "quartz":
        import torch  # with TORCH_DEVICE_BACKEND_AUTOLOAD=0, see shard.py

        if "torch_quartz" in sys.modules:
            raise RuntimeError(f"importing torch {torch.__version__} imported torch_quartz in the {role} process")
    else:
        os.environ["TORCH_QUARTZ_SUBSTRATE"] = substrate
        import torch_quartz

        got = torch_quartz._C.substrate()
        if got != substrate:
            raise RuntimeError(f"asked for the {substrate} substrate, got {got}: {torch_quartz._C.substrate_reason()}")
    return Target(role, substrate)


_calls = [0, 0]  # operator calls since take_counts: by own kernels, by the fallback
_computed_by_own: set[str] = set()  # operators whose own kernel has computed since take_counts


def start_counting(target: Target) -> None:
    """Count operator calls from here on; what was counted since the last start is dropped."""
    if target.role == "quartz":
        import torch_quartz

        torch_quartz._C.reset_op_counts()


def stop_counting(target: Target) -> None:
    """Keep the operator calls since :func:`start_counting`."""
    if target.role == "quartz":
        import torch_quartz

        for name, (own, fallback) in torch_quartz._C.op_counts().items():
            _calls[0] += own
            _calls[1] += fallback
            if own > fallback:  # an own kernel that hands a dtype on to the fallback counts in both
                _computed_by_own.add(name)


def take_counts() -> tuple[int, int, set[str]]:
    """Operator calls kept since the last time: by own kernels, by the fallback; and which own kernels computed."""
    counts = _calls[0], _calls[1], set(_computed_by_own)
    _calls[:] = 0, 0
    _computed_by_own.clear()
    return counts


def synchronize(target: Target) -> None:
    """Wait for the device, so that an asynchronous error is charged to the check that caused it."""
    if target.substrate == "cuda":
        import torch

        torch.cuda.synchronize()
