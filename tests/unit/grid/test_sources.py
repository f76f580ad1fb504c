"""Every format by one conformance test; then what is particular to each, and bad input."""

from __future__ import annotations

import gzip
import io
import json
import os
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from image_files import write_tar
from record_writer import encode_example, write_records

from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column
from insitu.grid.sources import FORMATS, ColumnOptions, find_sources, open_sources, stem
from insitu.grid.sources.base import Source, SourceOptions

ROWS = 1000


def numbers() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {"a": rng.integers(-5, 5, ROWS), "b": rng.normal(size=ROWS), "c": rng.integers(0, 2, ROWS) == 1}


def mixed() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    image = rng.integers(0, 255, (ROWS, 4, 3), dtype=np.uint8)
    return {"image": image, "name": np.array([f"row é {i}" for i in range(ROWS)]), **numbers()}


def arrow_table(values: dict[str, Any]) -> Any:
    arrays = []
    for array in values.values():
        if array.ndim > 1:
            arrays.append(pa.FixedShapeTensorArray.from_numpy_ndarray(array))
        else:
            arrays.append(pa.array(array))
    return pa.table(arrays, names=list(values))


def write_npy(path: Path) -> dict[str, Any]:
    values = {"x": mixed()["image"]}
    np.save(path, values["x"])
    return values


def write_npy_columns(path: Path) -> dict[str, Any]:
    values = {"x": np.asfortranarray(mixed()["image"].astype(">f4"))}
    np.save(path, values["x"])
    return values


def write_npy_text(path: Path) -> dict[str, Any]:
    np.save(path, mixed()["name"])
    return {"x": mixed()["name"]}


def write_npz(path: Path) -> dict[str, Any]:
    np.savez(path, **mixed())
    return mixed()


def write_npz_compressed(path: Path) -> dict[str, Any]:
    values = {**mixed(), "f": np.asfortranarray(mixed()["image"])}
    np.savez_compressed(path, **values)
    return values


def write_parquet(path: Path) -> dict[str, Any]:
    pq.write_table(arrow_table(mixed()), path, row_group_size=300)
    return mixed()


def write_arrow_file(path: Path) -> dict[str, Any]:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, arrow_table(mixed()).schema) as writer:
        writer.write_table(arrow_table(mixed()), max_chunksize=333)
    return mixed()


def write_arrow_compressed(path: Path) -> dict[str, Any]:
    pa.feather.write_feather(arrow_table(mixed()), str(path), compression="zstd")
    return mixed()


def write_arrow_stream(path: Path) -> dict[str, Any]:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, arrow_table(mixed()).schema) as writer:
        writer.write_table(arrow_table(mixed()), max_chunksize=333)
    return mixed()


def write_csv(path: Path) -> dict[str, Any]:
    values = {**numbers(), "name": mixed()["name"]}
    pa.csv.write_csv(pa.table(values), str(path))
    return values


def write_csv_gz(path: Path) -> dict[str, Any]:
    values = write_csv(path)
    path.write_bytes(gzip.compress(path.read_bytes()))
    return values


def write_csv_zst(path: Path) -> dict[str, Any]:
    values = write_csv(path)
    text = path.read_bytes()
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write(text)
    return values


def write_tfrecord(path: Path) -> dict[str, Any]:
    values = mixed()
    rows = zip(*values.values(), strict=True)
    records = [
        encode_example(
            {
                "image": ("bytes", [image.tobytes()]),
                "name": ("bytes", [name.encode()]),
                "a": ("int64", [int(a)]),
                "b_raw": ("bytes", [b.tobytes()]),
                "c": ("int64", [int(c)]),
            }
        )
        for image, name, a, b, c in rows
    ]
    write_records(path, records)
    return values


def write_ndjson(path: Path) -> dict[str, Any]:
    values = mixed()
    del values["image"]
    rows = zip(*(column.tolist() for column in values.values()), strict=True)
    data = "".join(json.dumps(dict(zip(values, row, strict=True))) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return values


def pack(data: bytes, name: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd" if name.endswith(".zst") else "bz2") as file:
        file.write(data)
    return bytes(sink.getvalue())


def write_packed_ndjson(path: Path) -> dict[str, Any]:
    values = write_ndjson(path)
    path.write_bytes(pack(path.read_bytes(), path.name))
    return values


def write_text(path: Path) -> dict[str, Any]:
    data = "".join(f"{text}\n" for text in mixed()["name"]).encode()
    path.write_bytes(data if path.suffix == ".txt" else pack(data, path.name))
    return {"text": mixed()["name"]}


def write_webdataset(path: Path) -> dict[str, Any]:
    values, members = mixed(), {}
    for row in range(ROWS):
        held = {name: values[name][row].item() for name in ("name", "a", "b", "c")}
        array = io.BytesIO()
        np.save(array, values["image"][row])
        members |= {f"{row}.image.npy": array.getvalue(), f"{row}.json": json.dumps(held).encode()}
    write_tar(path, members, "w:gz" if path.name.endswith("gz") else "w")
    return values


WRITERS: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "npy": ("a.npy", write_npy),
    "npy, column order, big-endian": ("a.npy", write_npy_columns),
    "npy, text": ("a.npy", write_npy_text),
    "npz": ("a.npz", write_npz),
    "npz, compressed": ("a.npz", write_npz_compressed),
    "parquet": ("a.parquet", write_parquet),
    "arrow file": ("a.arrow", write_arrow_file),
    "arrow file, compressed": ("a.feather", write_arrow_compressed),
    "arrow stream": ("a.arrows", write_arrow_stream),
    "csv": ("a.csv", write_csv),
    "csv, compressed": ("a.csv.gz", write_csv_gz),
    "csv, compressed by zstd": ("a.csv.zst", write_csv_zst),
    "tfrecord": ("a.tfrecord", write_tfrecord),
    "tfrecord, compressed": ("a.tfrecords.gz", write_tfrecord),
    "ndjson": ("a.ndjson", write_ndjson),
    "ndjson, compressed": ("a.jsonl.gz", write_ndjson),
    "ndjson, compressed by zstd": ("a.ndjson.zst", write_packed_ndjson),
    "ndjson, compressed by bzip2": ("a.jsonl.bz2", write_packed_ndjson),
    "text": ("a.txt", write_text),
    "text, compressed by bzip2": ("a.txt.bz2", write_text),
    "webdataset": ("a.tar", write_webdataset),
    "webdataset, compressed": ("a.tgz", write_webdataset),
}


def opened(path: Path, **options: Any) -> Source:
    if ".tfrecord" in path.name:
        options.setdefault("features", "image:uint8[4,3],name:str,a:int64,b:float64=b_raw,c:bool")
    (source,) = open_sources(find_sources([str(path)], None), SourceOptions(**options))
    return source


def as_numpy(values: Any) -> Any:
    return values.copy() if isinstance(values, np.ndarray) else np.array(values.to_pylist())


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("block_bytes", [1, 5000, 1 << 20])
def test_conformance(writer: str, block_bytes: int, tmp_path: Path) -> None:
    """All rows, in order, with dtypes and shapes as announced, in native order; bytes grow to the size."""
    name, write = WRITERS[writer]
    if "csv" in writer and block_bytes == 1:
        block_bytes = 1000  # a block of CSV holds at least one line
    expected = write(tmp_path / name)
    source = opened(tmp_path / name)
    assert [c.name for c in source.columns] == list(expected)
    got: dict[str, list[Any]] = {name: [] for name in expected}
    rows = reached = 0
    for block in source.blocks(block_bytes):
        rows += block.rows
        assert reached <= block.source_bytes <= source.path.stat().st_size
        reached = block.source_bytes
        for column in source.columns:
            values = block.columns[column.name]
            assert len(values) == block.rows
            if column.dtype == "str":
                assert values.type == pa.large_utf8()
            else:
                assert (values.dtype.name, values.shape[1:]) == (column.dtype, column.shape)
                assert values.dtype.isnative and values.flags.c_contiguous
            got[column.name].append(as_numpy(values))
    assert rows == ROWS and reached > 0
    for name, parts in got.items():
        np.testing.assert_array_equal(np.concatenate(parts), expected[name])


def test_the_table_of_formats_agrees_with_the_classes(tmp_path: Path) -> None:
    for file_name, write in WRITERS.values():
        write(tmp_path / file_name)
        kind = opened(tmp_path / file_name).format
        module, name, suffixes = FORMATS[kind]
        made = getattr(import_module(f"insitu.grid.sources.{module}"), name)
        assert (made.format, made.suffixes) == (kind, suffixes)
        (tmp_path / file_name).unlink()


def test_lists_of_equal_length_are_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]]}), path)
    source = opened(path)
    assert source.columns == (Column("x", "int64", (2, 3)),)
    (block,) = source.blocks(1 << 20)
    np.testing.assert_array_equal(block.columns["x"].ravel(), np.arange(1, 13))


@pytest.mark.parametrize("rows", [[[1, 2], [3]], [[1], [2, 3]], [[1, 2], None]])
def test_lists_of_mixed_length_are_refused(rows: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": rows}), path)
    with pytest.raises(SourceError, match=r"'x'.*(lists of 1 to 2 values|misses 1 value)"):
        list(opened(path).blocks(1 << 20))


def test_missing_numbers_are_nan_in_floats_and_refused_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": pa.array([1.0, None], pa.float32())}), path)
    (block,) = opened(path).blocks(1 << 20)
    assert block.columns["x"].dtype == np.float32 and np.isnan(block.columns["x"]).tolist() == [False, True]
    pq.write_table(pa.table({"x": pa.array([1, None])}), path)
    with pytest.raises(SourceError, match="misses 1 value"):
        list(opened(path).blocks(1 << 20))


def test_csv_types_are_as_stated(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("i,f,b,t,d,e\n1,2.5,true,a,2024-01-01,\n2,,false,,2024-01-02,\n")
    source = opened(path)
    dtypes = {column.name: column.dtype for column in source.columns}
    assert dtypes == {"i": "int64", "f": "float64", "b": "bool", "t": "str", "d": "int64", "e": "float64"}
    (block,) = source.blocks(1 << 20)
    assert np.isnan(block.columns["f"][1]) and block.columns["t"].to_pylist() == ["a", ""]
    assert source.columns[4].logical == "date32[day]"
    assert block.columns["d"].astype("M8[D]").astype(str).tolist() == ["2024-01-01", "2024-01-02"]


def test_csv_files_may_differ_in_whole_and_other_numbers(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("v\n1\n2\n")
    (tmp_path / "2.csv").write_text("v\n1.5\n")
    sources = open_sources(find_sources([str(tmp_path)], None), SourceOptions())
    assert [source.columns[0].dtype for source in sources] == ["float64", "float64"]
    values = [value for s in sources for b in s.blocks(1 << 20) for value in b.columns["v"].tolist()]
    assert values == [1.0, 2.0, 1.5]


def test_a_later_value_of_another_type_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("v\n" + "1\n" * (5 << 20) + "1.5\n")
    with pytest.raises(
        SourceError, match=r"'v' is int64 by .* has '1\.5' in row #5242882\. Add --dtype v=float64"
    ):
        for _ in opened(path).blocks(1 << 20):
            pass


def bad_truncated(path: Path) -> Path:
    np.save(path / "a.npy", np.zeros((100, 10)))
    (path / "a.npy").write_bytes((path / "a.npy").read_bytes()[:-50])
    return path / "a.npy"


def bad_truncated_npz(path: Path) -> Path:
    np.savez(path / "a.npz", x=np.zeros((100, 10)))
    (path / "a.npz").write_bytes((path / "a.npz").read_bytes()[:-50])
    return path / "a.npz"


def bad_flipped_npz(path: Path) -> Path:
    np.savez(path / "a.npz", x=np.zeros((100, 10)))
    data = bytearray((path / "a.npz").read_bytes())
    data[1000] ^= 255
    (path / "a.npz").write_bytes(data)
    return path / "a.npz"


def bad_truncated_parquet(path: Path) -> Path:
    pq.write_table(pa.table({"x": range(1000)}), path / "a.parquet")
    (path / "a.parquet").write_bytes((path / "a.parquet").read_bytes()[:-50])
    return path / "a.parquet"


def bad_truncated_arrow(path: Path) -> Path:
    write_arrow_file(path / "a.arrow")
    (path / "a.arrow").write_bytes((path / "a.arrow").read_bytes()[:-50])
    return path / "a.arrow"


def bad_truncated_stream(path: Path) -> Path:
    write_arrow_stream(path / "a.arrows")
    (path / "a.arrows").write_bytes((path / "a.arrows").read_bytes()[:-500])
    return path / "a.arrows"


def bad_truncated_csv_gz(path: Path) -> Path:
    lines = np.random.default_rng(0).integers(0, 1 << 40, 400_000)
    text = "x\n" + "\n".join(map(str, lines))
    (path / "a.csv.gz").write_bytes(gzip.compress(text.encode(), 1)[:-1000])
    return path / "a.csv.gz"


def bad_empty(path: Path) -> Path:
    (path / "a.npy").write_bytes(b"")
    return path / "a.npy"


def bad_no_rows(path: Path) -> Path:
    np.save(path / "a.npy", np.zeros((0, 3)))
    return path / "a.npy"


def bad_no_rows_csv(path: Path) -> Path:
    (path / "a.csv").write_text("x,y\n")
    return path / "a.csv"


def bad_no_rows_parquet(path: Path) -> Path:
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), path / "a.parquet")
    return path / "a.parquet"


def bad_scalar(path: Path) -> Path:
    np.save(path / "a.npy", np.float64(3))
    return path / "a.npy"


def bad_object(path: Path) -> Path:
    np.save(path / "a.npy", np.array([{}, None], dtype=object))
    return path / "a.npy"


def bad_complex(path: Path) -> Path:
    np.save(path / "a.npy", np.zeros(3, dtype=complex))
    return path / "a.npy"


def bad_structured(path: Path) -> Path:
    np.save(path / "a.npy", np.zeros(3, dtype=[("a", "i4")]))
    return path / "a.npy"


def bad_uneven_npz(path: Path) -> Path:
    np.savez(path / "a.npz", x=np.zeros(3), y=np.zeros(4))
    return path / "a.npz"


def bad_not_npz(path: Path) -> Path:
    with zipfile.ZipFile(path / "a.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    return path / "a.npz"


def bad_unknown(path: Path) -> Path:
    (path / "a.xyz").write_text("hello")
    return path / "a.xyz"


def bad_missing(path: Path) -> Path:
    return path / "nothing.npy"


def bad_glob(path: Path) -> Path:
    return path / "*.npy"


def bad_folder(path: Path) -> Path:
    (path / "readme.md").write_text("hello")
    return path


def bad_images(path: Path) -> Path:
    for name in ("a.tiff", "b.TIFF", "c.txt"):
        (path / name).touch()
    return path


def bad_fifo(path: Path) -> Path:
    os.mkfifo(path / "a.csv")
    return path / "a.csv"


def bad_utf16_unmarked(path: Path) -> Path:
    (path / "a.csv").write_bytes("x,y\n1,a\n".encode("utf-16-le"))
    return path / "a.csv"


def bad_latin1(path: Path) -> Path:
    (path / "a.csv").write_bytes("x,y\n1,é\n".encode("latin1"))
    return path / "a.csv"


def bad_latin1_late(path: Path) -> Path:
    (path / "a.csv").write_bytes(b"x,y\n" + b"1,e\n" * 40_000 + "1,é\n".encode("latin1"))
    return path / "a.csv"


def bad_png_as_csv(path: Path) -> Path:
    (path / "a.csv").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    return path / "a.csv"


def bad_not_gz(path: Path) -> Path:
    (path / "a.csv.gz").write_bytes(b"x\n1\n")
    return path / "a.csv.gz"


def bad_mixed_shapes(path: Path) -> Path:
    np.save(path / "a.npy", np.zeros((3, 4)))
    np.save(path / "b.npy", np.zeros((3, 5)))
    return path


def bad_mixed_dtypes(path: Path) -> Path:
    np.save(path / "a.npy", np.zeros(3, np.float32))
    np.save(path / "b.npy", np.zeros(3, np.float64))
    return path


def bad_mixed_formats(path: Path) -> Path:
    np.save(path / "a.npy", np.zeros(3))
    (path / "b.csv").write_text("x\n1\n")
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bad_truncated, "truncated"),
        (bad_truncated_npz, "truncated"),
        (bad_flipped_npz, "Bad CRC"),
        (bad_truncated_parquet, "truncated"),
        (bad_truncated_arrow, "truncated"),
        (bad_truncated_stream, "truncated"),
        (bad_truncated_csv_gz, "a.csv.gz.*(T|t)runcated"),
        (bad_empty, "empty"),
        (bad_no_rows, "no rows"),
        (bad_no_rows_csv, "no rows"),
        (bad_no_rows_parquet, "no rows"),
        (bad_scalar, "single value"),
        (bad_object, "Python objects"),
        (bad_complex, "complex128"),
        (bad_structured, "can't hold"),
        (bad_uneven_npz, "same number of rows"),
        (bad_not_npz, r"not a whole \.npy"),
        (bad_unknown, "format .* is unknown.*--format.*Convert files of other formats"),
        (bad_missing, "doesn't exist"),
        (bad_glob, "No file matches"),
        (bad_folder, "holds no file"),
        (bad_images, r"Received: 2 \.tiff, 1 \.txt\. Convert .* --format text"),
        (bad_fifo, "must be a file or a folder. Received: a FIFO"),
        (bad_utf16_unmarked, "must be CSV.*UTF-16 without its mark"),
        (bad_latin1, r"isn't UTF-8 \(.* at byte 6\).*Add --encoding cp1252"),
        (bad_latin1_late, "isn't UTF-8.*Add --encoding cp1252"),
        (bad_png_as_csv, "must be CSV.*binary data"),
        (bad_not_gz, "can't be unpacked"),
        (bad_mixed_shapes, r"a\.npy has x float64\[4\].*b\.npy has x float64\[5\]"),
        (bad_mixed_dtypes, "float32.*float64"),
        (bad_mixed_formats, "several formats: csv, npy"),
    ],
)
def test_bad_sources_say_what_is_wrong(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(SourceError, match=message):
        for source in open_sources(find_sources([str(path)], None), SourceOptions()):
            for _ in source.blocks(1 << 20):
                pass


def test_all_columns_of_types_that_a_cache_cannot_hold_are_named_at_once(tmp_path: Path) -> None:
    table = pa.table(
        {
            "tags": [["a"], ["b", "c"]],
            "n": [1, 2],
            "when": pa.array([0, 1], pa.timestamp("us")),
            "box": [[[{"a": 1}]], [[{"a": 2}]]],
            "name": pa.array(["a", "b"]).dictionary_encode(),
            "mixed": pa.array([{"a": 1}, {"a": 2}]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(SourceError) as caught:
        opened(tmp_path / "a.parquet")
    message = str(caught.value)
    assert "column 'tags' is of type list<element: string>; column 'box' is of type" in message
    assert message.endswith("Add --dtype tags=json --dtype box=json")
    options = SourceOptions(fields=ColumnOptions(dtypes={"tags": "json", "box": "json"}))
    (source,) = open_sources(find_sources([str(tmp_path / "a.parquet")], None), options)
    (block,) = source.blocks(1 << 20)
    values = {name: getattr(each, "to_pylist", each.tolist)() for name, each in block.columns.items()}
    assert values == {
        "tags": ['["a"]', '["b", "c"]'],
        "n": [1, 2],
        "when": [0, 1],
        "box": ['[[{"a": 1}]]', '[[{"a": 2}]]'],
        "name": ["a", "b"],
        "mixed.a": [1, 2],
    }


def test_all_arrays_that_cannot_be_columns_are_named_at_once(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.array([{}], dtype=object), b=np.zeros(1, complex), c=np.zeros(1))
    with pytest.raises(
        SourceError, match=r"(?s)column 'a' holds Python objects.*column 'b' has dtype complex"
    ):
        opened(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "A SOURCE is a file, a folder or a glob.*Received: ''"),
        (
            "nosuch://bucket/a.parquet?key=secret",
            r"a URL that fsspec knows.*Received: nosuch://bucket/a.parq",
        ),
        ("memory://a.csv::memory://b.zip", "A URL names a file alone"),
        ("/dev/zero", "must be a file or a folder. Received: a device"),
    ],
)
def test_what_is_no_local_file_is_named(source: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        find_sources([source], "csv")


def test_a_csv_may_hold_bytes_0_below_its_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"x,t\n1,a\0b\n")
    (block,) = opened(tmp_path / "a.csv").blocks(1 << 20)
    assert block.columns["t"].to_pylist() == ["a\0b"]


def test_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="npy, npz, parquet, csv, arrow"):
        find_sources(["x"], "tsv")


def test_folders_globs_and_files_give_each_file_once_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "_tmp").mkdir()
    for name in ("b.npy", "a.npy", "deep/c.npy", ".hidden.npy", "_tmp/d.npy"):
        np.save(tmp_path / name, np.zeros(1))
    given = [str(tmp_path / "b.npy"), str(tmp_path), str(tmp_path / "*.npy")]
    assert [path.name for path, _ in find_sources(given, None)] == ["a.npy", "b.npy", "c.npy"]


def test_links_keep_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "links").mkdir()
    np.save(tmp_path / "blobs" / "0123.npy", np.zeros(1))
    (tmp_path / "blobs" / "0123.npy").rename(tmp_path / "blobs" / "0123")
    (tmp_path / "links" / "cat.npy").symlink_to(tmp_path / "blobs" / "0123")
    ((path, kind),) = find_sources([str(tmp_path / "links")], None)
    assert (stem(path), kind) == ("cat", "npy")


def test_wide_text_makes_small_blocks(tmp_path: Path) -> None:
    texts = pa.table({"t": ["x" * 10_000] * 100})
    pq.write_table(texts, tmp_path / "a.parquet", use_dictionary=False)
    pa.feather.write_feather(texts, str(tmp_path / "b.feather"), compression="uncompressed")
    np.save(tmp_path / "c.npy", np.array(["x" * 10_000] * 100))
    for name in ("a.parquet", "b.feather", "c.npy"):
        assert max(block.rows for block in opened(tmp_path / name).blocks(100_000)) <= 10


def test_format_overrules_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\n1\n")
    (source,) = open_sources(find_sources([str(tmp_path / "a.txt")], "csv"), SourceOptions())
    assert source.columns == (Column("x", "int64"),)


def test_format_says_what_numbered_files_of_a_folder_are(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "labels.md", "README"):
        np.save(tmp_path / "a.npy", np.arange(3))
        (tmp_path / "a.npy").rename(tmp_path / name)
    found = find_sources([str(tmp_path)], "npy")
    assert [path.name for path, _ in found] == ["train-00000-of-00002", "train-00001-of-00002"]
    with pytest.raises(SourceError, match="holds no file that ends in"):
        find_sources([str(tmp_path)], None)


def test_stem_drops_the_whole_suffix() -> None:
    assert [stem(Path(name)) for name in ("cat.npy", "a.b.csv.gz", "x.txt")] == ["cat", "a.b", "x"]
