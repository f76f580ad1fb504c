"""What every room that writes to a disk needs: what "no room" is, and names that survive a power cut."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The system's numbers for "no room": of the device, of the user's quota, of the limit on a file's size."""

_DIRECT = getattr(os, "O_DIRECT", 0)
_WORTHWHILE = 1 << 20
"""Bytes of a file from which on the way past the system's cache is the shorter one."""
_AT_ONCE = 16 << 20
"""Bytes per call of the system."""


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_pages(path: Path, pages: memoryview, size: int) -> None:
    """Writes the first `size` bytes of `pages` to a new file, so that they survive a power cut.

    `pages` must be whole pages of memory that begin at one: where the file system can, the disk takes them
    as they are. The way through the system's cache costs the processor a copy, and whoever reads these bytes
    again does so after a failure, when the cache is cold anyway. Raises OSError.
    """
    flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        if size >= _WORTHWHILE:
            _past_the_cache(descriptor, True)
        written = 0
        while written < size:
            try:
                written += os.write(descriptor, pages[written : written + _AT_ONCE])
            except OSError as error:
                # Some file systems say only now that they can't.
                if error.errno != errno.EINVAL or not _past_the_cache(descriptor, False):
                    raise
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _past_the_cache(descriptor: int, wanted: bool) -> bool:
    """Whether writing to the file has now been changed to go past the system's cache, or no longer to."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if bool(flags & _DIRECT) is wanted or not _DIRECT:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
