"""The blocks of one partition, each read from the first copy that has it whole."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.errors import CorruptPartition
from insitu.grid.partitions import BlockReader

logger = logging.getLogger("insitu.grid")


class BlockCopies:
    """Copies of one partition, equal byte for byte. May be used by several threads."""

    def __init__(self, name: str, openers: Sequence[Callable[[], BlockReader]]) -> None:
        """`openers` open the copies of the partition that users know as `name`, the best one first.

        Raises CorruptPartition where none can be opened.
        """
        self._name = name
        self._openers = openers
        self._readers: dict[int, BlockReader] = {}
        self._lock = threading.Lock()
        self._reported: set[tuple[int, int]] = set()
        self._any = self._open_any()

    def _open_any(self) -> BlockReader:
        failures: list[CorruptPartition] = []
        for number in range(len(self._openers)):
            try:
                return self._reader(number)
            except CorruptPartition as error:
                failures.append(error)
        raise make_no_copy_error(self._name, failures)

    def _reader(self, number: int) -> BlockReader:
        with self._lock:
            if number not in self._readers:
                self._readers[number] = self._openers[number]()
            return self._readers[number]

    def size(self, block: int) -> int:
        """Return the bytes of memory that the block takes."""
        return self._any.size(block)

    @property
    def direct(self) -> bool:
        """Whether blocks are read past the page cache."""
        return self._any.direct

    def offset(self, block: int) -> int:
        """Return the byte of the file at which the block begins."""
        return self._any.offset(block)

    def body_start(self, block: int) -> int:
        """Return where in this memory the body begins."""
        return self._any.body_start(block)

    def column_starts(self, block: int) -> dict[str, int]:
        """Return where in this memory each column of fixed size begins."""
        return self._any.column_starts(block)

    def texts(self, block: int, memory: npt.NDArray[np.uint8], name: str) -> Any:
        """Return a column of text of a block that has been read into `memory`, in place."""
        return self._any.texts(block, memory, name)

    def read(self, block: int, memory: npt.NDArray[np.uint8], start: int = 0) -> None:
        """Read and verify a block of the first copy that has it whole. See `BlockReader.read`."""
        failures: list[CorruptPartition] = []
        for number in range(len(self._openers)):
            try:
                self._reader(number).read(block, memory, start)
                return
            except CorruptPartition as error:
                failures.append(error)
                if number + 1 < len(self._openers) and (number, block) not in self._reported:
                    self._reported.add((number, block))
                    logger.warning("%s. Trying the copy on another node.", error)
        raise make_no_copy_error(self._name, failures)


def make_no_copy_error(name: str, failures: Sequence[CorruptPartition]) -> CorruptPartition:
    """Return the error for a partition of which no copy can be read, with what is wrong with each."""
    if len(failures) == 1:
        return failures[0]
    error = CorruptPartition(
        f"None of the {len(failures)} copies of {name} can be read. "
        + ". ".join(str(failure) for failure in failures)
    )
    error.__cause__ = failures[0]
    return error
