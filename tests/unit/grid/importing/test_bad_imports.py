"""Three hundred imports that can't work: each ends with one clear error, and leaves nothing."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from record_writer import encode_example, frame

from insitu.base.errors import InsituError
from insitu.base.paths import Paths
from insitu.grid import Catalog, import_cache

ROWS = 200
TABLE = pa.table(
    {"id": range(ROWS), "x": [i / 2 for i in range(ROWS)], "name": [f"näme {i}" for i in range(ROWS)]}
)


def write_parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(TABLE, sink, row_group_size=50)
    return sink.getvalue()


def write_arrow() -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=50)
    return sink.getvalue()


def write_csv() -> bytes:
    sink = io.BytesIO()
    pa_csv.write_csv(TABLE, sink)
    return sink.getvalue()


def write_lines() -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in TABLE.to_pylist())


def write_npy() -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.arange(ROWS * 3).reshape(ROWS, 3))
    return sink.getvalue()


def write_npz() -> bytes:
    sink = io.BytesIO()
    np.savez(sink, a=np.arange(ROWS), b=np.ones((ROWS, 2)))
    return sink.getvalue()


def write_records() -> bytes:
    return b"".join(frame(encode_example({"id": ("int64", [row])})) for row in range(ROWS))


WRITERS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "parquet": (".parquet", write_parquet),
    "arrow": (".arrow", write_arrow),
    "csv": (".csv", write_csv),
    "packed csv": (".csv.gz", lambda: gzip.compress(write_csv())),
    "ndjson": (".jsonl", write_lines),
    "packed ndjson": (".jsonl.gz", lambda: gzip.compress(write_lines())),
    "npy": (".npy", write_npy),
    "npz": (".npz", write_npz),
    "tfrecord": (".tfrecord", write_records),
}
TEXTS = ("csv", "ndjson")

BAD_OPTIONS: list[dict[str, Any]] = [
    *(
        {name: [value]}
        for name in ("columns", "without", "drop_nulls", "ragged")
        for value in ("nope", "", "ID", "näm")
    ),
    *({"rename": [value]} for value in ("nope=a", "id=x", "id=", "=a", "id")),
    *(
        {"dtype": [value]}
        for value in ("nope=int8", "id=int", "id=", "name=int64", "id=int8", "x=int64", "name=%Y")
    ),
    *({"dtype": [value]} for value in ("id=%Q", "name=timestamp", "name=bool", "x=uint8", "id=date")),
    *(
        {"fill": [value]}
        for value in ("nope=1", "id=a", "id=1.5", "x=", "id", "=1", "name=mean", "id=99999999999999999999")
    ),
    *(
        {"where": value}
        for value in ("nope > 1", "id >", "id", "name > 1", "exec('1')", "id > [1]", "", "1 > 0", "id in 3")
    ),
    *({"where": value} for value in ("id > 1e9", "name == 'nobody'", "x is None")),  # no row is left
    *(
        {"tensor": [value]}
        for value in ("id=uint8[2]", "nope=uint8[2]", "id", "id=object[1]", "name=uint8[3]", "x=uint8[0]")
    ),
    *({"limit": value} for value in (0, -1)),
    *({"sample": value} for value in (0.0, -1.0, 1.5, float("nan"))),
    *({"row_id": value} for value in ("id", "")),
    *({"key": value} for value in ("nope", "x")),
    *({"split": value} for value in ({}, {"a": 0.5}, {"a": 2.0, "b": -1.0}, {"a/..": 0.5, "b": 0.5})),
    *({"partitions": value} for value in (0, -3, 10**7)),
    *({"backups": value} for value in (1, -1)),
    *({"features": "id:int64"}, {"render": 28}, {"column": "y"}, {"compress": "gzip"}, {"format": "xml"}),
    *({"arrow": ["id"]}, {"table_version": "1"}, {"sql": "select 1"}, {"read_on": "nodes"}, {"append": True}),
    *(
        {"rename": ["id=a", "x=a"]},
        {"rename": ["id=a", "id=b"]},
        {"fill": ["id=1", "id=2"]},
        {"key": "id", "append": True},
    ),
    {"format": "npy"},
    {"format": "ndjson"},
]
BAD_CSV_OPTIONS: list[dict[str, Any]] = [
    *({"delimiter": value} for value in ("", ";;", "\n", '"', "é")),
    *({"encoding": value} for value in ("nope", "utf-32", "base64")),
    *({"quote": value} for value in ("''", "\n")),
    *({"null_values": value} for value in (("näme 3",), ("7",))),
]


def make_cases() -> Iterator[tuple[str, dict[str, bytes], dict[str, Any]]]:
    """Yield (name, files, options) of each import."""
    for name, (suffix, write) in WRITERS.items():
        data = write()
        for part in (0, 1, 4, 12, len(data) // 4, len(data) // 2, len(data) - 9):
            if name not in TEXTS or part < 12:  # a text that is cut between rows is whole
                yield f"{name} of {part} bytes", {f"a{suffix}": data[:part]}, {}
        yield f"{name} of zeros", {f"a{suffix}": bytes(len(data))}, {}
        yield f"{name} of noise", {f"a{suffix}": np.random.default_rng(1).bytes(len(data))}, {}
        others = [other for other in WRITERS if WRITERS[other][0] != suffix and other != name]
        for other in others:
            yield f"{other} as {name}", {f"a{suffix}": WRITERS[other][1]()}, {}
        yield (
            f"{name} beside another format",
            {f"a{suffix}": data, "b.xml": b"<a/>", "c.npy" if suffix != ".npy" else "c.csv": b"x"},
            {},
        )
        yield (
            f"a damaged {name} beside a whole one",
            {f"a{suffix}": data, f"b{suffix}": data[: len(data) // 3] + b"\xff" * 40},
            {},
        )
    for options in BAD_OPTIONS:
        yield f"parquet with {options}", {"a.parquet": write_parquet()}, options
    for options in BAD_CSV_OPTIONS:
        yield f"csv with {options}", {"a.csv": write_csv()}, options
    for name in ("a\nb.csv", "a b.csv", "é.csv", "'.csv", "$(x).csv", "-x.csv"):
        yield f"a file called {name!r}", {name: b"id,x\n1\n2,3\n"}, {}
    nested: Any = 1
    for _ in range(70):
        nested = [nested]
    for text in (
        *(
            b'{"a": ' + json.dumps(nested).encode() + b"}\n",
            b'{"a": 1}\n{"b": 2}\n',
            b'{"a": 1}\n{"a": [1]}\n',
            b"[]\n",
        ),
        *(
            b"{}\n",
            b"\xef\xbb\xbf\n",
            b'{"a": tru}\n',
            b'{"a": {}}\n',
            b'{"a": null}{"a": \n',
            b"null\n",
            b'{"a": 1} trailing\n',
            b'{"a": 1, "a": 2}\n{"b"\n',
        ),
    ):
        yield f"the lines {text[:30]!r}", {"a.jsonl": text}, {}
    for text in (
        *(
            b"a,b\n",
            b"\n\n",
            b"a,a\n1,2\n3,4,5\n",
            b"a,b\n1\n",
            b"a,b\n1,2,3\n",
            b'a,b\n"1,2\n',
            b"a,b\n1,\xff\n",
            b"a\0b\n1\n",
        ),
        *(b"\xff\xfea\x00", b"1,2\n3,4\n", b'{"a": 1}\n{"a": 2}\n', b"[[1, 2], [3, 4]]\n", b"a;b\n1,5;1.5\n"),
    ):
        yield f"the text {text!r}", {"a.csv": text}, {}


CASES = list(make_cases())


def test_there_are_three_hundred() -> None:
    assert len(CASES) >= 300


def list_left(paths: Paths) -> list[Path]:
    """Return what an import has left in a home, but for empty folders and what every home has."""
    kept = ("catalog.sqlite", "topology.json", "store.json", "store-id", "locks")
    found = itertools.chain(paths.staging.rglob("*"), paths.nodes.rglob("*"))
    return [path for path in found if path.is_file() and not any(name in str(path) for name in kept)]


@pytest.mark.parametrize(
    ("name", "files", "options"), CASES, ids=[case[0].replace("\0", "0")[:60] for case in CASES]
)
def test_a_bad_import_is_refused(
    tmp_path: Path, name: str, files: dict[str, bytes], options: dict[str, Any]
) -> None:
    folder, paths = tmp_path / "data", Paths(tmp_path / "home")
    folder.mkdir()
    for each, data in files.items():
        (folder / each).write_bytes(data)
    source = str(folder / next(iter(files))) if len(files) == 1 else str(folder)
    with pytest.raises(InsituError) as caught:
        import_cache(paths, "a", [source], **options)
    message = str(caught.value)
    assert 20 < len(message) < 3000 and "Traceback" not in message and "<" not in message[:1], message
    assert str(folder) in message or any(
        word in message for word in ("--", "Received", "a would have none", "No cache is called")
    ), message
    assert not list(Catalog(paths).caches()) and not list_left(paths)
