"""The blocks that one store holds: files in the host's memory, or on the store's disk when that is full.

The memory is a folder of its own in /dev/shm, so blocks outlive the agent's process, not the host's start.
A block is written under another name and renamed, so it is there as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from insitu.access import file_mode, make_folder
from insitu.errors import InputError, StorageFull
from insitu.grid.shared_files.entries import check_key, check_volume, checksum_block

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
    may be used, `check_disk` raises StorageFull where the disk may not take some bytes more.
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
        self._memory = memory
        self._limit = limit
        self._check_disk = check_disk
        self._lock = threading.Lock()
        #: Bytes in memory, about, and the writes since they were counted. Written under the lock.
        self._used = 0
        self._writes = _RECOUNT

    def _places(self) -> list[Path]:
        return [self._disk] if self._memory is None else [self._memory, self._disk]

    def _find(self, volume: str, key: str) -> Path | None:
        name = Path(check_volume(volume)) / check_key(key)
        for place in (*self._places(), *self._places()):  # it may move to the disk meanwhile
            if (place / name).is_file():
                return place / name
        return None

    def put(self, volume: str, key: str, data: bytes | memoryview) -> None:
        """Keep a block. Raises OSError with ENOSPC where there is no room, and nothing of it stays."""
        if self._find(volume, key) is not None:
            return
        with self._lock:
            if self._memory is not None and self._make_room(len(data)):
                try:
                    self._write(self._make_memory(volume) / key, data)
                    self._used += len(data)
                    self._writes += 1
                    return
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
        self._write_to_disk(volume, key, data)

    def _write_to_disk(self, volume: str, key: str, data: bytes | memoryview) -> Path:
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
        self._write(folder / key, data)
        return folder / key

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{_PARTIAL}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(partial, flags, file_mode(self._home)), "wb", buffering=0) as file:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _make_memory(self, volume: str) -> Path:
        """Return the folder in memory of a volume. Raises InputError where another user has put one there."""
        assert_memory = self._memory or self._disk
        for folder in (assert_memory, assert_memory / volume):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise InputError(
                    f"Files in memory lie in a folder that is this user's alone. Received: {folder} of user "
                    f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}. Remove it, or have its owner "
                    f"remove it"
                )
        return assert_memory / volume

    def _make_room(self, need: int) -> bool:
        """Move blocks that were used longest ago to the disk, until `need` bytes fit into memory. Return
        whether they do."""
        limit = self._limit()
        if need > limit or self._memory is None:
            return False
        if self._writes >= _RECOUNT or self._used + need > limit:
            self._used, self._writes = sum(size for _, size, _ in self._scan(self._memory)), 0
        if self._used + need <= limit:
            return True
        oldest = sorted(self._scan(self._memory), key=lambda each: each[2])
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
        """Move a block from memory to the disk."""
        try:
            data, found = path.read_bytes(), path.stat()
        except FileNotFoundError:
            return
        new = self._write_to_disk(path.parent.name, path.name, data)
        os.utime(new, (found.st_atime, found.st_mtime))
        path.unlink(missing_ok=True)

    def spill_all(self) -> int:
        """Move what is in memory to the disk, and give the memory back. Return how many blocks have no room
        there and stay."""
        if self._memory is None or not self._memory.exists():
            return 0
        left = 0
        with self._lock:
            self._writes = _RECOUNT
            for path, _, _ in self._scan(self._memory):
                try:
                    self._spill(path)
                except OSError:
                    left += 1
            if not left:
                shutil.rmtree(self._memory, ignore_errors=True)
        return left

    def get(self, volume: str, key: str) -> bytes:
        """Return a block. Raises FileNotFoundError."""
        for _ in range(2):
            path = self._find(volume, key)
            if path is None:
                break
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            with contextlib.suppress(OSError):
                os.utime(path, (time.time(), path.stat().st_mtime))
            return data
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)

    def drop(self, volume: str, keys: Iterable[str]) -> int:
        """Remove blocks. Return how many were there."""
        count = 0
        for key in keys:
            for place in self._places():
                with contextlib.suppress(FileNotFoundError):
                    (place / check_volume(volume) / check_key(key)).unlink()
                    count += 1
        return count

    def keep(self, volume: str, keys: Iterable[str]) -> list[str]:
        """Mark blocks as used by a writer who hasn't published them yet. Return those that are here."""
        found = []
        for key in keys:
            path = self._find(volume, key)
            with contextlib.suppress(FileNotFoundError):  # it may move to the disk meanwhile
                if path is not None:
                    os.utime(path)
            if self._find(volume, key) is not None:
                found.append(key)
        return found

    def drop_damaged(self, volume: str, key: str, checksum: str) -> bool:
        """Remove a block if its bytes don't have `checksum`. Return whether it was removed."""
        try:
            damaged = checksum_block(self.get(volume, key)) != checksum
        except FileNotFoundError:
            return False
        return damaged and self.drop(volume, [key]) > 0

    def list_held(self, volume: str) -> dict[str, float]:
        """Return when each block of a volume was written or kept, by key, in seconds since 1970 by the clock
        of this host, which may be wrong."""
        held = {}
        for place in self._places():
            for path, _, _ in self._scan(place / check_volume(volume), deep=False):
                with contextlib.suppress(OSError):
                    held[path.name] = path.stat().st_mtime
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
        memory = 0 if self._memory is None else sum(size for _, size, _ in self._scan(self._memory))
        return memory, sum(size for _, size, _ in self._scan(self._disk))

    def sweep(self, now: float) -> None:
        """Remove what writers have left that were killed."""
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
                        yield Path(entry.path), found.st_size, found.st_atime
