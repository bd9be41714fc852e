"""Replace attributes of other packages so that every replacement can be taken back.

Packages such as accelerate copy functions between their modules (``from .modeling import get_max_memory``), so
replacing one attribute reaches only some callers. `Replacements.function` therefore replaces every module attribute of
that name that holds the same object, in whatever module, and `Replacements.undo` looks for the replacement in the same
way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
        self._undo: list[Callable[[], None]] = []

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
        """Replace a module-level function (or class) wherever a module holds it under that name.

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

    def attribute(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute that a class itself defines (a method, property or other descriptor).

        Parameters
        ----------
        owner : type
            The class.
        name : str
            Name of the attribute.
        make : callable
            Gets the original descriptor, as it stands in the class, and returns the replacement.
        """
        original = vars(owner)[name]
        setattr(owner, name, make(original))
        self._undo.append(lambda: setattr(owner, name, original))

    def undo(self) -> None:
        """Take back every replacement, the last one first, and stop waiting for modules."""
        while self._hooks:
            self._hooks.pop().remove()
        while self._undo:
            self._undo.pop()()


def _exchange(name: str, old: Any, new: Any) -> None:
    for namespace in _namespaces():
        if namespace.get(name) is old:
            namespace[name] = new


def _namespaces() -> Iterator[dict[str, Any]]:
    # vars() and not getattr(): an attribute look-up on a lazy module would import what it names.
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            yield vars(module)
