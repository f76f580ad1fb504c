"""Pure: what a partition's file looks like.

It is an Arrow IPC file. Its record batches are *blocks*: all have the same number of rows but the last,
which may have fewer. A block's columns are one after another, each without gaps: the widest first, text last,
whatever the order in the catalogue. Rows of shape () are plain Arrow columns, others `fixed_shape_tensor`;
bools are stored as uint8, since Arrow's are bits; text is `large_utf8`. A ragged column, whose rows are lists
of different lengths, is `large_binary`: the values of each row, in the machine's byte order. Nothing is null.
Columns may be compressed, see `compression.py`; the following is about others.

The metadata of each block says its number and the CRC-32 of each column, and is padded, so that bodies
begin at multiples of `body_alignment` after the first one. So the rows of a column have the same distance
within and across blocks, counted in rows: one call of NumPy takes rows of many blocks from a mapped file.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.spec import Column

TEXT = "str"
RAGGED = "[*]"
"""Ends the dtype of a ragged column, such as "int64[*]"."""
BLOCK_BYTES = 1 << 20
"""About the size of a block. Larger ones are read no faster; smaller ones mix better in a shuffle."""
_LEAST_BLOCK_BYTES = 4096
_BYTES_PER_COLUMN = 6400
"""Least bytes of a block for each of its columns: metadata then takes less than two percent."""
_MOST_ALIGNMENT = 8192
_MARK = re.compile(rb"block (\d{10}) crc32:((?:[0-9a-f]{8})+)")


def is_ragged(column: Column) -> bool:
    """Return whether the rows of a column are lists of different lengths."""
    return column.dtype.endswith(RAGGED)


def is_variable(column: Column) -> bool:
    """Return whether the rows of a column differ in size: those of text and of ragged columns."""
    return column.dtype == TEXT or is_ragged(column)


def value_dtype(column: Column) -> np.dtype[Any]:
    """Return the dtype of the values of a column that isn't text."""
    return np.dtype(column.dtype.removesuffix(RAGGED))


def value_type(column: Column) -> Any:
    """Return the Arrow type of one value of a column; of one row if rows differ in size."""
    if is_variable(column):
        return pa.large_utf8() if column.dtype == TEXT else pa.large_binary()
    return pa.uint8() if column.dtype == "bool" else pa.from_numpy_dtype(np.dtype(column.dtype))


def row_bytes(column: Column) -> int:
    """Return the bytes of one row of a column; 0 if rows differ in size."""
    return 0 if is_variable(column) else np.dtype(column.dtype).itemsize * math.prod(column.shape)


def file_order(columns: Sequence[Column]) -> list[Column]:
    """Return `columns` in the order of the file: the widest first, those whose rows differ in size last."""
    return sorted(columns, key=lambda column: (is_variable(column), -row_bytes(column)))


def rows_per_block(columns: Sequence[Column], text_bytes: float = 0.0, *, limit: int = 1 << 62) -> int:
    """Return how many rows make a block of about BLOCK_BYTES, or of `limit` if that is less; 1 at least.

    `text_bytes` is the mean size of a row's texts and lists, all columns together.
    """
    each = sum(row_bytes(column) for column in columns) + text_bytes
    each += 8 * sum(map(is_variable, columns))
    wanted = max(BLOCK_BYTES, _BYTES_PER_COLUMN * len(columns))
    return max(1, int(max(_LEAST_BLOCK_BYTES, min(wanted, limit)) / max(1.0, each)))


@functools.lru_cache(maxsize=64)
def body_alignment(columns: tuple[Column, ...]) -> int:
    """Return the number of bytes by a multiple of which the bodies of any two blocks are apart."""
    alignment = 8
    for column in file_order(columns):
        joint = math.lcm(alignment, row_bytes(column) or 1)
        alignment = joint if joint <= _MOST_ALIGNMENT else alignment
    return alignment


@functools.lru_cache(maxsize=64)
def arrow_schema(columns: tuple[Column, ...]) -> Any:
    """Return the Arrow schema of a partition with these columns."""
    fields = []
    for column in file_order(columns):
        kind = value_type(column)
        kind = pa.fixed_shape_tensor(kind, column.shape) if column.shape else kind
        fields.append(pa.field(column.name, kind, nullable=False, metadata={"dtype": column.dtype}))
    return pa.schema(fields)


@dataclass(frozen=True, slots=True)
class BlockMark:
    """The description of a block in its metadata."""

    #: The block's number in the partition, from 0.
    number: int
    #: The CRC-32 of each column, in the order of the file, with the zeros that follow its buffers.
    crc32: tuple[int, ...]


def find_mark(metadata: bytes) -> BlockMark | None:
    """Return the description of a block in the metadata of its message; None if it has no mark."""
    found = _MARK.search(metadata)
    if found is None:
        return None
    sums = [int(found[2][start : start + 8], 16) for start in range(0, len(found[2]), 8)]
    return BlockMark(int(found[1]), tuple(sums))


def make_batch(columns: tuple[Column, ...], rows: int, values: Mapping[str, Any]) -> Any:
    """Return one block as an Arrow record batch.

    `values[name]` is a contiguous array [rows, *shape] of the column's dtype, for text and ragged columns
    an Arrow array of their type without offset. Nothing is copied.
    """
    schema = arrow_schema(columns)
    arrays = [_make_array(column, rows, values[column.name]) for column in file_order(columns)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def values_of_batch(columns: tuple[Column, ...], batch: Any) -> dict[str, Any]:
    """Return what `make_batch` was given for a batch, in place."""
    values: dict[str, Any] = {}
    for column in columns:
        array = batch.column(column.name)
        if not is_variable(column):
            storage = array.storage.values if column.shape else array
            memory = np.frombuffer(
                storage.buffers()[1], column.dtype, batch.num_rows * math.prod(column.shape)
            )
            array = memory.reshape(batch.num_rows, *column.shape)
        values[column.name] = array
    return values


def check_rows(columns: tuple[Column, ...], batch: Any) -> None:
    """Raise ValueError, ArrowInvalid unless a batch that another host has sent is one of these columns."""
    if not batch.schema.equals(arrow_schema(columns)):
        raise ValueError("rows must have the columns of the import")
    batch.validate(full=True)
    if any(array.null_count for array in batch.columns):
        raise ValueError("rows of an import have no nulls")


def _make_array(column: Column, rows: int, values: Any) -> Any:
    if is_variable(column):
        return values
    size = math.prod(column.shape)
    flat = pa.Array.from_buffers(value_type(column), rows * size, [None, pa.py_buffer(values)])
    if not column.shape:
        return flat
    storage_type = pa.list_(pa.field("item", value_type(column), nullable=True), size)
    storage = pa.Array.from_buffers(storage_type, rows, [None], children=[flat])
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(value_type(column), column.shape), storage)


def make_mark(mark: BlockMark, padding: int) -> dict[str, str]:
    """Return the metadata of a block, longer by `padding` bytes, a multiple of 8."""
    return {"insitu": _mark_text(mark) + " " * padding}


def write_mark(metadata: bytearray, mark: BlockMark) -> None:
    """Put a mark in the place of the one in the metadata of another block of the same columns."""
    text = _mark_text(mark).encode()
    start = metadata.index(b"block 0000000000 crc32:")
    metadata[start : start + len(text)] = text


def _mark_text(mark: BlockMark) -> str:
    return f"block {mark.number:010d} crc32:" + "".join(f"{crc32:08x}" for crc32 in mark.crc32)


def write_options(codec: str | None = None) -> Any:
    """Return how blocks are written. Without 64 bits Arrow refuses columns of 2**31 values or more."""
    return pa.ipc.IpcWriteOptions(allow_64bit=True, compression=codec)


def column_sums(columns: tuple[Column, ...], values: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (CRC-32, bytes) of each column of a block, in the order of the file.

    Arrow writes a column as one buffer, two if rows differ in size, and zeros behind each up to a multiple of
    8 bytes.
    """
    sums = []
    for column in file_order(columns):
        crc32 = size = 0
        for part in column_buffers(column, values[column.name]):
            padding = bytes(-part.nbytes % 8)
            crc32 = zlib.crc32(padding, zlib.crc32(part, crc32))
            size += part.nbytes + len(padding)
        sums.append((crc32, size))
    return sums


def column_offsets(columns: tuple[Column, ...], rows: int) -> dict[str, int]:
    """Return the byte of the body at which each column of fixed size begins, in a block of `rows` rows."""
    offsets, end = {}, 0
    for column in file_order(columns):
        if is_variable(column):
            break
        offsets[column.name] = end
        end += -(-rows * row_bytes(column) // 8) * 8
    return offsets


def column_buffers(column: Column, values: Any) -> list[memoryview]:
    """Return the buffers of one column of a block, as Arrow writes them."""
    if not is_variable(column):
        return [_bytes_of(values)]
    offsets, data = text_buffers(values)
    return [_bytes_of(offsets), _bytes_of(data[: offsets[-1]])]


def _bytes_of(values: npt.NDArray[Any]) -> memoryview:
    flat: Any = values.reshape(-1).view(np.uint8)
    return memoryview(flat)


def text_buffers(texts: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return (offsets, bytes) of an Arrow array of large strings or binaries, or of a slice of one."""
    _, offsets, data = texts.buffers()
    all_offsets = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return all_offsets, np.frombuffer(data if data is not None else b"", dtype=np.uint8)
