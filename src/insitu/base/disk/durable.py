"""Files and names that survive a power cut, whole or not at all; and the system's errors for a full disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import mmap
import os
import re
import resource
import shutil
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The system's numbers for "no room": of the device, of the user's quota, of the limit on a file's size."""


def read_file_size_limit() -> int | None:
    """Return the most bytes that a file of this process may have (`ulimit -f`); None: any number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


STAGING = ".staging-"
"""The beginning of names of folders that aren't published yet."""
_PUBLISHING = threading.Lock()
"""Held while a folder gets its name or leaves that of another writer."""
_being_filled: set[Path] = set()
"""Folders that threads of this process fill for `published`."""
_staging_numbers = itertools.count()
_ASIDE = ".replaced-"
"""The beginning of names of folders that are about to be replaced."""
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
"""Linux's numbers for renameat2(2)."""
_SYNCED_ONE_BY_ONE = 100
"""Files up to which each is synced alone; with more, the whole file system is, in one call."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_WORTHWHILE = 1 << 20
"""Bytes of a file from which on the way past the system's cache is the shorter one."""
_AT_ONCE = 16 << 20
"""Bytes per call of the system."""


def is_missing(path: Path) -> bool:
    """Return True if nothing has this name. Other errors don't count as missing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make `folder` and everything in it, or one file, survive a power cut. Raises OSError."""
    files, folders = [folder] if folder.is_file() else [], []
    for parent, _, names in os.walk(folder):
        folders.append(Path(parent))
        files += [Path(parent, name) for name in names]
    if len(files) > _SYNCED_ONE_BY_ONE:
        _sync_file_system(folder)
        return
    for file in files:
        if file.is_symlink() or not file.is_file():
            continue
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for one in reversed(folders):
        sync_folder(one)


def _sync_file_system(folder: Path) -> None:
    """Write down everything that the file system of `folder` has in memory. Raises OSError."""
    import ctypes

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(descriptor)


class PageFile:
    """A new file that is written in whole pages of memory: if the file system can, the disk takes them as
    they are.

    The way through the system's cache costs the processor a copy, and these bytes are read again only
    after a failure, when the cache is cold anyway. `expected` is about how many bytes will come. With
    `start`, whole pages, it continues there in what is at `path`. All methods raise OSError.
    """

    def __init__(self, path: Path, expected: int, start: int = 0) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | (0 if start else os.O_TRUNC)
        self._descriptor = os.open(path, flags, 0o666)
        os.lseek(self._descriptor, start, os.SEEK_SET)
        if expected >= _WORTHWHILE:
            set_direct_io(self._descriptor, True)

    def write(self, pages: memoryview) -> None:
        """Add whole pages, which begin at one. Only the last call may bring part of one."""
        written = 0
        while written < len(pages):
            try:
                written += os.write(self._descriptor, pages[written : written + _AT_ONCE])
            except OSError as error:
                # Some file systems say only now that they can't.
                if error.errno != errno.EINVAL or not set_direct_io(self._descriptor, False):
                    raise

    def finish(self, size: int) -> None:
        """Cut the file to `size` bytes, which survive a power cut from then on."""
        self.cut(size)
        os.fsync(self._descriptor)

    def cut(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        os.close(self._descriptor)


def write_pages(path: Path, pages: memoryview, size: int) -> None:
    """Write the first `size` bytes of `pages` to a new file, so that they survive a power cut. `pages` must
    be whole pages of memory that begin at one: see `PageFile`. Raises OSError."""
    with contextlib.closing(PageFile(path, size)) as file:
        file.write(pages[: -(-size // mmap.PAGESIZE) * mmap.PAGESIZE])
        file.finish(size)


@contextlib.contextmanager
def published(folder: Path, name: str) -> Iterator[Path]:
    """Yield a new folder to be filled, which becomes `folder`/`name` by one rename and survives a power cut.

    A previous one is replaced: a process that is killed at any moment leaves the old or the new one.

    After an error nothing is left of the new one. One process at a time publishes in `folder`, in any of its
    threads: what processes before it or failed writers left half-written is removed first. Raises OSError.
    """
    final = folder / name
    staging = _make_staging_folder(folder)
    try:
        yield staging
        sync_folder(staging)
        with _PUBLISHING:
            old = replace_folder(staging, final)
        sync_folder(folder)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        _being_filled.discard(staging)


def replace_folder(new: Path, final: Path) -> Path | None:
    """Give `new` the name `final`. Returns the path that a previous one has now, or None. Raises OSError."""
    if not final.exists():
        new.rename(final)
        return None
    if _exchange(new, final):
        return new
    # If the file system can't exchange two names, there is a moment without one. A process that is killed
    # then leaves work to `recover_replaced`.
    aside = final.with_name(f"{_ASIDE}{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    final.rename(aside)
    new.rename(final)
    return aside


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders swap their names at once. Returns False if the system can't. Raises OSError."""
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def recover_replaced(folder: Path) -> None:
    """Give back their names to folders in `folder` whose replacement was killed. Only while nobody publishes
    there. Raises OSError."""
    for aside in folder.glob(f"{_ASIDE}*"):
        final = aside.with_name(aside.name.removeprefix(_ASIDE))
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(final)


def _make_staging_folder(folder: Path) -> Path:
    """Make a new folder in `folder`, and remove those there that no thread of this process fills."""
    with _PUBLISHING:
        staging = folder.resolve() / f"{STAGING}{os.getpid()}-{next(_staging_numbers)}"
        for left in staging.parent.glob(f"{STAGING}*"):
            if left not in _being_filled:
                shutil.rmtree(left, ignore_errors=True)
        recover_replaced(staging.parent)
        staging.mkdir(parents=True)
        _being_filled.add(staging)
    return staging


@contextlib.contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """Yield the path of a new file beside `target`, for the caller to write and then rename or link.

    No other process uses this path. If the file is still there at the end, it is removed.
    """
    staged = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        yield staged
    finally:
        staged.unlink(missing_ok=True)


def is_staged_file(path: Path) -> bool:
    """Return whether `path` has the form of `staged_file`: a process that was killed may leave one."""
    return re.fullmatch(r"\..+\.\d+\.[0-9a-f]{8}", path.name) is not None


def replace_file(target: Path, data: bytes, *, sync: bool = False, mode: int | None = None) -> None:
    """Replace `target` by `data` with one rename: a reader sees all of the old content or all of the new.

    With `sync`, the new content survives a power cut. `mode` is that of the file; None: what the umask
    leaves. Raises OSError. After an error `target` is as it was; only if its folder can't be synced it has
    the new content, which may not survive.
    """
    with staged_file(target) as staged:
        if sync or mode is not None:
            write_synced(staged, data, mode, sync=sync)
        else:
            staged.write_bytes(data)
        staged.replace(target)
        if sync:
            sync_folder(target.parent)


def write_synced(path: Path, data: bytes, mode: int | None = None, *, sync: bool = True) -> None:
    """Write a small file so that it survives a power cut, unless `sync` is false. `mode` is that of the file,
    from its first byte on; None: what the umask leaves. Raises OSError."""

    def open_with_mode(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666 if mode is None else mode & 0o700)

    with open(path, "wb", opener=open_with_mode) as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def seal(state: Any) -> bytes:
    """Return `state` as JSON, with a checksum of it."""
    text = json.dumps(state)
    return json.dumps({"crc32": zlib.crc32(text.encode()), "state": text}).encode()


def unseal(data: bytes) -> Any:
    """Return what `seal` was given. Raises ValueError, KeyError or TypeError if `data` is anything else."""
    outer = json.loads(data)
    if zlib.crc32(outer["state"].encode()) != outer["crc32"]:
        raise ValueError("its checksum doesn't match")
    return json.loads(outer["state"])


def set_direct_io(descriptor: int, enabled: bool) -> bool:
    """Make writes to the file bypass the system's cache, or no longer. Returns whether that is new."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if bool(flags & _DIRECT) is enabled or not _DIRECT:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
