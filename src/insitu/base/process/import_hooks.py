"""Call functions right after another module's import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

_waiting: dict[str, list[Callable[[], None]]] = {}
"""The functions to call, by the name of a module that hasn't been imported yet."""


def call_after_import(name: str, function: Callable[[], None]) -> None:
    """Call `function` now if the module `name` is imported, else once right after its import."""
    module = sys.modules.get(name)
    # While a module is being imported, what its users need isn't there yet.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        function()
        return
    functions = _waiting.setdefault(name, [])
    if function not in functions:
        functions.append(function)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Asks the other finders for a module that functions wait for, and has its loader call these."""

    def __init__(self) -> None:
        self._busy = False
        """True while the other finders are asked."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        if name not in _waiting or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                # A function may import what calls this for the same module.
                while functions := _waiting.pop(name, None):
                    for function in functions:
                        function()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
