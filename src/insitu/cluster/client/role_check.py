"""Refuses --chief and --evaluator where the strategies of insitu would fail in such a task.

They know workers and ps tasks only. Scripts that use TensorFlow alone may have the other roles, so what
counts is whether the job's code imports insitu. It is read, not run.
"""

from __future__ import annotations

from pathlib import Path

from insitu.cluster.task import ResolvedCommand, find_insitu_import
from insitu.errors import JobSpecError


def check_roles(folder: Path, command: ResolvedCommand, *, chief: bool, evaluator: bool) -> None:
    """Raise JobSpecError where a role is requested that the code in `folder` can't have."""
    requested = [option for option, given in (("--chief", chief), ("--evaluator", evaluator)) if given]
    if not requested:
        return
    # A program may run any file of the folder.
    starts = [Path(command.arguments[0])] if command.script else sorted(folder.rglob("*.py"))
    user = find_insitu_import(folder.absolute(), [s.absolute() for s in starts])
    if user is not None:
        raise JobSpecError(
            "--chief and --evaluator are for scripts that use TensorFlow alone: the strategies of insitu "
            f"know workers and ps tasks only, and {user.relative_to(folder.absolute())} imports insitu. "
            "Leave it out: worker 0 is the chief, and fit(validation_data=...) evaluates. "
            f"Received: {' '.join(requested)}"
        )
