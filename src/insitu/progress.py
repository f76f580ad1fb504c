"""How far a task is: a few bytes that it writes in place each step and that anybody on its node may read.

A memory-mapped record, so that saying "I am at step 12" costs no system call.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from insitu.durable import staged_file

_RECORD = struct.Struct("<QqqQdqq24s")
"""Words so far, epoch, step, rows, monotonic time, generation, elastic, place."""
_SUM = struct.Struct("<I")
_SLOT = _RECORD.size + _SUM.size
"""Bytes of a record and its CRC-32. A file has two: while one is being written, the other is the last word.
A task may be suspended or killed at any time, and what it said before must still be heard."""
_TRIES = 10


IDLE = "idle"
"""The place of a task that has stopped training: it may take as long as it likes for whatever it does."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The last word of a task.

    `epoch` and `step` count from 0 and name the step under way (-1: not training yet); `rows` is how many
    rows this task has fed to the model in this attempt; `at` the system's monotonic clock in seconds when
    it was written; `place` what it was about to do, such as `gradient` or `exchange`, or `idle`.

    `elastic`: this task's strategy can lose a peer and go on with another (see `insitu.roster`); `generation`
    is that of the roster its group was formed by, 0 before.
    """

    epoch: int = -1
    step: int = -1
    rows: int = 0
    at: float = 0.0
    place: str = ""
    elastic: bool = False
    generation: int = 0


class ProgressWriter:
    """Writes one task's record at `path`, which is made anew. Not for use by several threads.

    `elastic` and `generation` may be set at any time; each `write` tells them.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(path) as staged:
            staged.write_bytes(bytes(2 * _SLOT))
            with staged.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 2 * _SLOT)
            staged.replace(path)
        self._words = 0
        self.elastic = False
        self.generation = 0

    def write(self, epoch: int, step: int, rows: int, place: str) -> None:
        self._words += 1
        name = place.encode()[:24]
        record = _RECORD.pack(
            self._words, epoch, step, rows, time.monotonic(), self.generation, self.elastic, name
        )
        start = self._words % 2 * _SLOT
        self._map[start : start + _SLOT] = record + _SUM.pack(crc32(record))

    def close(self) -> None:
        self._map.close()


def read_progress(path: Path) -> Progress | None:
    """Returns the last record at `path`, or None where there is none."""
    for _ in range(_TRIES):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) != 2 * _SLOT or not any(data):
            return None
        records = [r for start in (0, _SLOT) if (r := _whole(data[start : start + _SLOT])) is not None]
        if records:
            _, epoch, step, rows, at, generation, elastic, place = max(records)
            name = place.rstrip(b"\0").decode(errors="replace")
            return Progress(epoch, step, rows, at, name, bool(elastic), generation)
        # Both changed while they were read, or the very first one is being written.
    return None


def _whole(slot: bytes) -> tuple[Any, ...] | None:
    record = slot[: _RECORD.size]
    if _SUM.unpack(slot[_RECORD.size :])[0] != crc32(record):
        return None
    return _RECORD.unpack(record)
