"""One partition: an Arrow IPC file that is written once and then read through memory maps.

The file holds ONE record batch, so each column is one contiguous buffer, and that buffer starts at a
multiple of 64 bytes: NumPy reads it in place. Rows of shape () are plain Arrow columns, others
`fixed_shape_tensor`; bools are stored as uint8, since Arrow's are bits; text is `large_utf8`. In the file
the widest column comes first and text last, whatever the order in the catalogue. Nothing is compressed
and nothing is null.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.errors import CorruptPartition
from insitu.grid.checksum import checksum_text, combined
from insitu.spec import Column

ALIGNMENT = 64
TEXT = "str"
_SLICE_BYTES = 4 << 20
_MADV_POPULATE_READ = 22
"""Linux's number; Python's mmap has no name for it yet."""


def value_type(column: Column) -> Any:
    """Return the Arrow type of one value of a column."""
    if column.dtype == TEXT:
        return pa.large_utf8()
    return pa.uint8() if column.dtype == "bool" else pa.from_numpy_dtype(np.dtype(column.dtype))


def row_bytes(column: Column) -> int:
    """Return the bytes of one row of a column; 0 for text, whose rows differ."""
    return 0 if column.dtype == TEXT else np.dtype(column.dtype).itemsize * math.prod(column.shape)


def file_order(columns: Sequence[Column]) -> list[Column]:
    """Return `columns` as they lie in the file: the widest first, text last."""
    return sorted(columns, key=lambda column: (column.dtype == TEXT, -row_bytes(column)))


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
class Buffers:
    """One column's bytes on the way into a file, each padded with zeros to a multiple of ALIGNMENT.

    `offsets` is there for text alone: int64[rows + 1], from 0.
    """

    #: The values of all rows; for text, its UTF-8 bytes.
    values: Any
    #: For text, where each row's text begins in `values`, in bytes; else None.
    offsets: Any = None


@functools.lru_cache(maxsize=64)
def body_layout(columns: tuple[Column, ...]) -> tuple[Any, int]:
    """Return (schema with padding, where the first buffer lies in the file).

    The metadata before it has the same size for any number of rows but 0; the padding makes it end at a
    multiple of ALIGNMENT.
    """
    zeros = pa.py_buffer(bytes(max(ALIGNMENT, *(row_bytes(c) + ALIGNMENT for c in columns))))
    arrays = [_array(c, 1, Buffers(zeros, pa.py_buffer(bytes(ALIGNMENT)))) for c in file_order(columns)]
    padding = 0
    while True:
        schema = arrow_schema(columns).with_metadata({"padding": " " * padding})
        sink = _MeasuringSink()
        _write_file(sink, schema, arrays)
        if sink.body_start % ALIGNMENT == 0:
            return schema, sink.body_start
        padding += ALIGNMENT - sink.body_start % ALIGNMENT


def write_partition(
    path: Path,
    columns: tuple[Column, ...],
    rows: int,
    buffers: Mapping[str, Buffers],
    *,
    in_place: int | None = None,
    written: Callable[[], None] = lambda: None,
) -> tuple[int, str]:
    """Write one partition, durable, to `path`. Returns (bytes, checksum).

    Where `in_place` is given, `path` is there already and holds the first column (in `file_order`) from
    `body_layout` on, and `in_place` is the CRC-32 of these bytes with their padding; else it is made.
    `written` is called after every few MiB, to let the caller drop what it has mapped.
    """
    schema, _ = body_layout(columns)
    order = file_order(columns)
    arrays = [_array(column, rows, buffers[column.name]) for column in order]
    skipped = None if in_place is None else (buffers[order[0].name].values.address, in_place)
    with path.open("xb" if in_place is None else "r+b", buffering=0) as file:
        sink = _ChecksumSink(file, written, skipped)
        _write_file(sink, schema, arrays)
        os.fsync(file.fileno())
    return sink.position, checksum_text(sink.crc32)


def _array(column: Column, rows: int, buffers: Buffers) -> Any:
    if column.dtype == TEXT:
        return pa.Array.from_buffers(pa.large_utf8(), rows, [None, buffers.offsets, buffers.values])
    size = math.prod(column.shape)
    values = pa.Array.from_buffers(value_type(column), rows * size, [None, buffers.values])
    if not column.shape:
        return values
    storage_type = pa.list_(pa.field("item", value_type(column), nullable=True), size)
    storage = pa.Array.from_buffers(storage_type, rows, [None], children=[values])
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(value_type(column), column.shape), storage)


def _write_file(sink: Any, schema: Any, arrays: list[Any]) -> None:
    # Without this Arrow refuses a column of 2**31 values or more; images count one per pixel.
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)
    with pa.PythonFile(sink, "w") as file, pa.ipc.new_file(file, schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))


class _MeasuringSink:
    """Looks at no byte, so that memory-mapped buffers stay untouched."""

    closed = False

    def __init__(self) -> None:
        self.position = 0
        self.body_start = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if isinstance(data, pa.Buffer) and not self.body_start:
            self.body_start = self.position
        self.position += size
        return size

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _ChecksumSink(_MeasuringSink):
    """Writes slice by slice, taking each slice's checksum while it is in the processor's cache.

    `skipped` is (address, CRC-32) of a buffer that lies in its place already.
    """

    def __init__(self, file: Any, written: Callable[[], None], skipped: tuple[int, int] | None) -> None:
        super().__init__()
        self.crc32 = 0
        self._file = file
        self._written = written
        self._skipped = skipped
        self._unannounced = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._skipped and isinstance(data, pa.Buffer) and data.address == self._skipped[0]:
            self.crc32 = combined(self.crc32, self._skipped[1], len(view))
            self._file.seek(len(view), os.SEEK_CUR)
        else:
            self._write(view)
        self.position += len(view)
        return len(view)

    def _write(self, view: memoryview) -> None:
        for start in range(0, len(view), _SLICE_BYTES):
            part = view[start : start + _SLICE_BYTES]
            self.crc32 = zlib.crc32(part, self.crc32)
            while part:
                part = part[self._file.write(part) :]
            self._unannounced += len(view[start : start + _SLICE_BYTES])
            if self._unannounced >= _SLICE_BYTES:
                self._written()
                self._unannounced = 0


def take(values: Any, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
    """Copy the given rows of one column of a Partition into `out`, in their order."""
    if isinstance(values, np.ndarray):
        # "clip" spares NumPy a buffer of its own; the rows are within bounds.
        values.take(rows, 0, out, "clip")
    else:
        out[:] = values.take(pa.array(rows)).to_numpy(zero_copy_only=False)


class Partition:
    """The columns of one file, mapped. `values[name]` is a read-only array [rows, *shape] over the file's
    own pages; for text it is an Arrow array of strings.
    """

    __slots__ = ("_mapping", "path", "rows", "values")

    def __init__(self, path: Path, columns: tuple[Column, ...], rows: int) -> None:
        """Map `path`, after a check of its footer, schema and rows. Raises CorruptPartition."""
        self.path = path
        self.rows = rows
        try:
            with path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            reader = pa.ipc.open_file(pa.py_buffer(self._mapping))
            if reader.num_record_batches != 1:
                raise ValueError(f"it has {reader.num_record_batches} record batches instead of 1")
            batch = reader.get_batch(0)
            batch.validate()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise make_corrupt_error(path, f"it can't be read as an Arrow file ({error})") from error
        expected = arrow_schema(columns)
        if not batch.schema.equals(expected):
            raise make_corrupt_error(
                path, f"it has columns {batch.schema.names} unlike those expected, {expected.names}"
            )
        if batch.num_rows != rows:
            raise make_corrupt_error(path, f"it has {batch.num_rows} rows, expected {rows}")
        self.values = {column.name: _values(batch.column(column.name), column, rows) for column in columns}

    def prefault(self) -> None:
        """Map all pages at once, large ones where the kernel has them: some 20 GB/s of cached file.

        Taken one by one on first use they make the first epoch several times slower. Left out where the file
        would fill half of the memory, or the kernel is older than 5.14.
        """
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if len(self._mapping) < memory // 2:
            for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_READ):
                with contextlib.suppress(OSError):
                    self._mapping.madvise(advice)

    def slice(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows [start, stop) of one column, in place where it isn't text."""
        values = self.values[name]
        if isinstance(values, np.ndarray):
            return values[start:stop]
        texts: npt.NDArray[Any] = values.slice(start, stop - start).to_numpy(zero_copy_only=False)
        return texts

    def bytes_per_row(self, name: str) -> float:
        """Return the bytes of the file that a row of this column takes; the mean for text."""
        values = self.values[name]
        return float(values.nbytes) / max(1, self.rows)


def _values(array: Any, column: Column, rows: int) -> Any:
    if column.dtype == TEXT:
        return array
    storage = array.storage.values if column.shape else array
    data = storage.buffers()[1]
    values = np.frombuffer(data if rows else b"", dtype=column.dtype, count=rows * math.prod(column.shape))
    return values.reshape(rows, *column.shape)


def make_corrupt_error(path: Path, why: str) -> CorruptPartition:
    """Return the error for a partition that can't be used, for the caller to raise."""
    return CorruptPartition(
        f"Partition {path} is corrupt: {why}. Import the cache again with --overwrite, or put back a copy "
        f"of the file"
    )
