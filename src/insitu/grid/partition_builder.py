"""Rows on their way from sources to partitions: collected to whole blocks, each written once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.grid.partitions import TEXT, PartitionWriter
from insitu.grid.sources import Block
from insitu.spec import Column

BUFFER_BYTES = 256 << 20
"""What the blocks that are being collected may take, over all partitions."""
_WAITING_BLOCKS = 8
"""Blocks that wait to be written. More would take memory and save no time."""


class PartitionBuilders:
    """Partitions that grow as rows come: one for each of `targets`, the files that they become.

    `rows[d]` counts what destination d has so far. Full blocks are written by a thread, while the next ones
    are read. Errors of writing are raised by the next call. Call `stop` at the end, also after an error.
    """

    def __init__(self, columns: tuple[Column, ...], block_rows: int, targets: Sequence[Path]) -> None:
        self.rows = np.zeros(len(targets), dtype=np.int64)
        self._columns = columns
        self._block_rows = block_rows
        self._writers = [PartitionWriter(target, columns) for target in targets]
        self._collected: list[_Collected | None] = [None] * len(targets)
        self._background = _Background()

    def append(self, block: Block, destinations: npt.NDArray[np.int64] | None) -> None:
        """Add the rows of `block`, row i to `destinations[i]`, or all to destination 0 where it is None."""
        if destinations is None:
            order, counts = np.arange(block.rows), np.array([block.rows])
        else:
            narrow = destinations.astype(np.uint16 if len(self.rows) <= 1 << 16 else np.int64)
            order = np.argsort(narrow, kind="stable")
            counts = np.bincount(destinations, minlength=len(self.rows))
        bounds = np.concatenate(([0], np.cumsum(counts)))
        for destination in np.flatnonzero(counts).tolist():
            self._append(destination, block, order[bounds[destination] : bounds[destination + 1]])
        self.rows += counts

    def _append(self, destination: int, block: Block, rows: npt.NDArray[np.int64]) -> None:
        while len(rows):
            collected = self._collected[destination]
            if collected is None:
                collected = self._collected[destination] = _Collected(self._columns, self._block_rows)
            fitting, rows = np.split(rows, [self._block_rows - collected.rows])
            collected.add(block, fitting)
            if collected.rows == self._block_rows:
                self._write(destination)

    def _write(self, destination: int) -> None:
        collected, self._collected[destination] = self._collected[destination], None
        if collected is not None:
            writer = self._writers[destination]
            self._background.run(lambda: writer.write(collected.rows, collected.values()))

    def finish(self, destination: int) -> tuple[int, str]:
        """Complete the target of `destination`. Returns (bytes, checksum). Raises OSError."""
        self._write(destination)
        self._background.wait()
        return self._writers[destination].close()

    def stop(self) -> None:
        """End the thread that writes. What it has not written yet is dropped."""
        self._background.stop()


class _Collected:
    """The rows of a block that isn't full yet."""

    def __init__(self, columns: tuple[Column, ...], block_rows: int) -> None:
        self.rows = 0
        self._columns = columns
        # Pages that no row has come to take no memory.
        self._room: dict[str, npt.NDArray[Any]] = {
            c.name: np.empty((block_rows, *c.shape), c.dtype) for c in columns if c.dtype != TEXT
        }
        self._texts: dict[str, list[Any]] = {c.name: [] for c in columns if c.dtype == TEXT}

    def add(self, block: Block, rows: npt.NDArray[np.int64]) -> None:
        """Copy the given rows of `block`, for which there is room."""
        stop = self.rows + len(rows)
        for name, room in self._room.items():
            # "clip" spares NumPy a buffer of its own; the rows are within bounds.
            block.columns[name].take(rows, 0, room[self.rows : stop], "clip")
        for name, texts in self._texts.items():
            texts.append(block.columns[name].take(pa.array(rows)))
        self.rows = stop

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
