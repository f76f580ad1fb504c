"""The blocks of one partition, read from a copy that has them whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.errors import CorruptPartition
from insitu.grid.partitions import BlockReader
from insitu.spec import NodeId

Reopen = Callable[[NodeId, CorruptPartition], tuple[NodeId, BlockReader]]
"""Given the node whose copy is damaged and how, return another node and the reader of its copy. Raises
CorruptPartition if no copy is left."""


class BlockCopies:
    """Copies of one partition, equal byte for byte, of which one is read. May be used by several threads."""

    def __init__(self, node: NodeId, reader: BlockReader, reopen: Reopen) -> None:
        """`reader` reads the copy on `node`. `reopen` opens another one."""
        self._node = node
        self._any = reader
        self._reopen = reopen
        self._lock = threading.Lock()

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
        while True:
            reader = self._any
            try:
                reader.read(block, memory, start)
                return
            except CorruptPartition as error:
                with self._lock:
                    if reader is self._any:  # else another thread was faster
                        self._replace(error)

    def _replace(self, error: CorruptPartition) -> None:
        """Read another copy from now on. Raises CorruptPartition."""
        node, reader = self._reopen(self._node, error)
        if not reader.is_like(self._any):  # memory was arranged by a damaged footer
            raise error
        self._node, self._any = node, reader


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
