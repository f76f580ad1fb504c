"""No file ends a process, or an import by anything but a SourceError."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from malformed_files import ROWS, format_of, make_files, make_records, read_all, write_tfrecord

from insitu.base.errors import SourceError
from insitu.base.paths import Paths
from insitu.grid import import_cache
from insitu.grid.sources import open_sources
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.npz import NpzSource
from insitu.grid.sources.parquet import ParquetTable

FILES = make_files()
NUMBERS = [0, 1, -1, 0x7F, 0xFF, 0x7FFF, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 40, (1 << 62) + 1, -(1 << 63)]
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["byte", "number", "small number", "cut", "drop", "repeat"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 255),
        st.sampled_from(NUMBERS),
    ),
    min_size=1,
    max_size=4,
)


def edit(data: bytes, edits: list[tuple[str, float, int, int]]) -> bytes:
    """Return `data` with changes of one kind each at some place."""
    for kind, place, byte, number in edits:
        at = int(place * len(data))
        match kind:
            case "byte":
                data = data[:at] + bytes([byte]) + data[at + 1 :]
            case "number":
                at -= at % 8
                data = data[:at] + struct.pack("<Q", number & (1 << 64) - 1) + data[at + 8 :]
            case "small number":
                at -= at % 4
                data = data[:at] + struct.pack("<I", number & (1 << 32) - 1) + data[at + 4 :]
            case "cut":
                data = data[: max(1, at)]
            case "drop":
                data = data[:at] + data[at + byte :]
            case "repeat":
                data = data[:at] + data[at : at + byte] + data[at:]
    return data or b"\0"


@pytest.mark.parametrize("name", FILES)
def test_whole_files_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert read_all(tmp_path / name, format_of(name)) == ROWS


@pytest.mark.parametrize("name", FILES)
@settings(
    max_examples=60,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(edits=EDITS)
def test_a_changed_file_is_read_or_refused(tmp_path: Path, name: str, edits) -> None:
    (tmp_path / name).write_bytes(edit(FILES[name], edits))
    read_all(tmp_path / name, format_of(name))


@settings(max_examples=200, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(edits=EDITS, number=st.integers(0, ROWS - 1))
def test_a_changed_record_with_right_checksums_is_read_or_refused(tmp_path: Path, edits, number: int) -> None:
    records = make_records()
    records[number] = edit(records[number], edits)
    (tmp_path / "a.tfrecord").write_bytes(write_tfrecord(records))
    read_all(tmp_path / "a.tfrecord", "tfrecord")


def write_lying(path: Path, kind: str, place: str) -> None:
    """Write 64 texts or lists whose offsets point out of the file, at the end or in the middle."""
    values = [f"t{i}" for i in range(64)] if kind == "text" else [[i] for i in range(64)]
    array = pa.array(values, pa.large_string() if kind == "text" else pa.large_list(pa.int64()))
    offsets = np.frombuffer(array.buffers()[1], np.int64)[:65].copy()
    plain = io.BytesIO()
    with pa.ipc.new_file(plain, pa.schema([("x", array.type)])) as writer:
        writer.write_batch(pa.record_batch([array], names=["x"]))
    false = offsets.copy()
    false[-1 if place == "end" else 30] = 1 << 40
    data = plain.getvalue()
    assert data.count(offsets.tobytes()) == 1
    path.write_bytes(data.replace(offsets.tobytes(), false.tobytes()))


@pytest.mark.parametrize("kind", ["text", "list"])
@pytest.mark.parametrize("place", ["end", "middle"])
def test_offsets_out_of_an_arrow_file_are_refused(tmp_path: Path, kind: str, place: str) -> None:
    """Arrow follows them when it copies rows: the process ended by SIGBUS or SIGABRT."""
    write_lying(tmp_path / "a.arrow", kind, place)
    with pytest.raises(SourceError, match=r"a\.arrow can't be read"):
        import_cache(Paths(tmp_path / "home"), "a", [str(tmp_path / "a.arrow")], partitions=2)


def header_of(shape: str, order: str = "False", kind: str = "<f8") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': {order}, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


SHAPES = [
    "(-5, 2)",
    "(1, -1)",
    "(True,)",
    f"(1, {2**50})",
    f"({2**62}, {2**62})",
    "(2.0,)",
    "('a',)",
    "5",
    "(10, 10)",
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ["False", "True"])
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_false_header_of_numpy_is_refused(tmp_path: Path, shape: str, order: str, suffix: str) -> None:
    data = header_of(shape, order) + bytes(64)
    path = tmp_path / f"a.{suffix}"
    if suffix == "npy":
        path.write_bytes(data)
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", data)
    with pytest.raises(SourceError):
        import_cache(Paths(tmp_path / "home"), "a", [str(path)])


@pytest.mark.parametrize("header", ["(" * 5000, "{" * 300, "{'descr': " + "[" * 200 + "]" * 200 + "}"])
def test_a_header_that_overflows_the_parser_is_refused(tmp_path: Path, header: str) -> None:
    text = header.encode() + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    with pytest.raises(SourceError):
        open_sources([(tmp_path / "a.npy", "npy")], SourceOptions())


def test_an_archive_that_lies_about_its_sizes_is_refused(tmp_path: Path) -> None:
    """Both the header and the archive announce 2**50 values; there are eight."""
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header_of(f"(1, {2**50})") + bytes(64))
    entry = len(header_of(f"(1, {2**50})") + bytes(64))
    data = path.read_bytes().replace(struct.pack("<II", entry, entry), struct.pack("<II", entry, 0xFFFFFFFE))
    path.write_bytes(data)
    with pytest.raises(SourceError):
        import_cache(Paths(tmp_path / "home"), "a", [str(path)])


def test_no_more_is_unpacked_than_a_header_announces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB of archive filled 64 MiB of the temporary folder for four numbers."""
    header = header_of("(2, 2)", "True")
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header + np.arange(4.0).tobytes() + bytes(64 << 20))
    sizes = []
    made = np.memmap

    def look(file, *args, **kwargs):
        sizes.append(file.seek(0, 2))
        return made(file, *args, **kwargs)

    monkeypatch.setattr(np, "memmap", look)
    (block,) = NpzSource(tmp_path / "a.npz", SourceOptions()).blocks(1 << 20)
    assert block.columns["x"].tolist() == [[0, 2], [1, 3]]
    assert sizes == [len(header) + 32]


def test_what_doesnt_fit_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.asfortranarray(np.zeros((1000, 1000))))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(
        SourceError, match=r"8000128 bytes are unpacked to .* where 1000 are free\. Set TMPDIR"
    ):
        list(NpzSource(tmp_path / "a.npz", SourceOptions()).blocks(1 << 20))


def test_text_of_numpy_with_numbers_that_are_no_characters_is_refused(tmp_path: Path) -> None:
    """Found by the fuzzer: Python raises SystemError for them."""
    (tmp_path / "a.npy").write_bytes(header_of("(2,)", kind="<U1") + struct.pack("<II", 97, 0xFFFFFFFF))
    with pytest.raises(SourceError, match=r"SystemError|ValueError"):
        import_cache(Paths(tmp_path / "home"), "a", [str(tmp_path / "a.npy")])


@pytest.mark.parametrize("format", ["npy", "parquet"])
def test_text_that_is_none_is_refused(tmp_path: Path, format: str) -> None:
    """It came into the cache, and ended the training that read it."""
    path = tmp_path / f"a.{format}"
    if format == "npy":
        np.save(path, np.array(["a", "\ud800"]))
    else:
        pq.write_table(pa.table({"x": ["a", "bcde"]}), path, compression="none", use_dictionary=False)
        assert b"bcde" in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(b"bcde", b"b\xff\xfee"))
    with pytest.raises(SourceError, match="can't be read"):
        import_cache(Paths(tmp_path / "home"), "a", [str(path)])


@pytest.mark.parametrize("place", [0, -1], ids=["footer", "row group"])
def test_a_parquet_file_whose_counts_of_rows_differ_is_refused(tmp_path: Path, place: int) -> None:
    """Arrow reads as many rows as the row groups count. The others would be lost in silence."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": list(range(10))}), path, compression="none")
    data = bytearray(path.read_bytes())
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    # Thrift writes 10 as 20, and 9 as 18.
    counts = [at for at in range(begin, len(data) - 8) if data[at] == 20]
    data[counts[place]] = 18
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"its footer counts (9|10) rows, and its row groups (9|10)"):
        import_cache(Paths(tmp_path / "home"), "a", [str(path)])


def test_a_parquet_file_without_the_rows_that_it_counts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the fuzzer: StopIteration."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": list(range(10))}), path)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: iter(()))
    with pytest.raises(SourceError, match="but they hold none"):
        import_cache(Paths(tmp_path / "home"), "a", [str(path)])


def test_a_parquet_file_that_ends_early_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": list(range(100))}), path)
    (source,) = open_sources([(path, "parquet")], SourceOptions())
    monkeypatch.setattr(ParquetTable, "_groups_from", lambda *_: ([], 0))
    with pytest.raises(SourceError, match=r"counts 100 rows\. Received: 0"):
        list(source.blocks(1 << 20))
