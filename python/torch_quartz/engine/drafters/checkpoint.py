"""Tensors of a checkpoint that no class of Transformers loads: a drafter's, or those that a model leaves out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor


def read_tensors(source: Any, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return tensors of a checkpoint by name, on the CPU.

    Parameters
    ----------
    source : str or path
        A folder with files ``*.safetensors``, or a name of the hub.
    wanted : callable
        Whether the tensor of a name is read.

    Raises
    ------
    ValueError
        Nothing to read there.
    """
    from safetensors import safe_open

    folder = Path(os.fspath(source))
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(os.fspath(source), allow_patterns=["*.safetensors", "*.json"]))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"SpeculativeConfig.model must have files *.safetensors, got {os.fspath(source)!r} without any"
        )
    tensors = {}
    for file in files:
        with safe_open(file, "pt", device="cpu") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys() if wanted(name)})  # noqa: SIM118
    return tensors
