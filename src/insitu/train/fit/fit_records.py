"""Records where a worker's callbacks are in a fit on servers, for the next process of its task.

Workers that train by parameter servers at a pace of their own have no survivor whose state a replacement
could take: the servers hold the weights, and each worker alone what its callbacks remember. So a worker
writes that down at the beginning and at the end of each epoch, before and behind its callbacks.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.errors import StorageFull
from insitu.grid import publish_file
from insitu.train.collectives import NotSerializable, from_bytes, to_bytes
from insitu.train.fit.entry import Entry, Key, enter_by_record, is_behind
from insitu.train.fit.epoch_lengths import EpochLengths

_KEPT = 12
"""Records that are kept of a fit: those of some epochs, since servers may go back to a checkpoint."""


@dataclass(frozen=True, slots=True)
class FitRecord:
    """What callbacks had heard, and what they remembered then."""

    #: Events before this key were heard.
    heard: Key
    #: What `FitRecords.write` was given.
    state: dict[str, Any]


class FitRecords:
    """The records of one fit of a task, in a folder of its own."""

    def __init__(self, folder: Path, fit: int) -> None:
        self._folder = folder / f"fit-{fit}"

    def write(self, heard: Key, state: dict[str, Any]) -> None:
        """Write a record. Where there is no room for it, training goes on without."""
        try:
            data = to_bytes([list(heard), state])
        except NotSerializable:
            return
        with contextlib.suppress(StorageFull):
            publish_file(self._path(heard), data)
            for path in self._paths()[:-_KEPT]:
                path.unlink(missing_ok=True)

    def find(self, epoch: int, step: int) -> FitRecord | None:
        """Return the newest record of a worker whose next step is this one, or None."""
        for path in reversed(self._paths()):
            try:
                heard, state = from_bytes(path.read_bytes())
            except (OSError, ValueError, KeyError, IndexError, json.JSONDecodeError):
                continue
            key: Any = tuple(heard)
            if not is_behind(key, epoch, step):
                return FitRecord(key, state)
        return None

    def _path(self, heard: Key) -> Path:
        return self._folder / "-".join(f"{number + 2:020d}" for number in heard)

    def _paths(self) -> list[Path]:
        return sorted(self._folder.iterdir()) if self._folder.is_dir() else []


def find_place(
    record: FitRecord, epoch: int, step: int, lengths: EpochLengths
) -> tuple[tuple[int, int], Entry]:
    """Return the (epoch, step) and the entry of a worker that goes on by a record, where the servers have all
    of its gradients before the one of `epoch` and `step`."""
    before = lengths.count(epoch), lengths.count(epoch - 1) if epoch else 0
    steps_before = before[0] - before[1] if before[0] is not None and before[1] is not None else None
    return enter_by_record(record.heard, epoch, step, steps_before)
