"""Finds out whether a job's code imports insitu. It is read, not run."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from insitu.base.context import TF_CONFIG_ENV
from insitu.base.net.unauthenticated import is_loopback, refuse_unauthenticated


def refuse_open_grpc(folder: Path, script: Path | None, environ: Mapping[str, str]) -> None:
    """Raise InputError for a script of TensorFlow alone whose tasks aren't all on this machine: they connect
    by TensorFlow's gRPC. `script` is None if a program runs, which may run any file of `folder`."""
    cluster = json.loads(environ.get(TF_CONFIG_ENV) or "{}").get("cluster", {})
    addresses = [address for members in cluster.values() for address in members]
    if len(addresses) < 2 or all(map(is_loopback, addresses)):
        return
    starts = [script] if script else sorted(folder.rglob("*.py"))
    if find_insitu_import(folder.absolute(), [start.absolute() for start in starts]) is None:
        instead = "Train with insitu's strategies, whose tasks prove a secret to each other"
        refuse_unauthenticated("TensorFlow's gRPC", instead, addresses, environ)


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
