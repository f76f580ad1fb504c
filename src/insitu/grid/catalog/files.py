"""Locks, atomic publishing of files, and clear errors for a full disk or a home that can't be used."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from insitu.base.disk.access import PRIVATE_FILE, PRIVATE_FOLDER, make_file, make_folder
from insitu.base.disk.durable import NO_ROOM, replace_file, staged_file, write_synced
from insitu.base.errors import CacheBusy, GridError, InputError, StorageFull
from insitu.base.paths import Paths

_REFUSALS = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.ENOENT,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)
"""The system's errors for a path that can't be used, however often one tries."""
_CLEANING_SECONDS = 0.5
"""Seconds to wait for a lock, which a clean-up may hold for microseconds."""


@contextlib.contextmanager
def full_disk_as_error(
    where: Path,
    left: str = "Nothing of it was kept",
    advice: str = "Free some space, or put INSITU_HOME on a larger device",
) -> Iterator[None]:
    """Turn the system's errors for "no room" (device, quota, file size limit) into StorageFull, and that for
    a device that fails into GridError.

    `left` says what has become of what was written, `advice` how to make room.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EIO:
            raise GridError(
                f"The disk must take what is written to {where}. Received: {error.strerror}"
                f"{f' for {error.filename}' if error.filename else ''}. {left}. Look for its errors in the "
                f"system's log, and replace it or mount it again"
            ) from error
        if error.errno not in NO_ROOM:
            raise
        raise StorageFull(
            f"No room is left for {where} ({os.strerror(error.errno or 0)}). {left}. {advice}"
        ) from error


@contextlib.contextmanager
def home_errors(home: Path) -> Iterator[None]:
    """Turn the system's refusal of a file or folder of INSITU_HOME into InputError.

    Too many open files become GridError. Errors about other paths pass.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise GridError(
                f"Too many files are open ({error.strerror}). Allow this process more of them, such as "
                f"`ulimit -n 65536`, then try again"
            ) from error
        path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else None
        if error.errno not in _REFUSALS or path is None or not _related(path, home):
            raise
        raise InputError(
            f"INSITU_HOME must be a folder that insitu can write to. Received: {home}, where {path} can't be "
            f"used ({error.strerror}). Set INSITU_HOME to another folder, or correct who owns it"
        ) from error


def _related(path: Path, home: Path) -> bool:
    return path.is_relative_to(home) or home.is_relative_to(path)


def publish_file(target: Path, data: bytes, mode: int = PRIVATE_FILE) -> None:
    """Replace `target` by `data` as a whole, durable, and make its folder. Raises StorageFull."""
    with full_disk_as_error(target):
        target.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        replace_file(target, data, sync=True, mode=mode)


def publish_first(target: Path, data: bytes, mode: int = PRIVATE_FILE) -> bool:
    """Publish `data` at `target` unless another process has done so. Returns whether this one did."""
    with full_disk_as_error(target):
        target.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        with staged_file(target) as staged:
            write_synced(staged, data, mode)
            try:
                os.link(staged, target)
            except FileExistsError:
                return False
            return True


@contextlib.contextmanager
def cache_locks(paths: Paths, caches: Sequence[str], *, seconds: float = _CLEANING_SECONDS) -> Iterator[None]:
    """Hold the import locks of `caches`. Raises CacheBusy if another process has one.

    The kernel drops a lock when its holder ends, so a killed import leaves none. A clean-up holds a lock for
    an instant; this function waits up to `seconds` for that.
    """
    with contextlib.ExitStack() as stack:
        for cache in sorted(set(caches)):
            path = paths.cache_lock(cache)
            make_folder(paths.home, path.parent)
            make_file(paths.home, path)
            file = stack.enter_context(open(path, "a", opener=_open_itself))
            if not _locked(file, seconds):
                raise CacheBusy(
                    f"Another process is importing into {cache} or repairs it. Wait for it to end, then try "
                    f"again"
                )
        yield


def _open_itself(name: str, flags: int) -> int:
    """Open a file, not what a link in its place leads to."""
    return os.open(name, flags | os.O_NOFOLLOW)


def _locked(file: IO[str], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_CLEANING_SECONDS / 20)
        else:
            return True
