"""Refuses --chief and --evaluator where the strategies of insitu would fail in such a task.

They know workers and ps tasks only. Scripts that use TensorFlow alone may have the other roles, so what
counts is whether the job's code imports insitu. It is read, not run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from insitu.cluster.task import ResolvedCommand
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


def find_insitu_import(folder: Path, starts: list[Path]) -> Path | None:
    """Return the first file that imports insitu: of `starts`, and of what they import from below `folder`."""
    seen: set[Path] = set()
    waiting = list(starts)
    while waiting:
        file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        for module, level in _find_imports(file):
            if module.split(".")[0] == "insitu" and level == 0:
                return file
            base = file.parents[max(0, level - 1)] if level < len(file.parents) else file.parent
            waiting += _find_local_files(base, module, folder)
    return None


def _find_imports(file: Path) -> Iterator[tuple[str, int]]:
    """Yield each module that `file` may import, and the dots before its name."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        # Running the script will report it.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = [node.module] if node.module else []
            yield from ((".".join([*prefix, alias.name]), node.level) for alias in node.names)


def _find_local_files(base: Path, module: str, folder: Path) -> list[Path]:
    """Return the files that importing `module` runs, of those below `folder`."""
    parts = [part for part in module.split(".") if part != "*"]
    places = {base, folder}
    found = []
    for count in range(1, len(parts) + 1):
        for place in sorted(places):
            stem = place.joinpath(*parts[:count])
            found += [p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()]
    return [path for path in found if path.is_relative_to(folder)]
