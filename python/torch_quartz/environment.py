"""Every ``TORCH_QUARTZ_*`` variable: the table of all of them, and the only Python code that reads one.

The C++ half reads its own in ``csrc/runtime/environment.cpp`` and the build its own in ``setup.py``. The table below
names them too, so that ``python -m torch_quartz info`` shows them and a test can compare it with
``docs/environment.md``.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes
    ----------
    name : str
        Its full name.
    values : str
        The values it takes; the default is named.
    reader : str
        ``"Python"``, ``"C++"`` or ``"build"``: which half reads it.
    meaning : str
        What it does, in one line.
    """

    name: str
    values: str
    reader: str
    meaning: str


VARIABLES = (
    Variable(
        "TORCH_QUARTZ_SUBSTRATE",
        "host, cuda; unset: cuda where the build and a driver allow it, else host",
        "C++",
        "forces the memory that quartz lives on; cuda without a usable GPU is an error",
    ),
    Variable(
        "TORCH_QUARTZ_HOST_DEVICES",
        "1 to 16; unset: 1",
        "C++",
        "number of quartz devices on the host substrate, for multi-device tests",
    ),
    Variable(
        "TORCH_QUARTZ_CPU_ISA",
        "avx2, avx512, avx512_bf16; unset: the best the processor has",
        "C++",
        "at most this instruction set in the CPU kernels; the results have the same bits",
    ),
    Variable(
        "TORCH_QUARTZ_AUTOLOAD",
        "0, 1; unset: 1 where this PyTorch has no CUDA build, else 0",
        "Python",
        "whether `import torch` alone registers the device",
    ),
    Variable(
        "TORCH_QUARTZ_CUDA",
        "0, 1; unset: 1 where PyTorch is a CUDA build and nvcc is found",
        "build",
        "whether the CUDA half is built",
    ),
)


def autoload() -> bool | None:
    """Return the user's choice in ``TORCH_QUARTZ_AUTOLOAD``, None if it is unset.

    Raises
    ------
    ValueError
        If the variable holds anything but ``0`` or ``1``.
    """
    value = os.environ.get("TORCH_QUARTZ_AUTOLOAD", "")
    if value == "":
        return None
    if value not in ("0", "1"):
        raise ValueError(f"TORCH_QUARTZ_AUTOLOAD must be '0' or '1', got '{value}'")
    return value == "1"


def current() -> dict[str, str]:
    """Return the variables of the table that are set, with their values."""
    return {variable.name: os.environ[variable.name] for variable in VARIABLES if variable.name in os.environ}


def unknown() -> dict[str, str]:
    """Return the variables that are set and named like ours but in no table: a misspelt one would do nothing."""
    names = {variable.name for variable in VARIABLES}
    return {
        name: os.environ[name] for name in sorted(os.environ) if name.startswith("TORCH_QUARTZ_") and name not in names
    }


def warn_of_unknown() -> None:
    """Warn once, in one sentence, of the variables that `unknown` returns."""
    if names := list(unknown()):
        import warnings

        known = ", ".join(variable.name for variable in VARIABLES)
        warnings.warn(
            f"torch_quartz knows no environment variable {', '.join(names)}, which has no effect; it knows {known}",
            RuntimeWarning,
            stacklevel=2,
        )
