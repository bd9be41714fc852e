"""Run a function when a module is imported for the first time, so that patching it does not mean importing it."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


class ImportHook(importlib.abc.MetaPathFinder):
    """A callback that waits for a module; made by `on_import`.

    Attributes
    ----------
    module : str
        Full name of the module waited for.
    """

    def __init__(self, module: str, callback: Callable[[ModuleType], None]):
        self.module = module
        self._callback = callback
        self._searching = False

    def find_spec(self, fullname, path=None, target=None):
        """Find the module with the other finders and make its loader run the callback last."""
        if fullname != self.module or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                self.remove()
                self._callback(module)

        spec.loader.exec_module = execute_and_call
        return spec

    def waiting(self) -> bool:
        """Return whether the module has not been imported yet."""
        return self in sys.meta_path

    def remove(self) -> None:
        """Stop waiting; the callback does not run any more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def on_import(module: str, callback: Callable[[ModuleType], None]) -> ImportHook:
    """Call `callback(module object)` once, now if `module` is imported, else right after its first import.

    Parameters
    ----------
    module : str
        Full module name, for example ``"torch._inductor.compile_fx"``.
    callback : callable
        Called with the module. What it raises reaches the importer.

    Returns
    -------
    ImportHook
        Call its ``remove()`` to stop waiting.

    Examples
    --------
    >>> seen = []
    >>> hook = on_import("json", seen.append)
    >>> import json
    >>> seen == [json]
    True
    """
    hook = ImportHook(module, callback)
    loaded = sys.modules.get(module)
    if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
        callback(loaded)
    else:
        sys.meta_path.insert(0, hook)
    return hook
