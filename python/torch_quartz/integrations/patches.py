"""The one table of Python patches of PyTorch and of other packages; ``docs/patches.md`` describes each.

``import torch_quartz`` installs all of them; ``torch_quartz.undo_patches()`` takes them back and leaves the device
working. Each integration module changes one package or one part of PyTorch, and says what in its row here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from torch_quartz import _C
from torch_quartz.integrations import (
    accelerate,
    cross_entropy,
    cuda_backward,
    data_parallel,
    dlpack,
    flex_attention,
    inductor,
    multiprocessing,
    safetensors,
    transformers,
    transformers_attention,
    transformers_experts,
    transformers_fp8,
    transformers_fused,
    transformers_mxfp4,
    transformers_paged,
)
from torch_quartz.integrations.replacements import Replacements


@dataclass(frozen=True)
class Patch:
    """The changes that one integration module makes.

    Attributes
    ----------
    name : str
        Name of the module, for `undo`.
    changes : tuple of (str, str)
        What is replaced, and why, in one sentence each.
    install, undo : callable
        Take no arguments. `undo` restores what `install` found.
    replacements : Replacements or None
        What it replaced and which modules it waits for, where the module keeps that.
    unneeded : str or None
        Why `install` does nothing in this process.
    """

    name: str
    changes: tuple[tuple[str, str], ...]
    install: Callable[[], None]
    undo: Callable[[], None]
    replacements: Replacements | None = None
    unneeded: str | None = None


def _patch(module: ModuleType, *changes: tuple[str, str], unneeded: str | None = None) -> Patch:
    listed = tuple((row["target"], row["reason"]) for row in getattr(module, "PATCHES", ()))
    name, replacements = module.__name__.rpartition(".")[2], getattr(module, "_changes", None)
    return Patch(name, changes + listed, module.install, module.undo, replacements, unneeded)


PATCHES = (
    _patch(
        dlpack,
        (
            "torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__, torch.Tensor.__cuda_array_interface__",
            "PyTorch knows no DLPack device for a renamed backend; quartz tensors are exported as native memory",
        ),
    ),
    _patch(
        multiprocessing,
        (
            "ForkingPickler's reducers of torch.Tensor, torch.nn.Parameter and torch.UntypedStorage",
            "PyTorch shares every storage but CUDA's as CPU memory, which cannot work for a quartz storage itself",
        ),
        (
            "torch.UntypedStorage.share_memory_, torch.UntypedStorage.is_shared",
            "for a device that is not the CPU they do nothing, and host memory would silently not be shared",
        ),
    ),
    _patch(
        cuda_backward,
        (
            "torch.autograd.graph._engine_run_backward (cuda substrate only)",
            "the autograd engine knows one accelerator per process and stops backward passes of plain cuda tensors",
        ),
        unneeded=None if _C.substrate() == "cuda" else "not needed on the host substrate",
    ),
    _patch(data_parallel),
    _patch(
        cross_entropy,
        unneeded=None if hasattr(torch.nn, "LinearCrossEntropyOptions") else "not needed before PyTorch 2.13",
    ),
    _patch(inductor),
    _patch(flex_attention),
    _patch(safetensors),
    _patch(accelerate),
    _patch(transformers),
    _patch(transformers_attention),
    _patch(transformers_experts),
    _patch(transformers_fused),
    _patch(transformers_paged),
    _patch(transformers_fp8),
    _patch(transformers_mxfp4),
)

_installed: list[Patch] = []


def installed() -> list[str]:
    """Return the names of the patches that are installed, in the order of their installation; see `status`."""
    return [patch.name for patch in _installed]


def status() -> dict[str, str]:
    """Return for each patch of the table whether it is in force, waits for a module, or has nothing to do here.

    Examples
    --------
    >>> status()["dlpack"]
    'active'
    """
    return {patch.name: _status(patch) for patch in PATCHES}


def _status(patch: Patch) -> str:
    if patch not in _installed:
        return "taken back"
    if patch.unneeded is not None:
        return patch.unneeded
    changes = patch.replacements
    modules = [] if changes is None else changes.waiting_for()
    if not modules:
        return "active"
    more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    waiting = f"waiting for the import of {modules[0]}{more}"
    return f"active, {waiting}" if changes is not None and changes.in_force() else waiting


def install_all() -> None:
    """Install every patch of the table that is not in force."""
    for patch in PATCHES:
        if patch not in _installed:
            patch.install()
            _installed.append(patch)


def undo_all() -> None:
    """Take back every patch in force, the last one first."""
    while _installed:
        _installed.pop().undo()


def undo(name: str) -> None:
    """Take back the changes of one integration module.

    Parameters
    ----------
    name : str
        A name of the table.

    Raises
    ------
    ValueError
        If no patch of that name is in force.
    """
    for patch in _installed:
        if patch.name == name:
            _installed.remove(patch)
            patch.undo()
            return
    raise ValueError(f"no patch '{name}' is installed; installed are: {', '.join(installed()) or 'none'}")
