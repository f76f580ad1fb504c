"""Runs inside a task process, around the user's script.

Begin reading with `entry.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.task.code_imports import find_insitu_import
    from insitu.cluster.task.command import ResolvedCommand, resolve_command
    from insitu.cluster.task.entry import PARENT_ENV, STANDBY_OPTION
    from insitu.cluster.task.failure import make_writable, read_failure

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "code_imports": ("find_insitu_import",),
        "command": ("ResolvedCommand", "resolve_command"),
        "entry": ("PARENT_ENV", "STANDBY_OPTION"),
        "failure": ("make_writable", "read_failure"),
    },
)

__all__ = [
    "PARENT_ENV",
    "STANDBY_OPTION",
    "ResolvedCommand",
    "find_insitu_import",
    "make_writable",
    "read_failure",
    "resolve_command",
]
