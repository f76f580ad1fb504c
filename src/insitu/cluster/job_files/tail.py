"""Reads a growing log from its start until its writer is done, also across rotations (see `logs.py`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

POLL_INTERVAL = 0.05
"""Seconds between two reads of a log that hasn't grown."""
_CHUNK = 1 << 20


def rotated_path(path: Path) -> Path:
    """Return where the older part of a log lies once it has been rotated."""
    return path.with_name(f"{path.name}.1")


def follow(
    path: Path, is_over: Callable[[], bool], poll_interval: float = POLL_INTERVAL, start: int = 0
) -> Iterator[list[bytes]]:
    """Yield the whole lines of `path` from byte `start` on, without their ends, in batches as they come.

    From byte 0 on the older part comes first, where there is one. Ends once `is_over` and everything is read.
    A last line that lacks its end is yielded at the end.
    """
    rest = b""
    file = _open_first(path, start)
    try:
        while True:
            # Asked before reading: what is written until the answer is "over" will then be read.
            over, is_newest = is_over(), _is_same(file, path)
            while data := file.read(_CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                if lines:
                    yield lines
            if not is_newest:
                following = _open_next(path, file)
                if following is not None:
                    file.close()
                    file = following
                    continue
            elif over:
                break
            time.sleep(poll_interval)
    finally:
        file.close()
    if rest:
        yield [rest]


def _open_first(path: Path, start: int) -> BinaryIO:
    older = rotated_path(path)
    if start == 0 and older.exists():
        return older.open("rb", buffering=0)
    file = path.open("rb", buffering=0)
    file.seek(start if start <= os.fstat(file.fileno()).st_size else 0)
    return file


def _open_next(path: Path, file: BinaryIO) -> BinaryIO | None:
    """Return the part of the log that follows `file`, which isn't the newest; None while it isn't there."""
    older = rotated_path(path)
    try:
        missed = older.exists() and not _is_same(file, older)
        return (older if missed else path).open("rb", buffering=0)
    except FileNotFoundError:
        return None


def _is_same(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        # Rotated just now: the next part isn't there yet.
        return False
