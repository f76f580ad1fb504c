"""How far a task is: a few bytes that it writes in place each step and that anybody on its node may read.

A memory-mapped record, so that saying "I am at step 12" costs no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("<QqqQdqq24s")
"""Changes so far (odd while one is being written), epoch, step, rows, monotonic time, generation, elastic,
place."""


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
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        staged.write_bytes(bytes(_RECORD.size))
        with staged.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        staged.replace(path)
        self._changes = 0
        self.elastic = False
        self.generation = 0

    def write(self, epoch: int, step: int, rows: int, place: str) -> None:
        self._changes += 2
        name = place.encode()[:24]
        now, changes = time.monotonic(), self._changes - 1
        _RECORD.pack_into(self._map, 0, changes, epoch, step, rows, now, self.generation, self.elastic, name)
        struct.pack_into("<Q", self._map, 0, self._changes)

    def close(self) -> None:
        self._map.close()


def read_progress(path: Path) -> Progress | None:
    """The record at `path`, or None while there is none or it is just being written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _RECORD.size:
        return None
    changes, epoch, step, rows, at, generation, elastic, place = _RECORD.unpack(data)
    if changes == 0 or changes % 2:
        return None
    name = place.rstrip(b"\0").decode(errors="replace")
    return Progress(epoch, step, rows, at, name, bool(elastic), generation)
