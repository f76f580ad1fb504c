"""The blocks that one store holds: files in the host's memory, or on the store's disk when that is full.

The memory is a folder of its own in /dev/shm, so blocks outlive the agent's process, not
the host's start.
A block is written under another name and renamed, so it is there as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from insitu.base.disk.access import file_mode, make_folder
from insitu.base.disk.durable import sync_folder, sync_tree
from insitu.base.errors import StorageFull
from insitu.grid.shared_files.entries import check_key, check_volume, checksum_block, is_manifest

_PARTIAL = ".partial"
PARTIAL_SECONDS = 3600.0
_RESERVE_BYTES = 64 << 20
_RESERVE_SHARE = 20
"""Files leave so many bytes of a disk free, or one part of so many of a small one. An agent can't
begin on a full disk."""
_RECOUNT = 64
"""Writes after which the memory in use is counted again: other processes write there, too."""


class BlockFolder:
    """The blocks of one store, by volume and key.

    `memory` is the folder in memory, None: only the disk is used. `limit` returns the bytes of memory that
    may be used, `check_disk` raises StorageFull if the disk may not take some bytes more.
    """

    def __init__(
        self,
        home: Path,
        disk: Path,
        memory: Path | None,
        limit: Callable[[], int],
        check_disk: Callable[[int], None] = lambda need: None,
    ) -> None:
        self._home = home
        self._disk = disk
        self._memory = MemoryFolder(memory)
        self._limit = limit
        self._check_disk = check_disk
        self._lock = threading.Lock()
        #: Bytes in memory, about, and the writes since they were counted. Written under the lock.
        self._used = 0
        self._writes = _RECOUNT
        #: When this process has written or kept a block last, on the monotonic clock: that of the host may
        #: jump. Written under its own lock.
        self._touched: dict[tuple[str, str], float] = {}
        self._touching = threading.Lock()

    def _places(self) -> list[Path]:
        memory = self._memory.find()
        return [self._disk] if memory is None else [memory, self._disk]

    def _find(self, volume: str, key: str) -> Path | None:
        name = Path(check_volume(volume)) / check_key(key)
        for place in (*self._places(), *self._places()):  # it may move to the disk meanwhile
            with contextlib.suppress(OSError):
                found = (place / name).lstat()
                if stat.S_ISREG(found.st_mode) and found.st_size:
                    return place / name
        return None

    def put(self, volume: str, key: str, data: bytes | memoryview) -> None:
        """Keep a block; on the disk it survives a power cut. Raises OSError, with ENOSPC if there is no room:
        nothing of it stays."""
        self._touch(volume, key)
        if self._find(volume, key) is not None:
            return
        with self._lock:
            memory = self._memory.make()
            if memory is not None and self._make_room(memory, len(data)):
                try:
                    (memory / volume).mkdir(mode=0o700, exist_ok=True)
                    self._write(memory / volume / key, data)
                    self._used += len(data)
                    self._writes += 1
                    return
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
        self._write_to_disk(volume, key, data, sync=True)

    def _write_to_disk(self, volume: str, key: str, data: bytes | memoryview, *, sync: bool) -> Path:
        try:
            self._check_disk(len(data))
        except StorageFull as error:
            raise OSError(errno.ENOSPC, error.message) from None
        folder = self._disk / volume
        make_folder(self._home, folder)
        room = shutil.disk_usage(folder)
        reserve = min(_RESERVE_BYTES, room.total // _RESERVE_SHARE)
        if room.free - len(data) < reserve:
            why = f"files of insitu:// leave {reserve} bytes of the disk of {folder} free"
            raise OSError(errno.ENOSPC, why)
        path = folder / key
        self._write(path, data, sync=sync)
        try:
            # All of them: who has made a folder needn't have synced it.
            for each in (folder, self._disk, self._disk.parent) if sync else ():
                sync_folder(each)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path

    def _write(self, path: Path, data: bytes | memoryview, *, sync: bool = False) -> None:
        partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{_PARTIAL}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(partial, flags, file_mode(self._home)), "wb", buffering=0) as file:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
                if sync:
                    os.fsync(file.fileno())
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _make_room(self, memory: Path, need: int) -> bool:
        """Move blocks that were used longest ago to the disk, until `need` bytes fit into memory. Return
        whether they do."""
        limit = self._limit()
        if need > limit:
            return False
        if self._writes >= _RECOUNT or self._used + need > limit:
            self._used, self._writes = sum(size for _, size, _ in self._scan(memory)), 0
        if self._used + need <= limit:
            return True
        oldest = sorted(self._scan(memory), key=lambda each: each[2])
        for path, size, _ in oldest:
            try:
                self._spill(path)
            except OSError:
                return False
            self._used -= size
            if self._used + need <= limit:
                return True
        return self._used + need <= limit

    def _spill(self, path: Path) -> None:
        """Move a block to the disk from memory, which no power cut spares."""
        self._copy_to_disk(path)
        path.unlink(missing_ok=True)

    def _copy_to_disk(self, path: Path) -> None:
        try:
            data, found = _read(path), path.lstat()
        except FileNotFoundError:
            return
        new = self._write_to_disk(path.parent.name, path.name, data, sync=False)
        os.utime(new, (found.st_atime, found.st_mtime))

    def spill_all(self) -> int:
        """Move the blocks in memory to the disk, where they survive a power cut, and give the memory back.
        Return how many blocks stay, as there is no room for them or the disk fails."""
        memory = self._memory.find()
        if memory is None:
            return 0
        copied, left = list[Path](), 0
        with self._lock:
            self._writes = _RECOUNT
            for path, _, _ in self._scan(memory):
                try:
                    self._copy_to_disk(path)
                    copied.append(path)
                except OSError:
                    left += 1
            try:
                if copied:
                    sync_tree(self._disk)
                    sync_folder(self._disk.parent)
            except OSError:
                return left + len(copied)
            for path in copied:
                path.unlink(missing_ok=True)
            if not left:
                self._memory.remove()
        return left

    def get(self, volume: str, key: str) -> bytes:
        """Return a block. Raises FileNotFoundError."""
        for _ in range(2):
            path = self._find(volume, key)
            if path is None:
                break
            try:
                data = _read(path)
            except FileNotFoundError:
                continue
            with contextlib.suppress(OSError):
                os.utime(path, (time.time(), path.stat().st_mtime))
            return data
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)

    def drop(self, volume: str, keys: Iterable[str], older_than: float = 0.0) -> int:
        """Remove blocks that nobody has written or kept for `older_than` seconds. Return how many were
        there."""
        count = 0
        for key in keys:
            for place in self._places():
                path = place / check_volume(volume) / check_key(key)
                with contextlib.suppress(FileNotFoundError):
                    count += self._drop(path, older_than)
        return count

    def _drop(self, path: Path, older_than: float) -> bool:
        if not older_than:
            path.unlink()
            return True
        # Under another name nobody can keep it between the look at its age and its end.
        aside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{_PARTIAL}")
        path.rename(aside)
        is_old = self._find_age(path.parent.name, path.name, aside.stat().st_mtime) >= older_than
        aside.unlink() if is_old else aside.rename(path)
        return is_old

    def keep(self, volume: str, keys: Iterable[str]) -> list[str]:
        """Mark blocks as used by a writer who hasn't published them yet. Return those that are here."""
        found = []
        for key in keys:
            self._touch(volume, key)
            path = self._find(volume, key)
            with contextlib.suppress(FileNotFoundError):  # it may move to the disk meanwhile
                if path is not None:
                    os.utime(path)
            if self._find(volume, key) is not None:
                found.append(key)
        return found

    def _touch(self, volume: str, key: str) -> None:
        with self._touching:
            self._touched[volume, key] = time.monotonic()

    def _find_age(self, volume: str, key: str, modified: float) -> float:
        """Return for how many seconds nobody has written or kept a block."""
        age, touched = max(0.0, time.time() - modified), self._touched.get((volume, key))
        return age if touched is None else min(age, time.monotonic() - touched)

    def drop_damaged(self, volume: str, key: str, checksum: str) -> bool:
        """Remove a block if its bytes don't have `checksum`. Return whether it was removed."""
        try:
            damaged = checksum_block(self.get(volume, key)) != checksum
        except FileNotFoundError:
            return False
        return damaged and self.drop(volume, [key]) > 0

    def list_held(self, volume: str, *, manifests: bool = False) -> dict[str, float]:
        """Return for how many seconds nobody has written or kept each block of a volume, or with `manifests`
        each manifest, by key."""
        held = {}
        for place in self._places():
            for path, _, _ in self._scan(place / check_volume(volume), deep=False):
                if is_manifest(path.name) is manifests:
                    with contextlib.suppress(OSError):
                        held[path.name] = self._find_age(volume, path.name, path.stat().st_mtime)
        return held

    def list_volumes(self) -> list[str]:
        """Return the volumes of which there are blocks."""
        found = set()
        for place in self._places():
            with contextlib.suppress(OSError):
                found |= {each.name for each in os.scandir(place) if each.is_dir(follow_symlinks=False)}
        return sorted(found)

    def measure(self) -> tuple[int, int]:
        """Return the bytes in memory and on the disk."""
        folder = self._memory.find()
        memory = 0 if folder is None else sum(size for _, size, _ in self._scan(folder))
        return memory, sum(size for _, size, _ in self._scan(self._disk))

    def sweep(self, now: float) -> None:
        """Remove what writers have left that were killed, and forget when blocks were touched long ago."""
        with self._touching:
            since = time.monotonic() - PARTIAL_SECONDS
            self._touched = {each: at for each, at in self._touched.items() if at > since}
        for place in self._places():
            for path in place.glob(f"*/*{_PARTIAL}"):
                with contextlib.suppress(OSError):
                    if now - path.stat().st_mtime > PARTIAL_SECONDS:
                        path.unlink()

    def _scan(self, folder: Path, *, deep: bool = True) -> Iterator[tuple[Path, int, float]]:
        """Yield path, bytes and time of the last use of each block. Memory counts half-written ones, too."""
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(folder)):
                if deep and entry.is_dir(follow_symlinks=False):
                    yield from self._scan(Path(entry.path), deep=False)
                elif not deep and not entry.name.endswith(_PARTIAL):
                    with contextlib.suppress(OSError):
                        found = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(found.st_mode) and found.st_size:  # a power cut may leave empty ones
                            yield Path(entry.path), found.st_size, found.st_atime


def _read(path: Path) -> bytes:
    """Return the bytes of a file, not of what a link leads to, and without waiting for the writer of a pipe.
    Raises FileNotFoundError if there is no file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path.name)
        return file.readall()


# A folder in the host's memory that is this user's alone.
#
# Its name can be computed by anybody, and anybody may make a folder in /dev/shm. So it is taken by its
# descriptor, looked at, and used by that alone: what others put in its place later changes nothing


logger = logging.getLogger("insitu")
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class MemoryFolder:
    """The folder at `path`, None: there is none. For several threads."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        #: The folder that was taken, and what closes it. Written under the lock.
        self._taken: tuple[int, weakref.finalize[[int], MemoryFolder]] | None = None
        #: Whether somebody else's folder is there, which is never used. Written under the lock.
        self._is_refused = False

    def find(self) -> Path | None:
        """Return the folder, None if it wasn't made or isn't this user's alone."""
        return self._take(make=False)

    def make(self) -> Path | None:
        """Return the folder, which is made if it isn't there; None if that fails."""
        return self._take(make=True)

    def remove(self) -> None:
        """Remove the folder with all in it."""
        if self._path is not None and self.find() is not None:
            shutil.rmtree(self._path, ignore_errors=True)

    def _take(self, *, make: bool) -> Path | None:
        with self._lock:
            if self._path is None or self._is_refused:
                return None
            if self._taken is not None and not os.fstat(self._taken[0]).st_nlink:
                self._taken[1]()  # it was removed
                self._taken = None
            if self._taken is None and (descriptor := self._open(self._path, make=make)) is not None:
                self._taken = descriptor, weakref.finalize(self, os.close, descriptor)
            return None if self._taken is None else Path(f"/proc/self/fd/{self._taken[0]}")

    def _open(self, path: Path, *, make: bool) -> int | None:
        """Return a descriptor of the folder, None if it isn't there or can't be used."""
        if make:
            with contextlib.suppress(OSError):
                path.mkdir(mode=0o700)
        descriptor, why = -1, ""
        try:
            descriptor = os.open(path, _FLAGS)
            found = os.fstat(descriptor)
            if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                return descriptor
            why = f"it is of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
        except FileNotFoundError:
            return None
        except OSError as error:
            why = error.strerror or str(error)
        if descriptor >= 0:
            os.close(descriptor)
        self._is_refused = True
        logger.warning(
            "files of insitu:// are on the disk, not in memory: %s must be a folder of this user alone, and "
            "%s. Have its owner remove it, and start the agent again",
            *(path, why),
        )
        return None
