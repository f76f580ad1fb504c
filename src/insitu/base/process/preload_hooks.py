"""Registers work that a standby can do ahead of its script; see `insitu.cluster.task.preload`.

A room with something slow to load registers it when it is imported. It must leave no trace: no name counter
advanced, no random number drawn, no device's memory taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

_functions: list[Callable[[], None]] = []


def register_preload(function: Callable[[], None]) -> None:
    """Call `function` in standbys, once they have imported what the script imports."""
    if function not in _functions:
        _functions.append(function)


def run_preloads() -> None:
    """Call all that was registered. A failure here occurs again in the script."""
    for function in list(_functions):
        with contextlib.suppress(Exception):
            function()
