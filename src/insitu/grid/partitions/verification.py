"""Verifies whole copies of partitions by their checksums, and remembers which files it has found right.

Readers of rows don't need that: they check each block before its rows are used. A fetch does: a record beside
the file says at which size, time of change, inode and device its checksum was right. While the file has all
four, it counts as fetched. `insitu describe CACHE --verify` and `insitu scrub` always read.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from insitu.base.disk.durable import replace_file
from insitu.base.spec import PartitionInfo
from insitu.grid.partitions import file_checksum, make_corrupt_error, make_unreadable_error

TIMESTAMP_TOLERANCE_NS = 20_000_000
"""Nanoseconds that must have passed since the last change of a file before it is recorded.

The clock of file times ticks every few milliseconds: within one tick, a second change leaves the same time.
"""

_verified: dict[Path, dict[str, Any]] = {}
"""The record of each file that this process has read and found right."""


def verify_file(
    path: Path, info: PartitionInfo, record: Path, on_read: Callable[[int], None] | None = None
) -> None:
    """Read a whole file, compare its checksum with the one expected, and write or remove its `record`.

    `on_read` is as for `file_checksum`. Raises CorruptPartition.
    """
    check_size(path, info)
    started = time.time_ns()
    try:
        before = _stat_record(path, info)
        found = file_checksum(path, on_read)
        unchanged = _stat_record(path, info) == before
    except OSError as error:
        raise make_unreadable_error(path, f"it can't be read ({error.strerror})") from error
    if found != info.checksum:
        _verified.pop(path, None)
        with contextlib.suppress(OSError):
            record.unlink(missing_ok=True)
        raise make_corrupt_error(path, f"its checksum is {found}, expected {info.checksum}")
    if unchanged:
        _verified[path] = before
        _keep(before, path, record, now=started)


def verify_once(path: Path, info: PartitionInfo, record: Path) -> None:
    """Verify a file like `verify_file`, unless it is unchanged since an earlier verification or its import.

    Raises CorruptPartition.
    """
    check_size(path, info)
    if not is_verified(path, info, record):
        verify_file(path, info, record)


def is_verified(path: Path, info: PartitionInfo, record: Path) -> bool:
    """Return whether a file is unchanged since an earlier verification or its import."""
    with contextlib.suppress(OSError):
        return _stat_record(path, info) in (_verified.get(path), _read(record))
    return False


def record_written(path: Path, info: PartitionInfo, record: Path) -> None:
    """Record a file that this process has just written, with a checksum taken of the bytes as they went."""
    with contextlib.suppress(OSError):
        _keep(_stat_record(path, info), path, record, now=time.time_ns())


def is_cut_short(path: Path, info: PartitionInfo) -> bool:
    """Return whether the file is there with fewer bytes than it must have."""
    try:
        return path.stat().st_size < info.bytes
    except OSError:  # what is mapped stays whole without its name
        return False


def check_size(path: Path, info: PartitionInfo) -> None:
    """Raise CorruptPartition unless the file is there, with the bytes that it must have."""
    try:
        size = path.stat().st_size
    except OSError as error:
        is_link = path.is_symlink()
        where = f" at {os.readlink(path)}, on the second path of its store" if is_link else ""
        why = f"it can't be found{where} ({error.strerror})"
        is_missing = isinstance(error, FileNotFoundError) and not is_link  # else its disk may be offline
        raise (make_corrupt_error if is_missing else make_unreadable_error)(path, why) from error
    if size != info.bytes:
        raise make_corrupt_error(path, f"it has {size} bytes, expected {info.bytes}")


def _stat_record(path: Path, info: PartitionInfo) -> dict[str, Any]:
    """Return the record that a file would have now, if its checksum were right."""
    found = os.stat(path)
    return {
        "checksum": info.checksum,
        "bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "inode": found.st_ino,
        "device": found.st_dev,
    }


def _read(record: Path) -> Any:
    """Return the content of `record`; None if there is none or it can't be read."""
    try:
        return json.loads(record.read_text())
    except (OSError, ValueError):
        return None


def _keep(state: dict[str, Any], path: Path, record: Path, *, now: int) -> None:
    if now - state["mtime_ns"] >= TIMESTAMP_TOLERANCE_NS:
        # Without a record, as in a store that can't be written to, the next process reads the file again.
        with contextlib.suppress(OSError):
            # As open as the partition itself.
            mode = stat.S_IMODE(os.stat(path).st_mode)
            replace_file(record, json.dumps(state).encode(), mode=mode)
