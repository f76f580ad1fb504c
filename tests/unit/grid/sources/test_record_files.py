from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_writer import frame, write_records

from insitu.base.errors import SourceError
from insitu.grid.sources.record_files import check_records, is_packed, mask_checksum, read_chunks


def read(path: Path, chunk_bytes: int, start: int = 0) -> list[bytes]:
    records = []
    for chunk in read_chunks(path, is_packed(path), chunk_bytes, start):
        check_records(chunk, path)
        for begin, length in zip(chunk.starts.tolist(), chunk.lengths.tolist(), strict=True):
            records.append(chunk.data[begin : begin + length])
    return records


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(st.binary(max_size=60), min_size=1, max_size=20),
    chunk_bytes=st.integers(1, 200),
    packed=st.booleans(),
)
def test_all_records_are_read_from_any_place_on(tmp_path: Path, records, chunk_bytes: int, packed: bool):
    path = tmp_path / ("a.tfrecord.gz" if packed else "a.tfrecord")
    write_records(path, records)
    assert read(path, chunk_bytes) == records
    done = 0
    for chunk in read_chunks(path, packed, chunk_bytes):
        done += len(chunk.starts)
        assert read(path, chunk_bytes, chunk.end) == records[done:]


def test_a_file_is_known_as_packed_by_its_beginning(tmp_path: Path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(gzip.compress(frame(b"x")))
    assert is_packed(path) and read(path, 100) == [b"x"]
    # The length of this record begins like a file of gzip.
    write_records(path, [bytes(0x8B1F)])
    assert not is_packed(path)
    path.write_bytes(zlib.compress(frame(b"x")))
    with pytest.raises(SourceError, match="packed by zlib"):
        is_packed(path)


@pytest.mark.parametrize("cut", [1, 4, 5, 11, 15, 16, 20])
def test_a_truncated_file_names_the_place(tmp_path: Path, cut: int):
    data = frame(b"first") + frame(b"second")
    path = tmp_path / "a.tfrecord"
    path.write_bytes(data[:-cut])
    with pytest.raises(SourceError, match=r"a\.tfrecord is truncated: record 1 at byte 21 has \d+ of"):
        read(path, 1000)


def test_a_truncated_packed_file_is_refused(tmp_path: Path):
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(gzip.compress(frame(b"first" * 100))[:-9])
    with pytest.raises(SourceError, match="can't be unpacked"):
        read(path, 1000)


@pytest.mark.parametrize("byte", range(21, 43))
def test_each_changed_byte_names_the_place(tmp_path: Path, byte: int):
    data = bytearray(frame(b"first") + frame(b"second"))
    data[byte] ^= 0x10
    path = tmp_path / "a.tfrecord"
    path.write_bytes(data)
    with pytest.raises(SourceError, match="record 1 at byte 21 is damaged"):
        read(path, 1000)


def test_a_false_length_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("insitu.grid.sources.record_files.read_available_bytes", lambda: 1 << 33)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(frame(b"")[:0] + _framed_length(1 << 62))
    with pytest.raises(SourceError, match="damaged, or the file is no TFRecord file"):
        read(path, 1000)
    path.write_bytes(_framed_length(1 << 30))
    with pytest.raises(SourceError, match=r"truncated: record 0 at byte 0 has 22 of"):
        read(path, 1000)


def _framed_length(length: int) -> bytes:
    import struct

    import google_crc32c

    raw = struct.pack("<Q", length)
    return raw + struct.pack("<I", mask_checksum(google_crc32c.value(raw))) + bytes(10)


def test_a_record_that_memory_has_no_room_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """2 MB of gzip can hold a record of 2 GB, which is in memory four times."""
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(gzip.compress(_framed_length(1 << 30), mtime=0))
    monkeypatch.setattr("insitu.grid.sources.record_files.read_available_bytes", lambda: 1 << 31)
    with pytest.raises(SourceError, match=r"must fit into memory 4 times. Received: one of 1073741824 bytes"):
        read(path, 100)
