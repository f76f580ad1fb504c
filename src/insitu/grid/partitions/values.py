"""Rows of one column in several blocks of memory: a mapped file, or blocks that were read ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.spec import Column
from insitu.grid.partitions.format import row_bytes, text_buffers

Rows = npt.NDArray[np.int64]

_WIDE = 16 << 10
"""Bytes of a row from which on rows are copied one by one: the calls of NumPy then cost next to nothing."""


class BlockedValues:
    """The rows of a column of fixed size. Row r is row `r % block_rows` of block `r // block_rows`.

    If the blocks begin a multiple of the row's size apart, as `body_alignment` makes them, one call of NumPy
    takes rows of many blocks: memory is seen as one long array of rows, some of which are other bytes. Rows
    of other blocks are taken one block at a time.
    """

    def __init__(
        self, memory: npt.NDArray[np.uint8], column: Column, block_rows: int, starts: npt.NDArray[np.int64]
    ) -> None:
        """`starts[b]` is the byte of `memory` at which the column begins in block b. Nothing is copied."""
        size = row_bytes(column)
        first = int(starts[0]) % size if len(starts) else 0
        self._block_rows = block_rows
        self._memory = memory
        self._starts = starts.copy()
        self._column = column
        self._flat = self._view(first, (len(memory) - first) // size)
        self._firsts = (starts - first) // size
        self._shifts = self._firsts - np.arange(len(starts)) * block_rows
        self._odd = (starts - first) % size != 0
        self._any_odd = bool(self._odd.any())

    def move(self, block: int, start: int) -> None:
        """Let the block begin at byte `start` from now on."""
        size = row_bytes(self._column)
        first = int(self._starts[0]) % size
        self._starts[block] = start
        self._firsts[block] = (start - first) // size
        self._shifts[block] = (start - first) // size - block * self._block_rows
        self._odd[block] = (start - first) % size != 0
        self._any_odd = bool(self._odd.any())

    @property
    def starts(self) -> Rows:
        """The byte of memory at which the column begins in each block: int64[blocks]."""
        return self._starts

    def locate(self, rows: Rows) -> Rows:
        """Return numbers of the given rows for `take_located`."""
        return rows if self._any_odd else rows + self._shifts[rows // self._block_rows]

    def take_located(self, located: Rows, out: npt.NDArray[Any]) -> None:
        """Copy rows into `out` by what `locate` has returned for them."""
        if self._any_odd:
            self.take(located, out)
        else:
            # "clip" spares NumPy a buffer of its own; the rows are within bounds.
            self._flat.take(located, 0, out, "clip")

    def take(self, rows: Rows, out: npt.NDArray[Any]) -> None:
        """Copy the given rows into `out`, in their order."""
        blocks = rows // self._block_rows
        self.take_of_blocks(blocks, rows - blocks * self._block_rows, out)

    def pick(self, rows: Rows) -> npt.NDArray[Any]:
        """Return the given rows, in their order."""
        out = np.empty((len(rows), *self._column.shape), self._column.dtype)
        self.take(rows, out)
        return out

    def take_of_blocks(self, blocks: Rows, rows: Rows, out: npt.NDArray[Any]) -> None:
        """Copy rows, counted in their blocks, into `out`, in their order."""
        if self._any_odd and row_bytes(self._column) >= _WIDE:
            self._take_one_by_one(blocks, rows, out)
            return
        # Rows of odd blocks, which may be beyond the end, follow.
        self._flat.take(rows + self._firsts[blocks], 0, out, "clip")
        if self._any_odd:
            for block in np.unique(blocks[self._odd[blocks]]).tolist():
                of_block = np.flatnonzero(blocks == block)
                values = self._view(int(self._starts[block]), self._block_rows)
                out[of_block] = values[rows[of_block]]

    def _take_one_by_one(self, blocks: Rows, rows: Rows, out: npt.NDArray[Any]) -> None:
        size = row_bytes(self._column)
        to: npt.NDArray[np.uint8] = out.reshape(len(rows), -1).view(np.uint8)
        for number, start in enumerate((self._starts[blocks] + rows * size).tolist()):
            to[number] = self._memory[start : start + size]

    def slice(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows [start, stop), in place if they are in one block."""
        if start == stop:
            return self._view(0, 0)
        parts = [
            self._view(int(self._starts[block]) + first * row_bytes(self._column), end - first)
            for block, first, end in split_range(start, stop, self._block_rows)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _view(self, start: int, rows: int) -> npt.NDArray[Any]:
        """Return as many rows from byte `start` on as are in memory, `rows` at most."""
        dtype, shape = np.dtype(self._column.dtype), self._column.shape
        rows = min(rows, (len(self._memory) - start) // row_bytes(self._column))
        flat = self._memory[start : start + rows * row_bytes(self._column)]
        return np.frombuffer(flat, dtype).reshape(rows, *shape)


class TextValues:
    """The rows of a column of text. They are put together at the first `take`."""

    def __init__(self, blocks: Sequence[Any], block_rows: int) -> None:
        """`blocks` are Arrow arrays of large strings, all of `block_rows` rows but the last."""
        self._blocks = blocks
        self._block_rows = block_rows
        self._whole: Any = blocks[0] if len(blocks) == 1 else None

    def take(self, rows: Rows, out: npt.NDArray[Any]) -> None:
        """Copy the given rows into `out`, an array of objects, in their order."""
        if not len(rows):
            return
        if self._whole is None:
            # Arrow takes from chunks by putting them together each time.
            self._whole = pa.concat_arrays(list(self._blocks))
        out[:] = self._to_objects(self._whole.take(pa.array(rows)))

    def pick(self, rows: Rows) -> npt.NDArray[Any]:
        """Return the given rows, in their order, from their blocks only."""
        out = np.empty(len(rows), object)
        of_rows, within = np.divmod(rows, self._block_rows)
        for block in np.unique(of_rows).tolist():
            here = np.flatnonzero(of_rows == block)
            out[here] = self._to_objects(self._blocks[block].take(pa.array(within[here])))
        return out

    def slice(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows [start, stop) as an array of objects."""
        if start == stop:
            return np.empty(0, object)
        parts = [
            self._to_objects(self._blocks[block].slice(first, end - first))
            for block, first, end in split_range(start, stop, self._block_rows)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def slice_shared(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows [start, stop) as `slice` does, but equal texts as one object, unless most of the texts
        differ. `count_shared` counts them."""
        parts = [
            self._blocks[block].slice(first, end - first)
            for block, first, end in split_range(start, stop, self._block_rows)
        ]
        if not parts or 2 * len(parts[0].dictionary_encode().dictionary) > len(parts[0]):
            return self.slice(start, stop)
        encoded = pa.chunked_array(parts).dictionary_encode().combine_chunks()
        if encoded.null_count:
            return self.slice(start, stop)
        return SharedTexts.of(encoded)

    def _to_objects(self, texts: Any) -> npt.NDArray[Any]:
        objects: npt.NDArray[Any] = texts.to_numpy(zero_copy_only=False)
        return objects


class SharedTexts(np.ndarray[Any, Any]):
    """An array of objects, with the codes that it was made of. It is behind a plain array, as its base."""

    #: The codes of rows, and the distinct texts, as an Arrow array. Set by `of` alone.
    encoded: Any
    #: The distinct texts as objects.
    distinct: npt.NDArray[Any]

    @classmethod
    def of(cls, encoded: Any) -> npt.NDArray[Any]:
        """Return the texts of an Arrow array of codes without missing ones."""
        distinct = encoded.dictionary.to_numpy(zero_copy_only=False)
        shared = cls(len(encoded), object)  # NumPy makes the owner of memory the base of views
        distinct.take(encoded.indices.to_numpy(), 0, shared, "clip")
        shared.encoded, shared.distinct = encoded, distinct
        return shared.view(np.ndarray)

    def is_changed(self) -> bool:
        """Return whether other objects were put into it."""
        expected = _addresses(self.distinct).take(self.encoded.indices.to_numpy())
        return not np.array_equal(_addresses(self), expected)


def count_shared(texts: npt.NDArray[Any]) -> tuple[Any, npt.NDArray[np.int64]] | None:
    """Return (distinct texts as an Arrow array, counts) of what `slice_shared` has returned; None for another
    array, and if it was changed."""
    base: Any = texts
    while isinstance(base, np.ndarray) and not isinstance(base, SharedTexts):
        base = base.base
    if not isinstance(base, SharedTexts) or texts.strides != base.strides or texts.size != base.size:
        return None
    if texts.ctypes.data != base.ctypes.data or base.is_changed():
        return None
    keys = base.encoded.dictionary
    return keys, np.bincount(base.encoded.indices.to_numpy(), minlength=len(keys))


def _addresses(objects: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Return the addresses of the objects of an array in memory."""
    return np.ndarray(objects.shape, np.intp, buffer=objects.data)


class RaggedValues(TextValues):
    """The rows of a ragged column: an array of values for each row."""

    def __init__(self, blocks: Sequence[Any], block_rows: int, dtype: np.dtype[Any]) -> None:
        super().__init__(blocks, block_rows)
        self._dtype = dtype

    def _to_objects(self, texts: Any) -> npt.NDArray[Any]:
        return ragged_rows(texts, self._dtype)


def ragged_rows(binaries: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array of objects, one array of values of `dtype` for each of the Arrow array's rows. Nothing
    is copied."""
    offsets, data = text_buffers(binaries)
    rows = np.empty(len(binaries), object)
    values = data[offsets[0] : offsets[-1]].view(dtype)
    bounds = ((offsets - offsets[0]) // dtype.itemsize).tolist()
    for number, (start, stop) in enumerate(pairwise(bounds)):
        rows[number] = values[start:stop]
    return rows


def split_range(start: int, stop: int, block_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield (block, first row, last row + 1), counted in the block, for rows [start, stop)."""
    while start < stop:
        block, first = divmod(start, block_rows)
        end = min(block_rows, stop - block * block_rows)
        yield block, first, end
        start = block * block_rows + end
