"""What can be done ahead of a script that is likely to need it; see `insitu.cluster.task.preload`.

Rooms that know something slow register it when they are imported. It must leave no trace: no name counted
up, no random number drawn, no device's memory taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

_functions: list[Callable[[], None]] = []


def register_preload(function: Callable[[], None]) -> None:
    """`function` is called in processes that stand by, once they have imported what the script imports."""
    if function not in _functions:
        _functions.append(function)


def run_preloads() -> None:
    """Calls all that was registered. What fails will fail again where it matters."""
    for function in list(_functions):
        with contextlib.suppress(Exception):
            function()
