"""Rows on their way from sources to partitions: collected to whole blocks, each written once."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.disk.durable import sync_tree
from insitu.base.errors import GridError
from insitu.base.paths import Paths
from insitu.base.spec import Column, NodeId
from insitu.grid.intake.row_plan import RowPlan
from insitu.grid.intake.unchanged_files import UnchangedFiles
from insitu.grid.partitions import (
    PartitionWriter,
    WritePacing,
    file_checksum,
    is_variable,
    make_room,
    refuse_changed,
)
from insitu.grid.sources import Block, count_threads

BUFFER_BYTES = 128 << 20
"""Bytes that the collected blocks may take, over all partitions."""
MOST_TEXT_BYTES = 2 * BUFFER_BYTES
"""Bytes that the texts of these blocks may take, which can't be known before."""
_SYNCED_ONE_BY_ONE = 100
"""Files up to which each is made to survive a power cut alone; with more, all are at once."""
_AT_ONCE = 4
"""Files that are copied, or read back, at the same time."""
_WAITING_BLOCKS = 2
"""Blocks of sources that wait for a thread. More would take memory and save no time."""

Rows = npt.NDArray[np.int64]


class TextsTooLong(Exception):
    """Raised if blocks need fewer rows, since their texts are longer than the first ones were."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A partition that is complete, and safe from a power cut."""

    #: Its rows.
    rows: int
    #: The size of its file.
    bytes: int
    #: Checksum of the whole file.
    checksum: str
    #: Bytes without compression; 0 if nothing is compressed.
    raw_bytes: int
    #: (bytes without compression, bytes in the file) of each column; empty without compression.
    column_bytes: tuple[tuple[int, int], ...]

    @classmethod
    def from_json(cls, data: Any) -> Finished:
        """Return what a node says of a partition. Raises ValueError, TypeError."""
        rows, size, checksum, raw, columns = data
        sizes = tuple((int(before), int(after)) for before, after in columns)
        return cls(int(rows), int(size), str(checksum), int(raw), sizes)

    def to_json(self) -> list[Any]:
        return [self.rows, self.bytes, self.checksum, self.raw_bytes, self.column_bytes]


class PartitionBuilders:
    """Partitions in staged folders of this home, which grow as rows come.

    `rows[d]` counts what destination d has so far. Rows are collected and full blocks written by threads,
    each for partitions of its own, while the next ones are read. Their errors are raised by the next call.
    Call `stop` at the end, also after an error.
    """

    def __init__(
        self, paths: Paths, plan: RowPlan, held: Mapping[int, Sequence[NodeId]], *, direct: bool = False
    ) -> None:
        """`held`: the destinations of the plan that are built, each with the nodes of this home that hold it.
        Their own numbers begin with 0. The first node's file is written, the others get copies.

        With `direct`, files of large blocks don't come into the system's cache, and all are read back.
        """
        #: By destination: its staged files, one for each node.
        self.files = [
            [paths.staged(each.cache, plan.token).partition(node, each.partition) for node in nodes]
            for each, nodes in ((plan.destinations[number], nodes) for number, nodes in held.items())
        ]
        files = self.files
        self.rows = np.zeros(len(files), dtype=np.int64)
        self._staged = [paths.staged(name, plan.token).root for name in plan.names]
        self._columns = plan.columns
        self._block_rows = plan.block_rows
        self._direct = direct
        threads = min(len(files), max(2, count_threads()))
        self._threads = [_Background() for _ in range(threads)]
        # Data that doesn't fit into the system's cache leaves it.
        pacings = [WritePacing(drop=plan.drop_pages) for _ in range(threads)]
        rooms = [make_room() if direct else None for _ in range(threads)]
        self._writers = [
            PartitionWriter(
                own[0], plan.columns, pacings[number % threads], plan.codec, rooms[number % threads]
            )
            for number, own in enumerate(files)
        ]
        self._collected: list[_Collected | None] = [None] * len(files)
        #: Rows of the content that was taken over. Written by `adopt`.
        self._adopted = np.zeros(len(files), dtype=np.int64)
        self._passed_over = np.zeros(len(files), dtype=np.int64)
        self._earlier = plan.earlier
        self._partitions = [plan.destinations[number].partition for number in held]
        self._unchanged = UnchangedFiles(paths, plan, held)
        #: By destination: whether its file is that of the version before; one more for rows of none.
        self._is_shared = np.zeros(len(files) + 1, dtype=np.bool_)
        self._text_bytes = [0] * threads
        """Bytes of the texts that each thread has collected."""

    def adopt(self) -> Rows:
        """Take over the content of the files. Returns the rows of each. Raises OSError and GridError."""
        blocks = np.zeros(len(self.rows), dtype=np.int64)

        def adopt(destination: int) -> None:
            blocks[destination] = self._writers[destination].adopt(self._block_rows)

        for destination in range(len(self.rows)):
            thread = self._threads[destination % len(self._threads)]
            thread.run(partial(adopt, destination))
        for thread in self._threads:
            thread.wait()
        self._adopted = blocks * self._block_rows
        return self._adopted

    def begin_at(self, rows: Rows) -> None:
        """Continue behind `rows` rows of each destination, and pass over those that were adopted, too."""
        self.rows[:] = rows
        self._passed_over[:] = self._adopted - rows

    def append(self, block: Block, destinations: Rows | None) -> None:
        """Add the rows of `block`, row i to `destinations[i]`, or all to destination 0 if it is None.

        A destination `len(self.rows)` means that the row belongs to none of them. Rows of partitions that are
        as they were in the version before are passed over.
        """
        if self._earlier is not None and block.digests is not None:
            self._is_shared[self._unchanged.find(block.digests)] = True
            given = np.zeros(block.rows, np.int64) if destinations is None else destinations
            destinations = np.where(self._is_shared[given], len(self.rows), given)
        if destinations is None:
            order, counts = np.arange(block.rows), np.array([block.rows])
        else:
            narrow = destinations.astype(np.uint16 if len(self.rows) < 1 << 16 else np.int64)
            order = np.argsort(narrow, kind="stable")
            counts = np.bincount(destinations, minlength=len(self.rows))[: len(self.rows)]
        ends = np.cumsum(counts)
        for number, thread in enumerate(self._threads):
            thread.run(partial(self._append_part, number, block, order, ends))
        self.rows += counts

    def _append_part(self, thread: int, block: Block, order: Rows, ends: Rows) -> None:
        """Add the rows of one thread's partitions: rows order[ends[d - 1] : ends[d]] to destination d."""
        for destination in range(thread, len(ends), len(self._threads)):
            start, stop = int(ends[destination - 1]) if destination else 0, int(ends[destination])
            passed_over = min(stop - start, int(self._passed_over[destination]))
            self._passed_over[destination] -= passed_over
            if start + passed_over < stop:
                self._append(destination, block, order[start + passed_over : stop])

    def _append(self, destination: int, block: Block, rows: Rows) -> None:
        thread = destination % len(self._threads)
        while len(rows):
            collected = self._collected[destination]
            if collected is None:
                collected = self._collected[destination] = _Collected(self._columns, self._block_rows)
            fitting, rows = np.split(rows, [self._block_rows - collected.rows])
            self._text_bytes[thread] += collected.add(block, fitting)
            if collected.rows == self._block_rows:
                self._text_bytes[thread] -= collected.text_bytes
                self._write(destination)
        if self._block_rows > 1 and self._text_bytes[thread] > MOST_TEXT_BYTES // len(self._threads):
            raise TextsTooLong

    def _write(self, destination: int) -> None:
        collected, self._collected[destination] = self._collected[destination], None
        if collected is not None:
            self._writers[destination].write(collected.rows, collected.values())

    def finish(self) -> list[Finished]:
        """Complete all partitions, so that they survive a power cut. Raises OSError and GridError."""
        for thread in self._threads:
            thread.wait()
        for number in np.flatnonzero((self.rows == 0) & ~self._is_shared[:-1]):
            self._is_shared[number] = self._unchanged.has(int(number), "")
        closed = [self._close(destination) for destination in range(len(self.files))]
        one_by_one = sum(map(len, self.files)) <= _SYNCED_ONE_BY_ONE
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            futures = [
                threads.submit(self._secure, number, *found, sync=one_by_one)
                for number, found in enumerate(closed)
            ]
            finished = [future.result() for future in futures]
        if not one_by_one:
            for folder in self._staged:
                sync_tree(folder)
        return finished

    def _close(self, destination: int) -> tuple[int, str]:
        """Complete the first file of a destination. Returns (bytes, checksum)."""
        if self._is_shared[destination]:
            return 0, ""
        if self._passed_over[destination]:
            raise GridError(
                f"What an interrupted import has left holds {int(self._passed_over[destination])} rows more "
                f"than the sources have for one of its partitions. Import again without --resume"
            )
        self._write(destination)
        return self._writers[destination].close(sync=False)

    def _secure(self, destination: int, size: int, checksum: str, *, sync: bool) -> Finished:
        """Make the copies of a file that is complete, and with `sync` have all survive a power cut."""
        if self._is_shared[destination] and self._earlier is not None:
            self._unchanged.put_in_place(destination)
            info = self._earlier.partitions[self._partitions[destination]]
            return Finished(info.rows, info.bytes, info.checksum, 0, ())
        (file, *copies), writer = self.files[destination], self._writers[destination]
        for copy in copies:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        for path in (file, *copies) if sync else ():
            with path.open("rb") as opened:
                os.fsync(opened.fileno())
        if self._direct and not writer.is_read_back:
            refuse_changed(file, file_checksum(file), checksum)
        columns = tuple((int(raw), int(stored)) for raw, stored in writer.column_bytes)
        return Finished(int(self.rows[destination]), size, checksum, writer.raw_bytes, columns)

    def stop(self) -> None:
        """End the threads. Rows that they have not written yet are dropped."""
        for thread in self._threads:
            thread.stop()


class _Collected:
    """The rows of a block that isn't full yet."""

    def __init__(self, columns: tuple[Column, ...], block_rows: int) -> None:
        self.rows = 0
        self.text_bytes = 0
        self._columns = columns
        # Pages that no row has come to take no memory.
        self._room: dict[str, npt.NDArray[Any]] = {
            c.name: np.empty((block_rows, *c.shape), c.dtype) for c in columns if not is_variable(c)
        }
        self._texts: dict[str, list[Any]] = {c.name: [] for c in columns if is_variable(c)}

    def add(self, block: Block, rows: Rows) -> int:
        """Copy the given rows of `block`, for which there is room. Returns the bytes of their texts."""
        before, stop = self.text_bytes, self.rows + len(rows)
        for name, room in self._room.items():
            # "clip" spares NumPy a buffer of its own; the rows are within bounds.
            block.columns[name].take(rows, 0, room[self.rows : stop], "clip")
        for name, texts in self._texts.items():
            texts.append(block.columns[name].take(pa.array(rows)))
            self.text_bytes += texts[-1].nbytes
        self.rows = stop
        return self.text_bytes - before

    def values(self) -> Mapping[str, Any]:
        """Return the rows as `PartitionWriter.write` takes them."""
        fixed = {name: room[: self.rows] for name, room in self._room.items()}
        return {**fixed, **{name: pa.concat_arrays(texts) for name, texts in self._texts.items()}}


class _Background:
    """Runs calls one after another in a thread. Their errors are raised by the next `run` or `wait`."""

    def __init__(self) -> None:
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING_BLOCKS)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="insitu-import-writer", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], None]) -> None:
        self._raise()
        self._calls.put(call)

    def wait(self) -> None:
        self._calls.join()
        self._raise()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._error = self._error or RuntimeError("writing was stopped")
            self._calls.put(None)
            self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                if self._error is None:
                    call()
            except BaseException as error:
                self._error = error
            finally:
                self._calls.task_done()
                del call
