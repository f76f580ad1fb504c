"""Copies what tasks write into a job's folder between hosts: files as messages, a part at a time.

The folder on the head's machine has everything: there commands look, and from there a task that is launched
on another host gets what the tasks before it have left. Each side scans its own folder for what has changed.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from insitu.base.disk.durable import sync_folder
from insitu.base.errors import ClusterError
from insitu.base.paths import EVENT_FILE
from insitu.cluster.engines import Message

PART_BYTES = 1 << 20
STATISTICS = "statistics"
"""The entry of a job's folder in which each task waits for what the others find, while they run."""
_COPIED = frozenset(
    {
        *("checkpoints", "evaluations.jsonl", "export", "ledger", STATISTICS, "summaries", "tasks"),
        "trainings.jsonl",  # in this order: the last checkpoint of a training goes before its end
    }
)
"""Entries of a job's folder that tasks write and others read."""
_KEPT = frozenset({"checkpoints", "evaluations.jsonl", "export", "ledger", "trainings.jsonl"})
"""Entries that survive a power cut, once they were taken: a host deletes its own after the job's end. Others
are of use while tasks run."""
_LOCAL = frozenset({"progress", "failure.json"})
"""Files of a task that go by messages of their own."""
_MAX_PATH = 4096
_TAIL_BYTES = 64
_MAX_FILE_BYTES = 1 << 44


@dataclass(frozen=True, slots=True)
class Mark:
    """Distinguishes one content of a file from another, without reading it."""

    #: Its number on its disk: another one if the file was replaced.
    inode: int
    #: Its bytes.
    size: int
    #: When it was changed, in nanoseconds since 1970.
    changed: int
    #: How often a file that only grows was seen to begin again; numbers of inodes are used again.
    series: int = 0
    #: The last bytes of a file that only grows.
    tail: bytes = field(default=b"", compare=False)

    @classmethod
    def of(cls, status: os.stat_result) -> Mark:
        """Return the mark of a file with this status."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


def is_copied(path: PurePosixPath) -> bool:
    """Return whether a file of a job's folder is copied, by its path in there."""
    parts = path.parts
    if not parts or parts[0] not in _COPIED or any(part.startswith(".") for part in parts):
        return False
    if parts[0] != "tasks":
        return True
    return not any(part in _LOCAL or part.endswith(".log") for part in parts)


def grows_only(path: PurePosixPath) -> bool:
    """Return whether additions to a file are at its end, so that the rest needn't be sent again."""
    return path.suffix == ".jsonl" or path.name.startswith(EVENT_FILE)


def scan_folder(root: Path, known: Mapping[str, Mark], names: Collection[str] = _COPIED) -> dict[str, Mark]:
    """Return the files that are copied, by their paths below `root`. Files that vanish are left out.

    `known` is what the scan before this one has returned, `names` are the entries of `root` to look at.
    """
    found: dict[str, Mark] = {}
    for name in sorted(names):
        for path in _list_files(root / name):
            relative = path.relative_to(root).as_posix()
            if is_copied(PurePosixPath(relative)):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
                        continue
                    found[relative] = mark = Mark.of(status)
                    if grows_only(PurePosixPath(relative)):
                        found[relative] = _follow_growth(path, mark, known.get(relative))
    return found


def _follow_growth(path: Path, mark: Mark, before: Mark | None) -> Mark:
    """Return the mark of a file that only grows, in a new series if it has not grown from `before`."""
    with path.open("rb") as file:
        size = min(mark.size, _TAIL_BYTES)
        tail = os.pread(file.fileno(), size, mark.size - size)
        if before is None:
            return replace(mark, tail=tail)
        start = before.size - len(before.tail)
        grown = before.inode == mark.inode and before.size <= mark.size
        grown = grown and os.pread(file.fileno(), len(before.tail), start) == before.tail
    return replace(mark, series=before.series + (not grown), tail=tail)


def _list_files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, names, files in os.walk(path):
        names[:] = sorted(name for name in names if not name.startswith("."))
        yield from (Path(folder, file) for file in sorted(files))


def list_changes(
    found: Mapping[str, Mark], known: Mapping[str, Mark]
) -> tuple[list[tuple[str, int]], list[str]]:
    """Return ([(path, byte from which to send it)], [paths that are gone])."""
    changed = []
    for path, mark in found.items():
        before = known.get(path)
        if before == mark:
            continue
        grown = before is not None and before.series == mark.series and before.size <= mark.size
        start = before.size if before is not None and grown and grows_only(PurePosixPath(path)) else 0
        changed.append((path, start))
    return changed, [path for path in known if path not in found]


def read_parts(root: Path, path: str, start: int = 0) -> Iterator[Message]:
    """Yield the messages that carry one file. One that vanishes on the way ends with `dropped`."""
    try:
        with (root / path).open("rb") as file:
            file.seek(start)
            while True:
                data = file.read(PART_BYTES)
                last = len(data) < PART_BYTES
                part = base64.b64encode(data).decode()
                yield {"file": path, "start": start, "part": part, "last": last}
                start += len(data)
                if last:
                    return
    except OSError:
        yield {"file": path, "start": start, "part": "", "last": False, "dropped": True}


class FolderCopy:
    """Writes what comes from another host into a job's folder. A file is there as a whole or not at all,
    but for those that only grow."""

    def __init__(self, root: Path) -> None:
        self._root = root
        #: The file that is being received, and the path of its parts meanwhile.
        self._receiving: tuple[str, Path] | None = None
        #: Bytes of it that are there.
        self._received = 0

    def take(self, message: Message) -> str | None:
        """Take in one message of `read_parts`. Returns the file's path once it is whole.

        Raises ClusterError for what is no message of that kind, OSError if it can't be written, or if what
        comes before it isn't here; then the file must be sent again from its beginning.
        """
        path, start = message.get("file"), message.get("start")
        target = self._find_target(path)
        if message.get("dropped") is True:
            self.drop()
            return None
        try:
            data = base64.b64decode(str(message.get("part")), validate=True)
        except ValueError:
            raise ClusterError("A part of a file must be base64. Received: something else") from None
        if type(start) is not int or not 0 <= start < _MAX_FILE_BYTES:
            raise ClusterError(f"A part of a file begins at a byte. Received: {start!r:.100}")
        last = message.get("last") is True
        is_kept = PurePosixPath(str(path)).parts[0] in _KEPT
        _make_folders(target.parent, sync=is_kept)
        if self._receiving is None or self._receiving[0] != path or start == 0:
            self.drop()
            if start and grows_only(PurePosixPath(str(path))):
                if target.lstat().st_size < start:  # a hole would be read as zeros
                    raise _make_gap_error(target)
                _write_at(target, start, data, sync=is_kept and last)
                return str(path) if last else None
            name = f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}"
            self._receiving = str(path), target.with_name(name)
        partial = self._receiving[1]
        try:
            if start != self._received:
                raise _make_gap_error(target)
            _write_at(partial, start, data, sync=is_kept and last)
            self._received += len(data)
            if not last:
                return None
            partial.replace(target)
            if is_kept:
                sync_folder(target.parent)
        except OSError:
            self.drop()
            raise
        self._receiving, self._received = None, 0
        return str(path)

    def remove(self, path: object) -> None:
        """Remove a file that is gone elsewhere, and folders that are empty then. Raises ClusterError."""
        target = self._find_target(path)
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)
            for folder in target.parents:
                if folder.parent == self._root:
                    return
                folder.rmdir()

    def drop(self) -> None:
        """Forget the file that is being received."""
        if self._receiving is not None:
            with contextlib.suppress(OSError):
                self._receiving[1].unlink(missing_ok=True)
        self._receiving, self._received = None, 0

    def _find_target(self, path: object) -> Path:
        if type(path) is not str or not 0 < len(path) <= _MAX_PATH or "\0" in path:
            raise ClusterError(f"A file of a job has a path. Received: {path!r:.100}")
        relative = PurePosixPath(path)
        if relative.is_absolute() or ".." in relative.parts or not is_copied(relative):
            raise ClusterError(f"A file is copied into the parts of a job's folder. Received: {path!r:.100}")
        target = self._root / relative
        for folder in target.parents:
            if folder == self._root:
                break
            if folder.is_symlink():
                raise ClusterError(f"A file isn't copied through a link. Received: {path!r:.100}")
        return target


def _make_gap_error(path: Path) -> OSError:
    return OSError(errno.ENODATA, "what comes before this part of the file isn't here", str(path))


def _make_folders(folder: Path, *, sync: bool) -> None:
    """Make a folder and those above it. With `sync` their names survive a power cut."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing if sync else ():
        sync_folder(each.parent)


def _write_at(path: Path, start: int, data: bytes, *, sync: bool) -> None:
    """Write the part of a file that begins at byte `start`, and end the file with it. With `sync` all of it
    survives a power cut."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.seek(start)
        file.write(data)
        file.truncate()
        if sync:
            file.flush()
            os.fsync(descriptor)
