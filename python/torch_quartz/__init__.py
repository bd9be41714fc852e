"""torch-quartz: the PyTorch device ``"quartz"``.

``import torch_quartz`` registers the device and its module ``torch.quartz``. Where PyTorch has no CUDA build,
``import torch`` does so by itself through the ``torch.backends`` entry point (see `_autoload`).
"""

import sys as _sys

from torch_quartz._version import __version__
from torch_quartz.engine import __all__ as _ENGINE  # names alone: what they stand for is loaded when asked for

__all__ = ["__version__", "determinism_report", "install_patches", "undo_patches", *_ENGINE]


def install_patches() -> None:
    """Install the Python patches of PyTorch listed in ``docs/patches.md`` again, after `undo_patches`."""
    from torch_quartz.integrations import patches

    patches.install_all()


def undo_patches() -> None:
    """Take back every Python patch of PyTorch listed in ``docs/patches.md``; the device itself keeps working."""
    from torch_quartz.integrations import patches

    patches.undo_all()


def __getattr__(name: str):
    if name == "determinism_report":  # loaded when it is asked for: importing the package stays quick
        from torch_quartz.determinism import determinism_report

        return determinism_report
    if name in _ENGINE:
        from torch_quartz import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_registering = False
_autoloaded = False  # whether only `import torch` registered the device, not the program itself


def _register() -> None:
    global _registering
    _registering = True
    from torch_quartz import _registration

    _registration.register()


def _autoload() -> None:
    """Entry point of ``torch.backends``, called at the end of ``import torch``.

    Registering the device changes which accelerator PyTorch's autograd asks on a CUDA build (docs/errors.md), so it
    happens by itself only where PyTorch has no CUDA; ``TORCH_QUARTZ_AUTOLOAD=1`` or ``0`` decides otherwise. ``import
    torch`` never fails because of this package: a problem becomes one warning.
    """
    global _autoloaded
    if _registering:
        return  # `import torch_quartz` came first: it imported torch and goes on when this returns
    try:
        if _wanted():
            _autoloaded = True
            _register()
            return
    except Exception as error:
        import warnings

        warnings.warn(f"torch-quartz was not loaded by `import torch`: {error}", RuntimeWarning, stacklevel=2)
    # Forget this half-import, so that a later `import torch_quartz` runs from the start and registers or raises.
    for name in [name for name in _sys.modules if name.partition(".")[0] == "torch_quartz"]:
        del _sys.modules[name]


def _wanted() -> bool:
    import torch

    from torch_quartz import environment

    choice = environment.autoload()
    return torch.version.cuda is None if choice is None else choice


def _torch_is_importing() -> bool:
    # True while the first lines of `import torch` are still running, that is inside its call of the entry points.
    torch = _sys.modules.get("torch")
    return bool(getattr(getattr(torch, "__spec__", None), "_initializing", False))


if not _torch_is_importing():
    _register()
