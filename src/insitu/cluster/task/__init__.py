"""Runs inside a task process, around the user's script.

Begin reading with `entry.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.task.code_imports import find_insitu_import
    from insitu.cluster.task.command import ResolvedCommand, resolve_command
    from insitu.cluster.task.entry import PARENT_ENV, STANDBY_OPTION
    from insitu.cluster.task.failure import make_writable, read_failure

__getattr__, __dir__ = export_lazily(__name__)
