"""Checksums put together from parts."""

from __future__ import annotations

import zlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from insitu.grid.partitions.checksum import checksum_text, combined, file_checksum


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_parts_combine_to_the_whole(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_large_part_combines() -> None:
    first, second = b"first", bytes(range(256)) * 70_000
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_file_larger_than_a_slice(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40_000
    (tmp_path / "a").write_bytes(data)
    assert file_checksum(tmp_path / "a") == checksum_text(zlib.crc32(data))
