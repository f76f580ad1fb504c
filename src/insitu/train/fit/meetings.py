"""Lets all tasks meet around the callbacks of a call."""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from insitu.base.errors import StorageFull
from insitu.base.paths import JobPaths
from insitu.base.serialization import NotSerializable, from_bytes, to_bytes
from insitu.grid import publish_file
from insitu.train.collectives import barrier_token
from insitu.train.elastic import RESTORE, LoopPosition, Membership, SynchronousMembership
from insitu.train.fit.callback_memory import CallbackMemory
from insitu.train.fit.chief_state import send_restored
from insitu.train.fit.entry import Entry, Key, enter_by_record, is_behind
from insitu.train.fit.epoch_lengths import EpochLengths
from insitu.train.fit.loop_state import LoopState
from insitu.train.fit.writer_files import begin_files, take_over_files


class Meetings:
    """Does what all tasks do at certain points of a call of the script, or of a callback. See
    `CallListener`."""

    def __init__(self, membership: Membership, name: str, *, is_nested: bool = False) -> None:
        """`name` is the call's among those of the task. No task enters one that is nested in another."""
        context = membership.context
        self._membership = membership
        self._name = name
        self._is_synchronous = isinstance(membership, SynchronousMembership)
        #: Whether another can take this task's place while the others continue.
        self.can_be_replaced = (
            self._is_synchronous and context.job is not None and len(context.workers) > 1 and not is_nested
        )

        #: How far callbacks have come in this task; None outside a job, and in a call within another.
        self._heard = (
            open_record(context.job.callbacks(context.task) / "heard")
            if context.job is not None and not is_nested
            else None
        )

    def name_uncopied(self, memory: CallbackMemory) -> None:
        """Have the chief name what callbacks keep that is lost with their process, before that happens."""
        context = self._membership.context
        if context.job is not None and context.is_chief and context.incarnation == 1:
            memory.warn_at_start(context.on_loss)

    def hear(self, position: LoopPosition, event: Key) -> bool:
        """Note that callbacks are about to receive an event of the call at `position`; return whether they
        may have received it in an earlier process of this task."""
        return self._heard is not None and position.depth <= 1 and self._heard.note(position.call, event)

    @property
    def has_forgotten(self) -> bool:
        """Whether nobody knows here which events earlier processes of this task have received."""
        return self._heard is not None and self._heard.is_empty and self._membership.context.incarnation > 1

    def begin_files(self, callbacks: Sequence[Any]) -> None:
        """Take out of the chief's files what its earlier processes have written of a call that begins again
        from its beginning."""
        context = self._membership.context
        if context.job is not None and context.is_chief:
            begin_files(callbacks, self._record_of_files(context.job))

    def take_over_files(self) -> list[str]:
        """Return who has written the chief's files of this call before; this process does from now on."""
        context = self._membership.context
        if context.job is None or not context.is_chief:
            return []
        return take_over_files(self._record_of_files(context.job))

    def _record_of_files(self, job: JobPaths) -> Path:
        return job.callbacks(self._membership.context.task) / f"files-{self._name}.json"

    def meet(self, position: LoopPosition) -> None:
        """Wait for all tasks: their callbacks have received all events before `position`."""
        if self.can_be_replaced:
            self._membership.lockstep.run_unit_until_done(position, barrier_token)

    def record(self, heard: Key) -> None:
        """Write nothing down: who takes this task's place without others makes the call from its
        beginning."""


class FitMeetings(Meetings):
    """Does what all tasks do at certain points of a fit. See `FitListener`."""

    def __init__(
        self, membership: Membership, model: Any, loop: LoopState, fit: int, end_fit: Callable[[], None]
    ) -> None:
        """`fit` is the fit's number in the process, `end_fit` finishes it once its steps are done."""
        super().__init__(membership, f"{fit}")
        context = membership.context
        self._model = model
        self._loop = loop
        self.end_fit = end_fit
        #: Records of an earlier process of this task; None if others know how far this one is.
        self.records = (
            FitRecords(context.job.callbacks(context.task), fit)
            if context.job is not None and not self._is_synchronous
            else None
        )

    def start_at(self, epoch: int, step: int, lengths: EpochLengths) -> None:
        """Start the fit at a step: another process of this task did the earlier ones."""
        record = self.records.find(epoch, step) if self.records is not None and (epoch or step) else None
        if record is not None:
            place, entry = find_place(record, epoch, step, lengths)
            self._loop.take_record(place, entry, record.state, is_newest=entry.heard == record.heard)
        elif (epoch, step) != (0, 0):
            self._loop.start_at(epoch, step)

    def share_restored(self) -> None:
        """Send all tasks what a callback of the chief's has restored. Called as the training begins."""
        send_restored(self._membership, self._membership.calls.position(RESTORE), self._model)
        self._loop.gap.rebase()

    def record(self, heard: Key) -> None:
        """Write down what callbacks remember, if no other task can inform the next process of this one."""
        if self.records is not None:
            self.records.write(heard, self._loop.record_state())


# Records the position of a worker's callbacks in a fit on servers, for the next process of its task.
#
# Workers that train by parameter servers at a pace of their own have no survivor whose state a replacement
# could take: the servers hold the weights, and each worker alone what its callbacks remember. So a worker
# writes that down at the beginning and at the end of each epoch, before and behind its callbacks


_KEPT = 12
"""Records that are kept of a fit: those of some epochs, since servers may go back to a checkpoint."""


@dataclass(frozen=True, slots=True)
class FitRecord:
    """Events that callbacks had received, and what they remembered then."""

    #: Events before this key were received.
    heard: Key
    #: The state that `FitRecords.write` was given.
    state: dict[str, Any]


class FitRecords:
    """The records of one fit of a task, in a folder of its own."""

    def __init__(self, folder: Path, fit: int) -> None:
        self._folder = folder / f"fit-{fit}"

    def write(self, heard: Key, state: dict[str, Any]) -> None:
        """Write a record. If there is no room for it, training continues without."""
        try:
            data = to_bytes([list(heard), state])
        except NotSerializable:
            return
        with contextlib.suppress(StorageFull):
            publish_file(self._path(heard), data)
            for path in self._paths()[:-_KEPT]:
                path.unlink(missing_ok=True)

    def find(self, epoch: int, step: int) -> FitRecord | None:
        """Return the newest record of a worker whose next step is this one, or None. Raises OSError if the
        storage fails."""
        for path in reversed(self._paths()):
            try:
                heard, state = from_bytes(path.read_bytes())
            except (FileNotFoundError, ValueError, KeyError, IndexError, json.JSONDecodeError):
                continue
            key: Any = tuple(heard)
            if not is_behind(key, epoch, step):
                return FitRecord(key, state)
        return None

    def _path(self, heard: Key) -> Path:
        return self._folder / "-".join(f"{number + 2:020d}" for number in heard)

    def _paths(self) -> list[Path]:
        try:
            return sorted(self._folder.iterdir())
        except FileNotFoundError:
            return []


def find_place(
    record: FitRecord, epoch: int, step: int, lengths: EpochLengths
) -> tuple[tuple[int, int], Entry]:
    """Return the (epoch, step) and the entry of a worker that resumes by a record, if the servers have all of
    its gradients before the one of `epoch` and `step`."""
    before = lengths.count(epoch), lengths.count(epoch - 1) if epoch else 0
    steps_before = before[0] - before[1] if before[0] is not None and before[1] is not None else None
    return enter_by_record(record.heard, epoch, step, steps_before)


# Records how far callbacks have come in a task's process, for the processes of the task that follow.
#
# A job that resumes from a checkpoint repeats events for its callbacks. They learn it from this record,
# which is in a file that is mapped: a process that is killed leaves it, and a note costs no system call


_NOTE = struct.Struct("<5q")
"""The number of the call, and the event's key."""
_SUM = struct.Struct("<I")
_SLOT = _NOTE.size + _SUM.size
"""Bytes of a note and its CRC-32. A file has two: while one is being written, the other one is whole."""

_Place = tuple[int, ...]


class HeardRecord:
    """The furthest event of a script's calls that callbacks of one task have received, in all its
    processes."""

    def __init__(self, path: Path) -> None:
        #: The file; None if there is no room for it.
        self._map: mmap.mmap | None = None
        with contextlib.suppress(StorageFull, OSError):
            if not path.exists() or path.stat().st_size != 2 * _SLOT:
                publish_file(path, bytes(2 * _SLOT))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 2 * _SLOT)
        #: The furthest event that processes before this one have noted; None: nothing is known of any.
        self._before = self._read()
        self._newest: _Place = self._before or ()
        #: The slot that is written next: the one that doesn't have the newest note.
        self._slot = 0 if self._before is None or self._notes()[0] != self._before else 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of processes before this one."""
        return self._before is None

    def note(self, call: int, event: Key) -> bool:
        """Note that callbacks are about to receive an event of a call; return whether they may have received
        it in an earlier process."""
        place = (call, *event)
        if place > self._newest:
            self._newest = place
            if self._map is not None:
                data = _NOTE.pack(*place)
                start = self._slot * _SLOT
                self._map[start : start + _SLOT] = data + _SUM.pack(crc32(data))
                self._slot = 1 - self._slot
        return self._before is not None and place <= self._before

    def _read(self) -> _Place | None:
        return max((note for note in self._notes() if note is not None), default=None)

    def _notes(self) -> list[_Place | None]:
        """Return what the slots hold; None for a slot that isn't whole."""
        if self._map is None:
            return [None, None]
        slots = [self._map[start : start + _SLOT] for start in (0, _SLOT)]
        return [
            _NOTE.unpack(slot[: _NOTE.size])
            if any(slot) and _SUM.unpack(slot[_NOTE.size :])[0] == crc32(slot[: _NOTE.size])
            else None
            for slot in slots
        ]


@functools.cache
def open_record(path: Path) -> HeardRecord:
    """Return the record at `path`, which this process has opened first when it was asked for it first."""
    return HeardRecord(path)
