"""Writes partitions block by block, each byte once, and takes their checksums on the way."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from insitu.base.errors import GridError
from insitu.base.spec import Column
from insitu.grid.partitions.checksum import checksum_text, combined
from insitu.grid.partitions.compression import BlockCompressor, buffer_slots
from insitu.grid.partitions.direct_file import DirectFile
from insitu.grid.partitions.format import (
    BlockMark,
    arrow_schema,
    body_alignment,
    column_sums,
    find_mark,
    is_variable,
    make_batch,
    make_mark,
    value_type,
    values_of_batch,
    write_options,
)
from insitu.grid.partitions.ipc_message import PREFIX_BYTES, read_buffers

_FILE_START = 8
"""Bytes before the first message: Arrow's magic word and padding."""
_MOST_PIECES = 512
"""Pieces of memory that are given to the system at once; it takes 1,024 at most."""
_WORTH_DIRECT = 256 << 10
"""Bytes of a block from which on the way past the system's cache is the shorter one."""


class PartitionWriter:
    """A new partition that grows by whole blocks.

    No file is open between calls, since an import may write thousands of partitions.
    """

    def __init__(
        self,
        path: Path,
        columns: tuple[Column, ...],
        pacing: WritePacing | None = None,
        codec: str | None = None,
        room: memoryview | None = None,
    ) -> None:
        """The file at `path`, which must not be there, is made by the first `write`, or by `close`.

        `pacing` is called at each write of whole blocks. `codec` is a name of `spec.CODECS`, or None: nothing
        is compressed. With `room`, of `make_room`, a file of large blocks is written past the system's cache,
        and read back from the disk.
        """
        self._path = path
        self._room = room
        #: The file that is written past the cache; None: it isn't, or has no block yet.
        self._direct: DirectFile | None = None
        self._pacing = pacing
        self._columns = columns
        self._sink = _PieceSink()
        self._file = pa.PythonFile(self._sink, "w")
        self._writer = pa.ipc.new_file(self._file, arrow_schema(columns), options=write_options())
        #: None if nothing is compressed.
        self._compressor: BlockCompressor | None = None
        if codec is not None:
            self._compressor = BlockCompressor(columns, codec, _block_metadata(columns, codec))
        self._blocks = 0
        self._first_body = 0
        self._crc32 = 0
        #: Bytes of the file so far.
        self._position = 0

    @property
    def raw_bytes(self) -> int:
        """The bytes that the file would have without compression, after `close`; 0 if nothing is
        compressed."""
        return 0 if self._compressor is None else self._sink.position

    @property
    def is_read_back(self) -> bool:
        """Whether `close` has compared the file on the disk with its checksum."""
        return self._direct is not None

    @property
    def column_bytes(self) -> list[tuple[int, int]]:
        """(bytes without compression, bytes in the file) of each column; empty without compression."""
        return [] if self._compressor is None else self._compressor.column_bytes

    def write(self, rows: int, values: Mapping[str, Any]) -> None:
        """Append a block of `rows` rows, one at least. `values` are as for `make_batch`. Raises OSError."""
        self._append(self._encode(rows, values, self._sums(values)), is_block=True)

    def _sums(self, values: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return (CRC-32, bytes) of each column; zeros if they are about to be compressed."""
        if self._compressor is not None:
            return [(0, 0)] * len(self._columns)
        return column_sums(self._columns, values)

    def adopt(self, block_rows: int) -> int:
        """Take over the blocks of `block_rows` rows that are in the file already, and cut off the rest.

        Call it before the first `write`. Each is verified, by its checksum and byte by byte by what would be
        written in its place. Returns how many there are. Raises OSError and GridError.
        """
        if not self._path.exists():
            return 0
        with self._path.open("r+b") as file:
            self._adopt_blocks(file, block_rows)
            file.truncate(self._position if self._blocks else 0)
        if not self._blocks:
            self._path.unlink()
        self._sink.appended = self._blocks > 0
        if self._room is not None and self._blocks and self._position // self._blocks >= _WORTH_DIRECT:
            self._direct = DirectFile(self._path, self._room, self._position)
        return self._blocks

    def _adopt_blocks(self, file: IO[bytes], block_rows: int) -> None:
        file.seek(_FILE_START)
        if _read_message(file) is None:  # the schema
            return
        while (message := _read_message(file)) is not None:
            try:
                if self._compressor is not None and not self._is_intact(message):
                    return
                batch = pa.ipc.read_record_batch(message, arrow_schema(self._columns))
                batch.validate(full=True)
            except (pa.ArrowException, ValueError, OSError):
                return
            values = values_of_batch(self._columns, batch)
            sums = self._sums(values)
            mark = find_mark(message.metadata.to_pybytes())
            if batch.num_rows != block_rows or mark is None or mark.number != self._blocks:
                return
            if self._compressor is None and mark.crc32 != tuple(crc32 for crc32, _ in sums):
                return
            start, end = self._position, file.tell()
            written = b"".join(self._encode(block_rows, values, sums))
            if os.pread(file.fileno(), end - start, start) != written:
                raise GridError(
                    f"Block {mark.number} of {self._path} isn't as this insitu writes it. Import again "
                    f"without --resume"
                )

    def _is_intact(self, message: Any) -> bool:
        """Return whether the columns of a compressed block have their checksums. Nothing is decompressed."""
        table, body = message.metadata.to_pybytes(), memoryview(message.body)
        mark, buffers = find_mark(table), read_buffers(table)
        slots, count = buffer_slots(self._columns)
        if mark is None or len(buffers) != count or len(mark.crc32) != len(slots):
            return False
        starts = [int(buffers[held[0]]["offset"]) for held in slots]
        bounds = zip(starts, [*starts[1:], len(body)], strict=True)
        sums = [zlib.crc32(body[start:end]) for start, end in bounds]
        return tuple(sums) == mark.crc32

    def _encode(
        self, rows: int, values: Mapping[str, Any], sums: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        """Return the bytes of the next block, with these (CRC-32, bytes) by column, for the file."""
        mark = BlockMark(self._blocks, tuple(crc32 for crc32, _ in sums))
        padding = 0
        if self._blocks:
            body = self._sink.position + len(_block_metadata(self._columns, None))
            padding = -(body - self._first_body) % body_alignment(self._columns)
        batch = make_batch(self._columns, rows, values)
        self._writer.write_batch(batch, custom_metadata=make_mark(mark, padding))
        if not self._blocks:
            self._first_body = self._sink.body_start
        self._blocks += 1
        pieces, first = self._sink.take_pieces()
        if self._compressor is not None:
            return self._compress(self._compressor, b"".join(pieces[:first]), values)
        return self._count(pieces, first, sums)

    def _compress(
        self, compressor: BlockCompressor, metadata: bytes, values: Mapping[str, Any]
    ) -> list[memoryview]:
        """Return the bytes of a block whose metadata Arrow gave without compression, behind the schema if it
        is the first one."""
        start = 0
        if self._blocks == 1:
            schema_bytes = int.from_bytes(metadata[_FILE_START + 4 : _FILE_START + PREFIX_BYTES], "little")
            start = _FILE_START + PREFIX_BYTES + schema_bytes
        block = compressor.encode(metadata[start:], values)
        head = memoryview(metadata[:start] + block.metadata)
        body_bytes = sum(size for _, size in block.sums)
        compressor.record_place(self._position + start, len(block.metadata), body_bytes)
        return self._count([head, *block.pieces], 1, block.sums)

    def close(self, *, sync: bool = True) -> tuple[int, str]:
        """Complete the file and return (bytes, checksum). Raises OSError, and GridError if it was read back
        and isn't as it was written.

        With `sync` it survives a power cut; without, the caller must see to it.
        """
        self._writer.close()
        pieces, _ = self._sink.take_pieces()
        if self._compressor is not None:
            pieces = [memoryview(self._compressor.complete(b"".join(pieces)))]
        self._append(self._count(pieces, len(pieces), []), is_block=False)
        if self._direct is not None:
            refuse_changed(self._path, checksum_text(self._direct.finish()), checksum_text(self._crc32))
        if sync:
            with self._path.open("rb") as file:
                os.fsync(file.fileno())
        return self._position, checksum_text(self._crc32)

    def _count(
        self, pieces: list[memoryview], first: int, sums: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        """Return pieces that are about to be written, after they have entered the checksum.

        Pieces from number `first` on are columns with these (CRC-32, bytes).
        """
        for piece in pieces[:first]:
            self._crc32 = zlib.crc32(piece, self._crc32)
        for crc32, size in sums:
            self._crc32 = combined(self._crc32, crc32, size)
        self._position += sum(map(len, pieces))
        return pieces

    def _append(self, pieces: list[memoryview], *, is_block: bool) -> None:
        size = sum(map(len, pieces))
        if self._room is not None and not self._sink.appended and size >= _WORTH_DIRECT:
            self._direct = DirectFile(self._path, self._room)
        mode, self._sink.appended = "ab" if self._sink.appended else "xb", True
        if self._direct is not None:
            self._direct.append(pieces)
            return
        with self._path.open(mode, buffering=0) as file:
            for start in range(0, len(pieces), _MOST_PIECES):
                _write_all(file.fileno(), pieces[start : start + _MOST_PIECES])
            if self._pacing is not None and is_block:
                self._pacing.add(self._path, file.fileno(), self._position - size, size)


def refuse_changed(path: Path, found: str, written: str) -> None:
    """Raise GridError unless a file that was read back has the checksum of what was written."""
    if found != written:
        raise GridError(
            f"{path.name} must have the checksum {written}. Received: {found}: the disk or the memory "
            f"of this host has changed what was written"
        )


def _read_message(file: IO[bytes]) -> Any:
    """Return the next message of a file; None if no whole one follows."""
    try:
        return pa.ipc.read_message(file)
    except (pa.ArrowException, EOFError, MemoryError, ValueError):  # a damaged length may be any number
        return None
    except OSError as error:
        if error.errno is not None:
            raise
        return None


def _write_all(descriptor: int, pieces: list[memoryview]) -> None:
    while pieces:
        written = os.writev(descriptor, pieces)
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if pieces and written:
            pieces[0] = pieces[0][written:]


class _PieceSink:
    """Keeps the pieces that Arrow writes, without copying the buffers of columns."""

    closed = False

    def __init__(self) -> None:
        self.position = 0
        self.body_start = 0
        self.appended = False
        self._pieces: list[memoryview] = []
        self._body = -1

    def take_pieces(self) -> tuple[list[memoryview], int]:
        """Return the pieces since the last call, and the number of the first that belongs to a body."""
        taken = self._pieces, self._body
        self._pieces, self._body = [], -1
        return taken

    def write(self, data: Any) -> int:
        if isinstance(data, pa.Buffer):
            if self._body < 0:
                self._body, self.body_start = len(self._pieces), self.position
            piece = memoryview(data).cast("B")
        else:
            piece = memoryview(bytes(data))
        self._pieces.append(piece)
        self.position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@functools.lru_cache(maxsize=64)
def _block_metadata(columns: tuple[Column, ...], codec: str | None) -> bytes:
    """Return the bytes between the beginning of a block's message and its body, without padding.

    It is that of block 0, with one row.
    """
    values = {
        column.name: pa.array([""], value_type(column))
        if is_variable(column)
        else np.zeros((1, *column.shape), column.dtype)
        for column in columns
    }
    sink = _PieceSink()
    mark = make_mark(BlockMark(0, (0,) * len(columns)), 0)
    with pa.PythonFile(sink, "w") as file:
        writer = pa.ipc.new_file(file, arrow_schema(columns), options=write_options(codec))
        for _ in range(2):  # the schema comes with the first one
            sink.take_pieces()
            writer.write_batch(make_batch(columns, 1, values), custom_metadata=mark)
        pieces, body = sink.take_pieces()
        writer.close()
    return b"".join(pieces[:body])


# Keeps what is written from filling the system's cache: the disk begins at once, and isn't far behind


_BEHIND_BYTES = 64 << 20
"""Bytes that the disk may be behind. It has enough to do, and the cache keeps room for others."""
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint]


class WritePacing:
    """Paces the writes of one thread to any number of files.

    Left alone, the system collects gigabytes, then makes all writers of the machine wait for the disk.
    """

    def __init__(self, *, drop: bool) -> None:
        """With `drop`, what is on the disk leaves the system's cache, for data that doesn't fit there."""
        self._drop = drop
        self._behind: deque[tuple[Path, int, int]] = deque()
        self._bytes = 0

    def add(self, path: Path, descriptor: int, offset: int, size: int) -> None:
        """Have the disk begin to write [offset, offset + size) of a file, and wait for what is far behind."""
        _LIBC.sync_file_range(descriptor, offset, size, _WRITE)
        self._behind.append((path, offset, size))
        self._bytes += size
        while self._bytes > _BEHIND_BYTES:
            path, offset, size = self._behind.popleft()
            self._bytes -= size
            self._wait(path, offset, size)

    def _wait(self, path: Path, offset: int, size: int) -> None:
        # A file that is gone, or a file system that knows none of this, needs no pacing. fsync
        # reports errors of the disk at the end.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                _LIBC.sync_file_range(descriptor, offset, size, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
                if self._drop:
                    os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
