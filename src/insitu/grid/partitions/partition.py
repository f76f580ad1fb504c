"""One partition as it is read: its file, mapped into memory. No file stays open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.spec import CacheSpec, Column, PartitionInfo
from insitu.grid.partitions.address_space import AddressSpace
from insitu.grid.partitions.block_layout import (
    BlockLayout,
    make_corrupt_error,
    make_unreadable_error,
    view_of,
)
from insitu.grid.partitions.compression import Sizes, buffers_by_column, read_sizes, table_bytes
from insitu.grid.partitions.format import (
    arrow_schema,
    column_offsets,
    file_order,
    is_ragged,
    is_variable,
    row_bytes,
    text_buffers,
    value_dtype,
)
from insitu.grid.partitions.ipc_message import TAIL_BYTES, footer_bytes, read_places
from insitu.grid.partitions.values import BlockedValues, RaggedValues, TextValues


class Partition:
    """The columns of one file, mapped. `values[name]` gives rows of a column by `take` and `slice`."""

    __slots__ = (
        "_columns",
        "_space",
        "block_rows",
        "codec",
        "is_marked",
        "memory",
        "path",
        "places",
        "rows",
        "sizes",
        "values",
    )

    def __init__(
        self,
        path: Path,
        columns: tuple[Column, ...],
        rows: int,
        block_rows: int = 0,
        codec: str | None = None,
        raw_bytes: int = 0,
    ) -> None:
        """Map `path`, after a check of its footer, schema and rows. Raises CorruptPartition, and GridError if
        the process may map no more files.

        `block_rows` are the rows of each block but the last; 0: there is one block. `codec` and `raw_bytes`
        are as in `CacheSpec` and `PartitionInfo`.
        """
        self.path = path
        self.rows = rows
        self._columns = columns
        self.block_rows = block_rows or max(1, rows)
        self.is_marked = block_rows > 0 and rows > 0 and codec is None
        """Whether rows that are read in place can be checked: blocks of early versions have no checksums."""
        self.codec = codec
        """The compression of blocks; None: nothing is compressed. Rows of others aren't among `values`."""
        try:
            self._space = AddressSpace([path], [path.stat().st_size], 1)
            self.memory = self._space.memory[: path.stat().st_size]
            """The bytes of the file."""
            buffer = pa.py_buffer(self.memory)
            reader = pa.ipc.open_file(buffer)
            self.places = self._find_places()
            """The places of the blocks in the file, as in `ipc_footer.PLACE`."""
            expected = arrow_schema(columns)
            if not reader.schema.equals(expected):
                names = reader.schema.names
                raise ValueError(f"it has columns {names} unlike those expected, {expected.names}")
            self._check_number_of_blocks()
            self.sizes = None if codec is None else self._read_sizes(raw_bytes)
            """The sizes of all buffers, as `read_sizes` returns them; None if nothing is compressed."""
            self.values = {} if codec is not None else self._map_values(reader, buffer)
        except (OSError, ValueError, pa.ArrowException) as error:
            # Arrow's own errors of damaged files are OSErrors, too, but have no number.
            if isinstance(error, OSError) and error.errno is not None:
                raise make_unreadable_error(path, str(error.strerror or error)) from error
            raise make_corrupt_error(path, f"it can't be read as an Arrow file ({error})") from error

    @classmethod
    def of_cache(cls, path: Path, cache: CacheSpec, info: PartitionInfo) -> Partition:
        """Map a copy of a partition of a cache, as `__init__` does."""
        return cls(path, cache.columns, info.rows, cache.block_rows, cache.codec, info.raw_bytes)

    def _find_places(self) -> npt.NDArray[Any]:
        end = max(0, len(self.memory) - TAIL_BYTES)
        start = end - footer_bytes(self.memory[end:].tobytes(), len(self.memory))
        return read_places(self.memory[start:end].tobytes(), start)

    def _read_sizes(self, raw_bytes: int) -> Sizes:
        end = len(self.memory) - TAIL_BYTES
        end -= footer_bytes(self.memory[end:].tobytes(), len(self.memory))
        start = max(0, end - table_bytes(len(self.places), self._columns))
        firsts = range(0, self.rows, self.block_rows)
        rows = [min(self.block_rows, self.rows - first) for first in firsts]
        data = self.memory[start:end].tobytes()
        return read_sizes(data, self.places, self._columns, rows, raw_bytes)

    def _map_values(self, reader: Any, buffer: Any) -> dict[str, BlockedValues | TextValues]:
        ends = self._read_ends(reader)
        return {
            column.name: self._text(reader, column)
            if is_variable(column)
            else self._fixed(buffer, ends, column)
            for column in self._columns
        }

    def _check_number_of_blocks(self) -> None:
        blocks = len(self.places)
        if blocks != -(-self.rows // self.block_rows) and not (blocks == 1 and not self.rows):
            raise ValueError(f"it has {blocks} blocks, expected {-(-self.rows // self.block_rows)}")

    def _read_ends(self, reader: Any) -> list[Any]:
        """Return the first block and the last, after a check of their rows. Raises ValueError."""
        blocks = len(self.places)
        batches = []
        for number in (0, blocks - 1) if self.rows else ():
            batch = reader.get_batch(number)
            batch.validate()
            expected = min(self.block_rows, self.rows - number * self.block_rows)
            if batch.num_rows != expected:
                raise ValueError(f"its block {number} has {batch.num_rows} rows, expected {expected}")
            batches.append(batch)
        return batches

    def _fixed(self, buffer: Any, ends: list[Any], column: Column) -> BlockedValues:
        if not ends:
            return BlockedValues(np.empty(0, np.uint8), column, self.block_rows, np.zeros(1, np.int64))
        bodies = self.places["offset"] + self.places["metadata_bytes"]
        if self.is_marked:
            starts = bodies + column_offsets(self._columns, self.block_rows)[column.name]
            last = self.rows - (len(bodies) - 1) * self.block_rows
            starts[-1] = bodies[-1] + column_offsets(self._columns, last)[column.name]
        else:
            starts = np.array([_address(ends[0].column(column.name), column) - buffer.address])
        return BlockedValues(self.memory, column, self.block_rows, starts)

    def _text(self, reader: Any, column: Column) -> TextValues:
        layout = self.layout(self._columns)

        def find(block: int) -> Any:
            if not self.is_marked:
                return reader.get_batch(block).column(column.name)
            start, size = layout.offset(block), layout.size(block)
            return layout.texts(block, self.memory[start : start + size], column.name)

        blocks = _Texts(self.path, find, column, len(self.places))
        if is_ragged(column):
            return RaggedValues(blocks, self.block_rows, value_dtype(column))
        return TextValues(blocks, self.block_rows)

    def layout(self, columns: Sequence[Column]) -> BlockLayout:
        """Return the places of the chosen columns of blocks, of a file that isn't compressed."""
        return BlockLayout(self.path, self.places, self.rows, self.block_rows, self._columns, columns)

    def make_checks(self, columns: Sequence[Column]) -> BlockChecks:
        """Return what checks the chosen columns of this mapped file, if it `is_marked`."""
        return BlockChecks(self.layout(columns), self._space, 0, len(self.places))

    @property
    def bytes(self) -> int:
        """The size of the file."""
        return len(self.memory)

    def prefault(self, most: int) -> None:
        """Map all pages at once, unless `most`, the bytes of all files read together, are too many."""
        self._space.prefault(most)

    def bytes_per_row(self, name: str) -> float:
        """Return the bytes of the file that a row of this column takes; a mean if rows differ in size."""
        column = next(column for column in self._columns if column.name == name)
        if self.sizes is not None:
            ordered = [column.name for column in file_order(self._columns)]
            held = buffers_by_column(self._columns)[ordered.index(name)]
            return float(self.sizes[:, held, 0].sum()) / max(1, self.rows)
        if not is_variable(column):
            return row_bytes(column)
        bodies = int(self.places["body_bytes"].sum())
        text = bodies - self.rows * sum(row_bytes(column) for column in self._columns)
        return text / max(1, self.rows) / sum(map(is_variable, self._columns))


class _Texts(Sequence[Any]):
    """The texts or lists of each block, found when they are asked for. Raises CorruptPartition."""

    def __init__(self, path: Path, find: Callable[[int], Any], column: Column, blocks: int) -> None:
        """`find` returns the Arrow array of a block."""
        self._path = path
        self._find = find
        self._name = column.name
        self._size = value_dtype(column).itemsize if is_ragged(column) else 1
        self._blocks = blocks

    def __len__(self) -> int:
        return self._blocks

    def __getitem__(self, block: Any) -> Any:
        if not 0 <= block < self._blocks:
            raise IndexError(block)
        try:
            texts = self._find(block)
            # Damaged offsets would end the process.
            texts.validate(full=True)
            if self._size > 1 and (text_buffers(texts)[0] % self._size).any():
                raise ValueError(f"its lists of column {self._name!r} end within a value")
            return texts
        except (OSError, ValueError, pa.ArrowException) as error:
            raise make_corrupt_error(self._path, f"its block {block} can't be read ({error})") from error


def _address(array: Any, column: Column) -> int:
    """Return the addresses of the values of a block in memory."""
    storage = array.storage.values if column.shape else array
    return int(storage.buffers()[1].address)


# Compares the blocks of a mapped file with their checksums, each before its rows are used first


class BlockChecks:
    """Which blocks of one mapped file are as they were written. Two threads may both check one."""

    def __init__(self, layout: BlockLayout, space: AddressSpace, offset: int, blocks: int) -> None:
        """The file is mapped from byte `offset` of `space` on."""
        self._layout = layout
        self._space = space
        self._offset = offset
        self._unchecked = np.ones(blocks, dtype=bool)
        #: Whether nothing is left to be checked.
        self.done = not blocks

    @property
    def all_blocks(self) -> npt.NDArray[np.int64]:
        """The numbers of all blocks."""
        return np.arange(len(self._unchecked))

    def check(self, blocks: npt.NDArray[np.int64]) -> None:
        """Check those of the given blocks that haven't been. Raises CorruptPartition."""
        if self.done:
            return
        for block in np.unique(blocks[self._unchecked[blocks]]).tolist():
            start, size = self._offset + self._layout.offset(block), self._layout.size(block)
            try:
                self._space.fault_in(start, size)
            except OSError as error:
                why = f"its block {block} can't be read ({error.strerror})"
                raise make_unreadable_error(self._layout.path, why) from error
            self._layout.check(block, view_of(self._space.memory[start : start + size]))
            self._unchecked[block] = False
        self.done = not self._unchecked.any()
