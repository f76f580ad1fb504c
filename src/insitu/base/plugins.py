"""Plug-ins: what installed packages register by entry points of `insitu.sources` and so on, also insitu's
extensions. They are found when one is needed first: `import insitu` and most commands look for none."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from insitu.base.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

SOURCES, CONNECTORS, ENGINES, EXPORTERS = "sources", "connectors", "engines", "exporters"
TRACKERS, COMMANDS, PAGES = "trackers", "commands", "pages"
EXTENSIONS = "extensions"


@functools.cache
def _find_entry_points(kind: str) -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # it takes some 20 ms

    return tuple(entry_points(group=f"insitu.{kind}"))


def list_plugins(kind: str) -> tuple[str, ...]:
    """Return the names of all plug-ins of a kind, such as SOURCES, in order. None of them is loaded."""
    return tuple(sorted({each.name for each in _find_entry_points(kind)}))


def load_plugin(kind: str, name: str) -> Any:
    """Return what a package registers as plug-in `name`. It is imported the first time.

    Raises InputError if no package registers it, if several do, or if it can't be imported.
    """
    found = {each.value: each for each in _find_entry_points(kind) if each.name == name}
    packages = ", ".join(f"{each.dist.name} {each.dist.version}" for each in found.values() if each.dist)
    if not found:
        known = ", ".join(list_plugins(kind)) or "none"
        raise InputError(
            f"A plug-in is registered by an installed package, as insitu.{kind}: {known}. Received: "
            f"{name!r}. Install its package on each host, or insitu again if it is one of insitu's own"
        )
    if len(found) > 1:
        raise InputError(
            f"One package registers a plug-in's name. Received: {name!r} of insitu.{kind}, by {packages}. "
            "Uninstall all but one"
        )
    ((value, entry),) = found.items()
    try:
        return entry.load()
    except Exception as error:  # the package's own code runs
        needed = error.name if isinstance(error, ModuleNotFoundError) else "another version"
        raise InputError(
            f"A plug-in is imported from the package that registers it. Received: {name!r} of insitu.{kind}, "
            f"{value} of {packages}, and {type(error).__name__}: {error}. Install {needed}, or "
            "uninstall the package"
        ) from error
