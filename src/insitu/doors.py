"""The door of a room whose modules are imported on first use, so that the command line starts fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_door(
    room: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the package `room`, as PEP 562 has them.

    `modules` maps the name of a module inside the room to the names that it gives to others. A dotted name
    is an absolute one. A module that gives its own name, without its packages, is given whole.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        module = module_of[name]
        loaded = import_module(module if "." in module else f"{room}.{module}")
        return loaded if name == module.rpartition(".")[2] else getattr(loaded, name)

    return load, lambda: sorted(module_of)
