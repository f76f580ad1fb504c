"""Actions for the end of a task's script, while threads can still be started."""

from __future__ import annotations

import os
from collections.abc import Callable

_calls: list[Callable[[], None]] = []
"""Actions at the end, the newest first."""
_process: list[int] = []
"""The process that runs the script; empty: this is no task that runs one."""


def begin_script() -> None:
    """Note that this process is a task that runs a script, and calls `end_script` behind it."""
    _process[:] = [os.getpid()]


def runs_script() -> bool:
    """Return whether this process is a task that runs a script. A fork of one isn't."""
    return _process == [os.getpid()]


def call_at_script_end(call: Callable[[], None]) -> None:
    """Have something done once the script has ended well. It may raise: then the task fails by that."""
    _calls.append(call)


def end_script() -> None:
    """Do what is due now. Raises what that raises."""
    while _calls:
        _calls.pop()()
