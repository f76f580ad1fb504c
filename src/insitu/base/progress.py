"""The progress of a task: a record that it writes at each step and that any process on its node may read.

The file is memory-mapped, so that a write costs no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from insitu.base.disk.durable import NO_ROOM, staged_file

_RECORD = struct.Struct("<QqqQdqq24s")
"""Records so far, epoch, step, rows, monotonic time, generation, flags (1: elastic, 2: steps_over), place."""
_SUM = struct.Struct("<I")
_SLOT = _RECORD.size + _SUM.size
"""Bytes of a record and its CRC-32.

A file has two such slots. While one is being written, the other holds the last record: a task may be
suspended or killed at any time, and its last whole record must stay readable.
"""
_TRIES = 10
FULL_DISK_TIMEOUT = 600.0
"""Seconds for which a task waits for room for its record."""
_RETRY_INTERVAL = 1.0


IDLE = "idle"
"""The place that a task reports when it doesn't train: no stall timeout applies to it."""
LEAVING = "leaving"
"""The place that a task reports when its script has ended and it leaves its group: its process ends soon."""
RESTING = frozenset({IDLE, LEAVING})
"""Places of tasks that don't train."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The last record of a task."""

    #: The epoch under way, from 0; -1 before training.
    epoch: int = -1
    #: The training steps of the epoch that are done: the number of the one under way; -1 before training.
    step: int = -1
    #: Rows that this incarnation has fed to the model.
    rows: int = 0
    #: When the record was written, in seconds of the system's monotonic clock.
    at: float = 0.0
    #: The task's next action, such as `gradient` or `exchange`, or `idle`. At most 24 bytes.
    place: str = ""
    #: Whether the task's strategy can lose a peer and continue with another (see `insitu.base.roster`).
    elastic: bool = False
    #: The generation of the roster that its group was formed by; 0 before.
    generation: int = 0
    #: Whether no step of the epoch is under way any more, but its tests or its end.
    steps_over: bool = False

    @property
    def shown_step(self) -> int:
        """The step to show people, from 0: the one under way, or the last one of the epoch."""
        return self.step - (self.steps_over and self.step > 0)


class ProgressWriter:
    """Writes one task's records to a new file at `path`. Not for use by several threads.

    `elastic`, `generation` and `steps_over` may be set at any time; each `write` includes them.
    """

    def __init__(self, path: Path) -> None:
        """Make the file. On a full disk this waits for room, as all of a job does. Raises OSError."""
        deadline = time.monotonic() + FULL_DISK_TIMEOUT
        waits = False
        while True:
            try:
                self._map = _make_record(path)
                break
            except OSError as error:
                if error.errno not in NO_ROOM or time.monotonic() > deadline:
                    raise
                if not waits:
                    sys.stderr.write(f"[insitu] No room is left for {path}: waiting until there is some\n")
                waits = True
                time.sleep(_RETRY_INTERVAL)
        self._records = 0
        self.elastic = False
        self.generation = 0
        self.steps_over = False

    def write(self, epoch: int, step: int, rows: int, place: str) -> None:
        state = self.elastic, self.generation, self.steps_over
        self.copy(Progress(epoch, step, rows, time.monotonic(), place, *state))

    def copy(self, found: Progress) -> None:
        """Write a record as it is, such as one of another process."""
        self._records += 1
        name = found.place.encode()[:24]
        flags = found.elastic | found.steps_over << 1
        numbers = (found.epoch, found.step, found.rows, found.at, found.generation, flags)
        record = _RECORD.pack(self._records, *numbers, name)
        start = self._records % 2 * _SLOT
        self._map[start : start + _SLOT] = record + _SUM.pack(crc32(record))

    def close(self) -> None:
        self._map.close()


def _make_record(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged_file(path) as staged:
        staged.write_bytes(bytes(2 * _SLOT))
        with staged.open("r+b") as file:
            # Written to through memory, a block that the disk has no room for would end the process.
            os.posix_fallocate(file.fileno(), 0, 2 * _SLOT)
            mapped = mmap.mmap(file.fileno(), 2 * _SLOT)
        staged.replace(path)
    return mapped


def read_progress(path: Path) -> Progress | None:
    """Return the last record at `path`, or None if there is none."""
    for _ in range(_TRIES):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) != 2 * _SLOT or not any(data):
            return None
        records = [r for start in (0, _SLOT) if (r := _unpack_slot(data[start : start + _SLOT])) is not None]
        if records:
            _, epoch, step, rows, at, generation, flags, place = max(records)
            name = place.rstrip(b"\0").decode(errors="replace")
            return Progress(epoch, step, rows, at, name, bool(flags & 1), generation, bool(flags & 2))
        # Both changed while they were read, or the very first one is being written.
    return None


def _unpack_slot(slot: bytes) -> tuple[Any, ...] | None:
    """Return the record in `slot`, or None if it isn't whole."""
    record = slot[: _RECORD.size]
    if _SUM.unpack(slot[_RECORD.size :])[0] != crc32(record):
        return None
    return _RECORD.unpack(record)
