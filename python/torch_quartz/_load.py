"""Load the compiled half, ``torch_quartz._C``, after the checks that make a mismatch readable.

A library built against one PyTorch minor version must not be opened in another: at best a symbol is missing, at worst a
structure has another layout. Each case ends in an ImportError of one sentence that says what to do.
"""

import re
import sys
from types import ModuleType

OLDEST, NEWEST = (2, 11), (2, 15)  # the PyTorch minor versions this source supports
_REBUILD = (
    "rebuild it with `pip install --no-build-isolation --force-reinstall --no-deps torch-quartz` (or `make build`)"
)


def load() -> ModuleType:
    """Check that the compiled half fits the installed PyTorch and import it.

    Returns
    -------
    module
        ``torch_quartz._C``.

    Raises
    ------
    ImportError
        With one sentence, if PyTorch is missing, unsupported or another one than the build's, if another PrivateUse1
        backend is registered, or if the compiled half is missing or cannot be opened.
    """
    torch = _import_torch()
    built = _built_against()
    check_versions(torch.__version__, built)
    check_backend_name(torch._C._get_privateuse1_backend_name())
    try:
        from torch_quartz import _C
    except ImportError as error:
        raise ImportError(explain(str(error), torch.__version__, built), name="torch_quartz._C") from None
    return _C


def check_versions(installed: str, built: str | None) -> None:
    """Raise ImportError unless `installed` is supported and has the minor version of `built` (None: not known).

    Parameters
    ----------
    installed : str
        ``torch.__version__``.
    built : str or None
        The PyTorch version of the build.
    """
    if not OLDEST <= _minor(installed) <= NEWEST:
        raise ImportError(
            f"torch_quartz supports PyTorch {_text(OLDEST)} to {_text(NEWEST)}, but PyTorch {installed} is installed: "
            f"install a supported PyTorch and {_REBUILD}"
        )
    if built is not None and _minor(built) != _minor(installed):
        raise ImportError(
            f"torch_quartz was built against PyTorch {built}, but PyTorch {installed} is installed: "
            f"install torch=={_text(_minor(built))}.* or {_REBUILD}"
        )


def check_backend_name(name: str) -> None:
    """Raise ImportError if PyTorch's one out-of-tree device slot is taken by a device called `name`."""
    if name not in ("privateuseone", "quartz"):
        raise ImportError(
            f"torch_quartz cannot register its device: this process already has the out-of-tree device '{name}', and "
            "PyTorch holds one such device per process (import torch_quartz in another process)"
        )


def explain(error: str, installed: str, built: str | None) -> str:
    """Turn the text of an ImportError of ``torch_quartz._C`` into one sentence that says what to do.

    Parameters
    ----------
    error : str
        The message of the ImportError; only its first line is used (C++ adds a stack trace).
    installed, built : str
        PyTorch's version here and in the build (None: not known).
    """
    line = error.strip().splitlines()[0] if error.strip() else "no message"
    if match := re.search(r"undefined symbol: (\S+)", line):
        if "6quartz" in match[1]:  # the mangled namespace: a symbol of libquartz.so
            return f"torch_quartz's own two libraries are of different builds (missing symbol {match[1]}): {_REBUILD}"
        return (
            f"torch_quartz does not fit the installed PyTorch {installed} (built against {built or 'an unknown one'}): "
            f"the symbol {match[1]} is missing; {_REBUILD}"
        )
    if match := re.search(r"(\S+): cannot open shared object file", line):
        return (
            f"torch_quartz needs the shared library {match[1]}, which cannot be found beside PyTorch {installed} "
            f"(built against {built or 'an unknown one'}): install that PyTorch build or {_REBUILD}"
        )
    if "No module named" in line or "cannot import name '_C'" in line:
        python = "{}.{}".format(*sys.version_info[:2])
        return (
            f"the compiled half of torch_quartz is not built for Python {python}: install the package with "
            "`pip install . --no-build-isolation` or run `make build`"
        )
    return f"torch_quartz cannot be loaded: {line}"


def _import_torch() -> ModuleType:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"torch_quartz needs PyTorch {_text(OLDEST)} to {_text(NEWEST)}, but no module named torch is installed",
            name="torch",
        ) from None
    return torch


def _built_against() -> str | None:
    try:
        from torch_quartz import _build_config
    except ImportError:
        return None  # written by the build; if it is missing, so is the compiled half, and load() says so
    return _build_config.TORCH_VERSION


def _minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _text(minor: tuple[int, int]) -> str:
    return f"{minor[0]}.{minor[1]}"
