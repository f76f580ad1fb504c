"""Lines of text, plain and packed."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from insitu.base.errors import SourceError
from insitu.grid.sources import find_sources, open_sources, stem
from insitu.grid.sources.base import SourceOptions


def pack_zst(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(data)
    return bytes(sink.getvalue())


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": pack_zst,
    ".bz2": bz2.compress,
}


def read(path: Path, block_bytes: int = 1 << 20, start: int = 0) -> list[str]:
    (source,) = open_sources(find_sources([str(path)], None), SourceOptions())
    return [text for block in source.blocks(block_bytes, start) for text in block.columns["text"].to_pylist()]


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 20])
def test_each_line_is_a_row(tmp_path: Path, packing: str, block_bytes: int) -> None:
    lines = [f"line é {i}" * (i % 5) for i in range(3000)]
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(PACKERS[packing](("\n".join(lines) + "\n").encode()))
    assert read(path, block_bytes) == lines and stem(path) == "a"
    (source,) = open_sources(find_sources([str(path)], None), SourceOptions())
    assert abs(source.expected_rows - 3000) < 600
    block = next(iter(source.blocks(1000)))
    assert read(path, 1000, block.next_start) == lines[block.rows :]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\r\nb\r\n\r\nc", ["a", "b", "", "c"]),
        (b"\xef\xbb\xbfa\n", ["a"]),
        (b"\n", [""]),
        (b"a\rb\x0cc\xe2\x80\xa8d\n", ["a\rb\x0cc\u2028d"]),
        (b" a \n\tb", [" a ", "\tb"]),
    ],
)
def test_lines_end_with_a_line_feed_alone(tmp_path: Path, data: bytes, lines: list[str]) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert read(tmp_path / "a.txt") == lines


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\n\xe9\n", r"Received: another encoding .* in line 2, at byte 2 of the text.*iconv -f LATIN1"),
        ("aé\n".encode("utf-16"), r"Received: binary data or UTF-16 in line 1.*iconv -f UTF-16"),
        (b"\x89PNG\0\xff", "Received: binary data"),
        (b"a\n" * (3 << 20) + b"\xff", r"at byte 6291456 of the text"),
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "has no lines"),
    ],
)
def test_what_is_not_utf8_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(SourceError, match=message):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("packing", [".gz", ".zst", ".bz2"])
@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_a_truncated_packed_file_is_refused(tmp_path: Path, packing: str, form: str) -> None:
    line = '{{"a": {}}}\n' if form == "jsonl" else "{}\n"
    data = PACKERS[packing]("".join(line.format(i * i) for i in range(500_000)).encode())
    path = tmp_path / f"a.{form}{packing}"
    for cut in (data[: len(data) // 2], data[:-1], b"hello"):
        path.write_bytes(cut)
        with pytest.raises(SourceError, match=f"a.{form}{packing} can't be unpacked"):
            for source in open_sources(find_sources([str(path)], None), SourceOptions()):
                list(source.blocks(1 << 20))


def test_texts_of_a_folder_give_way_to_other_files(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x\n")
    assert len(find_sources([str(tmp_path)], None)) == 2
    (tmp_path / "c.tiff").write_text("x")
    with pytest.raises(SourceError, match=r"Received: 2 \.txt, 1 \.tiff\..* --format text"):
        find_sources([str(tmp_path)], None)
    assert len(find_sources([str(tmp_path)], "text")) == 2
    (tmp_path / "d.csv").write_text("a\n1\n")
    assert [file.name for file, _ in find_sources([str(tmp_path)], None)] == ["d.csv"]
