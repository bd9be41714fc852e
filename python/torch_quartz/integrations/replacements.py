"""Replace attributes of other packages so that every replacement can be taken back.

Packages such as accelerate copy functions between their modules (``from .modeling import get_max_memory``), so
replacing one attribute reaches only some callers. `Replacements.function` therefore replaces every module attribute
that holds the same object, and `Replacements.undo` looks for the replacement in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch_quartz.integrations.import_hooks import ImportHook, on_import


class Replacements:
    """The replacements of one integration.

    Examples
    --------
    >>> import json
    >>> changes = Replacements()
    >>> changes.function(json, "dumps", lambda original: lambda value: "replaced")
    >>> json.dumps(1)
    'replaced'
    >>> changes.undo()
    >>> json.dumps(1)
    '1'
    """

    def __init__(self) -> None:
        self._hooks: list[ImportHook] = []
        self._undo: list[Callable[[], object]] = []

    def when_imported(self, module: str, change: Callable[[ModuleType], None]) -> None:
        """Call `change` with a module, now if it is imported, else right after its first import.

        Parameters
        ----------
        module : str
            Full module name.
        change : callable
            Gets the module.
        """
        self._hooks.append(on_import(module, change))

    def function(self, module: ModuleType, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a module-level function (or class) wherever a module holds it.

        Other packages are searched for the same name only; accelerate and Transformers also rename what they import.

        Parameters
        ----------
        module : module
            Where the function is defined.
        name : str
            Its name.
        make : callable
            Gets the original and returns the replacement.
        """
        original = getattr(module, name)
        replacement = make(original)
        _exchange(name, original, replacement)
        self._undo.append(lambda: _exchange(name, replacement, original))

    def attribute(self, owner: type | ModuleType, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute that a class or module itself defines, in that one place.

        Parameters
        ----------
        owner : type or module
            The class or the module.
        name : str
            Name of the attribute.
        make : callable
            Gets the original (of a class the descriptor, as it stands there) and returns the replacement.
        """
        original = vars(owner)[name]
        setattr(owner, name, make(original))
        self._undo.append(lambda: setattr(owner, name, original))

    def on_undo(self, action: Callable[[], object]) -> None:
        """Remember how to take back a change that is no attribute.

        Parameters
        ----------
        action : callable
            Called by `undo`.
        """
        self._undo.append(action)

    def in_force(self) -> bool:
        """Return whether anything is replaced now."""
        return bool(self._undo)

    def waiting_for(self) -> list[str]:
        """Return the modules that are not imported yet and are changed when they are."""
        return [hook.module for hook in self._hooks if hook.waiting()]

    def undo(self) -> None:
        """Take back every replacement, the last one first, and stop waiting for modules."""
        while self._hooks:
            self._hooks.pop().remove()
        while self._undo:
            self._undo.pop()()


_RENAMING = ("accelerate", "safetensors", "transformers")


def _exchange(name: str, old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        namespace = vars(module)  # not getattr(): on a lazy module it would import what it names
        if module.__name__.partition(".")[0] in _RENAMING:
            for key in [key for key, value in namespace.items() if value is old]:
                namespace[key] = new
        elif namespace.get(name) is old:
            namespace[name] = new
