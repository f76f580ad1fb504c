"""Resolves JOB_CMD in a job's folder. Reads the folder, runs nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from insitu.base.context import TF_CONFIG_ENV
from insitu.base.errors import JobSpecError

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_ROLES = ("chief", "worker", "ps", "evaluator")
_PLACEHOLDER = re.compile(rf"\{{(job_name|task_index|(?:{'|'.join(_ROLES)})_hosts)\}}")


@dataclass(frozen=True, slots=True)
class ResolvedCommand:
    """How to run JOB_CMD."""

    #: True for a script that this interpreter runs, False for a program to execute.
    script: bool
    #: The script or program by its absolute path, then its arguments.
    arguments: tuple[str, ...]


def resolve_command(folder: Path, command: Sequence[str], interpreter: str) -> ResolvedCommand:
    """Return how to run `command` in `folder`. Raises JobSpecError, which names what is wrong and what is
    there.

    - `train.py`, `python train.py`, `python3 train.py`: the script, by this interpreter;
    - `python` with options (`-m`, `-c`, ...): this interpreter, executed;
    - a path with `/`, or the name of a file in the folder: that file, executed;
    - any other name: a program on PATH.
    """
    first, *rest = command
    if _PYTHON.fullmatch(first):
        if rest and not rest[0].startswith("-"):
            return ResolvedCommand(True, (_resolve_script(folder, rest[0]), *rest[1:]))
        if rest:
            return ResolvedCommand(False, (interpreter, *rest))
        raise JobSpecError(f"{first} alone runs nothing: name a script of JOB_DIR, such as {first} train.py")
    if first.endswith(".py"):
        return ResolvedCommand(True, (_resolve_script(folder, first), *rest))
    inside = folder / first
    if inside.is_file():
        if not os.access(inside, os.X_OK):
            raise JobSpecError(
                f"{first} of JOB_DIR is not executable, and its name doesn't end in .py. Run chmod +x on it, "
                f"or name its interpreter, such as: bash {first}"
            )
        return ResolvedCommand(False, (str(inside.absolute()), *rest))
    if first.startswith("-"):
        raise JobSpecError(
            "Options of insitu start come before the cache: all that follows JOB_DIR is the job's command. "
            f"Received: {first!r} behind JOB_DIR. Write: insitu start {first} ... CACHE JOB_DIR COMMAND"
        )
    program = shutil.which(first) if "/" not in first or Path(first).is_absolute() else None
    if program is None:
        raise JobSpecError(
            f"{first!r} is neither a file of JOB_DIR nor a program on PATH. "
            f"{_list_entries(folder)}{_hint_at_quotes(first)}"
        )
    return ResolvedCommand(False, (program, *rest))


def fill_placeholders(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return arguments with what the task is in place of `{job_name}`, `{task_index}`, and `{ps_hosts}`,
    `{worker_hosts}` and those of the other roles: addresses with commas between them, as the flags of
    TensorFlow's classic scripts take them. Other braces stay."""
    config = json.loads(environ.get(TF_CONFIG_ENV) or "{}")
    task, cluster = config.get("task", {}), config.get("cluster", {})
    values = {"job_name": str(task.get("type", "worker")), "task_index": str(task.get("index", 0))}
    values |= {f"{role}_hosts": ",".join(cluster.get(role, ())) for role in _ROLES}
    return tuple(_PLACEHOLDER.sub(lambda found: values[found[1]], argument) for argument in arguments)


def _resolve_script(folder: Path, name: str) -> str:
    path = folder / name
    if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
        raise JobSpecError(f"JOB_DIR has no script {name!r}. {_list_entries(folder)}{_hint_at_quotes(name)}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise JobSpecError(f"The script {name!r} can't be read: {error.strerror}") from error
    return str(path.absolute())


def _list_entries(folder: Path) -> str:
    names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in folder.iterdir())
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"It holds: {', '.join(names[:10])}{more}." if names else "It is empty."


def _hint_at_quotes(name: str) -> str:
    return " Give the command and its arguments without quotes around them." if " " in name else ""
