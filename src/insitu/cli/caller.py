"""What a command that the head runs for a caller elsewhere reads of that caller: variables, and files.

They come by the standard input, as `pack` in `remote.py` writes them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import click

from insitu.base.errors import ClusterError, InsituError, StorageFull
from insitu.base.paths import Paths
from insitu.cli.console import format_size

_READ_BYTES = 1 << 20
_CALLER = "insitu caller"


class Caller:
    """Who has the head run this command from elsewhere."""

    def __init__(self) -> None:
        """Read what comes before the files. Raises ClusterError."""
        line = sys.stdin.buffer.readline()
        try:
            given = json.loads(line or b"{}")
            variables, files = given.get("variables", {}), given.get("files", [])
            if not all(isinstance(value, str | None) for value in variables.values()):
                raise ValueError("variables are texts")
            if not all(isinstance(name, str) and type(size) is int and size >= 0 for name, size in files):
                raise ValueError("files have names and sizes")
        except (ValueError, TypeError, AttributeError) as error:
            raise ClusterError(f"A caller gives a line of JSON. Received: {line!r:.100}: {error}") from None
        #: Variables of its shell, by name; None: it isn't set there.
        self.variables: dict[str, str | None] = variables
        #: The names and sizes of the files that it sends.
        self._files: list[tuple[str, int]] = files

    @property
    def has_files(self) -> bool:
        return bool(self._files)

    @contextlib.contextmanager
    def received(self, paths: Paths) -> Iterator[list[Path]]:
        """Yield the files that it sends, which are read now and removed at the end.

        They are below one folder by their paths on its machine, so their order is as there. An InsituError
        names them as there. Raises StorageFull, and ClusterError for paths that lead elsewhere.
        """
        from insitu.grid import full_disk_as_error, scratch_folder

        total = sum(size for _, size in self._files)
        with full_disk_as_error(paths.home), scratch_folder(paths) as folder:
            if total > (free := shutil.disk_usage(folder).free):
                raise StorageFull(
                    f"Files that are sent are on the disk of the head until they are read. Received: "
                    f"{format_size(total)}, of which {format_size(free)} are free at {paths.home}. Make room "
                    f"there, or send less at a time"
                )
            try:
                yield [_receive(folder, name, size) for name, size in self._files]
            except InsituError as error:
                error.message = error.message.replace(str(folder), "")
                raise


def _receive(folder: Path, name: str, size: int) -> Path:
    if ".." in PurePosixPath(name).parts:
        raise ClusterError(f"A file that is sent has a path without `..`. Received: {name:.100}")
    path = folder / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        left = size
        while left:
            data = sys.stdin.buffer.read(min(left, _READ_BYTES))
            if not data:
                raise ClusterError(f"A file must come whole. Received: {name}, without {left} bytes")
            file.write(data)
            left -= len(data)
    return path


def find_caller() -> Caller | None:
    """Return who has the head run this command, or None for a user of this machine. Raises ClusterError."""
    context = click.get_current_context().find_root()
    if not context.params.get("for_caller"):
        return None
    if _CALLER not in context.meta:
        context.meta[_CALLER] = Caller()
    caller: Caller = context.meta[_CALLER]
    return caller
