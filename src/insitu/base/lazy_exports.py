"""The door of a room whose modules are imported on first use, so that the command line starts fast.

A door names each thing once, by the imports in its block `if TYPE_CHECKING:`, which type checkers follow too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

_BLOCK = re.compile(r"^if TYPE_CHECKING:\n((?:[ \t]+.*\n|\n)+)", re.MULTILINE)
_IMPORT = re.compile(r"^\s+from (\S+) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


def export_lazily(
    room: str, *, aliases: bool = False
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the package `room`, as PEP 562 has them.

    They give what its block `if TYPE_CHECKING:` imports, from modules or as modules. With `aliases`, `import
    ROOM.NAME` works for modules that come from another package.
    """
    spec = sys.modules[room].__spec__
    module_of = _find_names(spec.loader.get_source(room) if spec is not None else "")  # type: ignore[union-attr]

    if aliases:
        sys.meta_path.append(_Aliases(room, module_of))

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        module = module_of[name]
        if module == room:
            return import_module(f"{room}.{name}")
        loaded = import_module(module)
        try:
            return getattr(loaded, name)
        except AttributeError:
            return import_module(f"{module}.{name}")

    return load, lambda: sorted(module_of)


def _find_names(source: str) -> dict[str, str]:
    """Return the module of each name that a door's block of imports names."""
    block = _BLOCK.search(source)
    found = {}
    for module, several, one in _IMPORT.findall(block[1] if block else ""):
        for name in (several or one).split(","):
            if name.strip():
                found[name.strip()] = module
    return found


class _Aliases:
    """Finds modules by the names under which a door gives them. Asked last."""

    def __init__(self, room: str, module_of: Mapping[str, str]) -> None:
        self._room = room
        self._module_of = module_of

    def _find_own_name(self, alias: str) -> str:
        """Return the name of the module that the door gives under another one; "": it gives none."""
        room, _, name = alias.rpartition(".")
        module = self._module_of.get(name, self._room) if room == self._room else self._room
        own = f"{module}.{name}"
        return own if module != self._room and find_spec(own) is not None else ""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(name, self) if self._find_own_name(name) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python: the module here only stands in for the other."""

    def exec_module(self, module: Any) -> None:
        sys.modules[module.__name__] = import_module(self._find_own_name(module.__name__))
