"""Takes the rows of an import that runs elsewhere, on the node that owns their partitions.

Readers cut the sources into *units*, which are numbered in the order of their rows, and send the rows of each
in numbered messages. Rows enter partitions in that order, on whatever host they were read: rows of later
units wait in memory, and if they are too many in files beside the staged partitions. So the bytes of a
partition are those of an import on one machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.disk.access import make_folder
from insitu.base.errors import GridError, InputError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.grid.intake.partition_builder import Finished, PartitionBuilders
from insitu.grid.intake.row_plan import RowPlan
from insitu.grid.partitions import values_of_rows
from insitu.grid.sources import Block

_QUEUED = 2
"""Messages that wait for the builders. More would take memory and save no time."""
_PATIENCE_SECONDS = 1.0
"""Seconds for which a message waits for its place in the queue; then its sender is asked to send it again."""
_AHEAD_BYTES = 128 << 20
"""Bytes of rows of later units that wait in memory. More wait in files."""
_COUNTS = b"counts"

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowMessage:
    """Some rows of a unit, for one owner. They were checked (`check_rows`)."""

    #: The number of the unit.
    unit: int
    #: The number of the message among those of the unit, for this owner.
    sequence: int
    #: Whether it is the unit's last.
    last: bool
    #: `counts[i]` rows go to the i-th destination that the owner holds, in this order.
    counts: Counts
    #: The rows, sorted by destination.
    batch: Any


class RowIntake:
    """The part of one import that a node takes. Begin with `open` or `begin`, and end with `stop`."""

    def __init__(self, paths: Paths, node: NodeId, plan: RowPlan) -> None:
        """Make the staged folders. The content stays for `open`. Raises InputError, OSError."""
        self._plan = plan
        held = plan.held_by(node)
        if not held:
            raise InputError(f"{node} holds none of the partitions of this import")
        for name in plan.names:
            make_folder(paths.home, paths.staged(name, plan.token).store(node))
        self._ahead = paths.staged(plan.names[0], plan.token).root / f"ahead-{node}"
        shutil.rmtree(self._ahead, ignore_errors=True)
        make_folder(paths.home, self._ahead)
        self._builders = PartitionBuilders(paths, plan, dict.fromkeys(held, (node,)), direct=True)
        self._files = len(held)
        self._changed = threading.Condition()
        #: Held while rows are added by `append`, so that `stop` waits for that.
        self._appending = threading.Lock()
        #: The unit whose rows enter the partitions. Written by the thread.
        self._unit = 0
        #: The next message of each unit that has begun, by number; absent: 0.
        self._next: dict[int, int] = {}
        #: Units whose last message has come.
        self._whole: set[int] = set()
        #: Messages of the current unit, behind all that wait for it.
        self._queue: deque[RowMessage] = deque()
        #: Messages that wait for their unit, by unit, oldest first.
        self._waiting: dict[int, list[_MessageFile | _MessageList]] = {}
        #: Bytes of those that wait in memory.
        self._bytes = 0
        self._error: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    def open(self, *, adopt: bool) -> Counts:
        """Take over the whole blocks in the staged files, or remove them all. Returns the rows of each
        destination. Raises OSError, GridError."""
        if not adopt:
            for (file,) in self._builders.files:
                file.unlink(missing_ok=True)
        return self._builders.adopt()

    def begin(self, unit: int, counts: Sequence[int]) -> None:
        """Take rows from the beginning of `unit` on, before which destinations have `counts` rows."""
        if len(counts) != self._files or self._thread is not None:
            raise InputError(f"An intake begins once, with a count for each of {self._files} files")
        self._unit = unit
        self._builders.begin_at(np.array(counts, np.int64))
        self._thread = threading.Thread(target=self._run, name="insitu-intake", daemon=True)
        self._thread.start()

    def take(self, message: RowMessage) -> bool:
        """Take a message, which must follow the last one of its unit. One that came before is passed over.

        Returns whether it was taken: one of the current unit isn't while the partitions don't keep pace.
        Raises GridError, TextsTooLong, OSError: also what went wrong with an earlier one.
        """
        if len(message.counts) != self._files or int(message.counts.sum()) != message.batch.num_rows:
            raise InputError(f"Rows come with a count for each of {self._files} files")
        with self._changed:
            self._raise()
            expected = self._next.get(message.unit, 0)
            if message.unit < self._unit or message.sequence < expected:
                return True
            if message.sequence > expected or message.unit in self._whole:
                raise InputError(f"Message {expected} of unit {message.unit} follows. Received: another")
            if message.unit == self._unit and not self._waiting.get(message.unit):
                if not self._changed.wait_for(self._has_room, _PATIENCE_SECONDS):
                    return False
                self._raise()
                self._queue.append(message)
            else:
                self._keep(message)
            self._next[message.unit] = expected + 1
            if message.last:
                self._whole.add(message.unit)
            self._changed.notify_all()
        return True

    def append(self, block: Block, destinations: Counts) -> None:
        """Add rows that were read on this host, row i to the `destinations[i]`-th file of this owner.

        They come in their order from one thread, between `begin` and `end_unit`, and nothing by `take`.
        Raises GridError, TextsTooLong, OSError.
        """
        with self._appending:
            self._raise()
            if self._thread is None:
                raise InputError("An intake takes rows once it has begun. Received: some before")
            self._builders.append(block, destinations)

    def end_unit(self) -> None:
        """Note that all rows of a unit have been added by `append`."""
        with self._changed:
            self._raise()
            self._whole.add(self._unit)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._queue) < _QUEUED or self._stopped or self._error is not None

    def _keep(self, message: RowMessage) -> None:
        """Have a message wait behind all others of its unit."""
        waiting = self._waiting.setdefault(message.unit, [])
        kind = _MessageList if self._bytes + message.batch.nbytes <= _AHEAD_BYTES else _MessageFile
        if not waiting or waiting[-1].is_read or not isinstance(waiting[-1], kind):
            waiting.append(kind(self._ahead / f"{message.unit}-{message.sequence}"))
        waiting[-1].write(message)
        if kind is _MessageList:
            self._bytes += message.batch.nbytes

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise GridError("This import has ended on this host")

    def _run(self) -> None:
        try:
            while (step := self._next_step()) is not None:
                for message in [step] if isinstance(step, RowMessage) else step.read():
                    if self._stopped:
                        return
                    self._apply(message)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next_step(self) -> RowMessage | _MessageFile | _MessageList | None:
        """Wait for what enters the partitions next; None: nothing more does."""
        with self._changed:
            while not self._stopped:
                waiting = self._waiting.get(self._unit)
                if waiting and waiting[0].is_read:
                    self._bytes -= waiting[0].memory_bytes
                    waiting.pop(0).remove()
                elif waiting:
                    waiting[0].is_read = True
                    return waiting[0]
                elif self._queue:
                    self._changed.notify_all()
                    return self._queue.popleft()
                elif self._unit in self._whole:
                    self._whole.discard(self._unit)
                    self._next.pop(self._unit, None)
                    self._unit += 1
                    self._changed.notify_all()
                else:
                    self._changed.wait()
        return None

    def _apply(self, message: RowMessage) -> None:
        if message.batch.num_rows:
            values = values_of_rows(self._plan.columns, message.batch)
            destinations = np.repeat(np.arange(self._files), message.counts)
            self._builders.append(Block(values, message.batch.num_rows, 0, 0), destinations)

    def finish(self, units: int) -> list[Finished]:
        """Complete all partitions once `units` units are whole. All have come: it doesn't wait for readers.

        Each file is made to survive a power cut, read back, and compared with its checksum. Raises GridError,
        TextsTooLong, OSError.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._unit >= units or self._is_idle())
            self._raise()
            if self._unit != units:
                raise GridError(f"An import of {units} units ends with the last one. Received: {self._unit}")
        return self._builders.finish()

    def _is_idle(self) -> bool:
        """Whether nothing will come that the thread waits for."""
        ended = self._stopped or self._error is not None
        waits = self._queue or self._waiting.get(self._unit) or self._unit in self._whole
        return ended or not waits

    def stop(self) -> None:
        """End the threads. Staged rows stay; rows that wait are dropped."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._appending:
            self._builders.stop()
        for waiting in self._waiting.values():
            for messages in waiting:
                messages.remove()
        shutil.rmtree(self._ahead, ignore_errors=True)


class _MessageList:
    """Messages that wait for their turn, in memory."""

    def __init__(self, _: Path) -> None:
        self._messages: deque[RowMessage] = deque()
        #: Bytes that all of them take, those that were read, too.
        self.memory_bytes = 0
        #: Whether it is read by now: then nothing more is written to it.
        self.is_read = False

    def write(self, message: RowMessage) -> None:
        self._messages.append(message)
        self.memory_bytes += message.batch.nbytes

    def read(self) -> Iterator[RowMessage]:
        while self._messages:
            yield self._messages.popleft()

    def remove(self) -> None:
        self._messages.clear()


class _MessageFile:
    """Messages that wait for their turn, in a file."""

    #: None.
    memory_bytes = 0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sink: Any = None
        self._writer: Any = None
        self._messages: list[tuple[int, int, bool]] = []
        #: Whether it is read by now: then nothing more is written to it.
        self.is_read = False

    def write(self, message: RowMessage) -> None:
        if self._writer is None:
            self._sink = pa.OSFile(os.fspath(self._path), "wb")
            options = pa.ipc.IpcWriteOptions(allow_64bit=True)
            self._writer = pa.ipc.new_stream(self._sink, message.batch.schema, options=options)
        marks = {_COUNTS: message.counts.astype(np.int64).tobytes()}
        self._writer.write_batch(message.batch, custom_metadata=marks)
        self._messages.append((message.unit, message.sequence, message.last))

    def read(self) -> Iterator[RowMessage]:
        self._close()
        with pa.OSFile(os.fspath(self._path), "rb") as file, pa.ipc.open_stream(file) as reader:
            for unit, sequence, last in self._messages:
                batch, marks = reader.read_next_batch_with_custom_metadata()
                yield RowMessage(unit, sequence, last, np.frombuffer(marks[_COUNTS], np.int64), batch)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._writer = None

    def remove(self) -> None:
        with contextlib.suppress(OSError, pa.ArrowException):
            self._close()
        self._path.unlink(missing_ok=True)
