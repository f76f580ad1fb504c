"""Files of each format that `insitu import` reads, and readers that use all that they hold.

Used by the property tests and by the coverage-guided fuzzers.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from insitu.errors import SourceError
from insitu.grid.source_blocks import read_blocks
from insitu.grid.sources import open_sources
from insitu.grid.sources.base import SourceOptions

ROWS = 40


def table() -> pa.Table:
    """A table with a column of each kind that a cache holds."""
    texts = [f"text {i} \u00e9" for i in range(ROWS)]
    return pa.table(
        {
            "number": pa.array(range(ROWS), pa.int32()),
            "text": pa.array(texts),
            "large": pa.array(texts, pa.large_string()),
            "view": pa.array(texts, pa.string_view()),
            "word": pa.array([f"w{i % 3}" for i in range(ROWS)]).dictionary_encode(),
            "list": pa.array([[i, i + 1] for i in range(ROWS)], pa.list_(pa.int64())),
            "nested": pa.array([[[1.0, i], [2.0, i]] for i in range(ROWS)]),
            "fixed": pa.array([[i, 1, 2] for i in range(ROWS)], pa.list_(pa.int16(), 3)),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((ROWS, 2, 2), np.float32)),
            "flag": pa.array([i % 2 == 0 for i in range(ROWS)]),
            "gap": pa.array([None if i % 5 == 0 else float(i) for i in range(ROWS)]),
        }
    )


def write_ipc(stream: bool, compression: str | None = None) -> bytes:
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, table().schema, options=options) as writer:
        for batch in table().to_batches(max_chunksize=25):
            writer.write_batch(batch)
    return sink.getvalue()


def write_parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(table().drop_columns(["view"]), sink, row_group_size=25)
    return sink.getvalue()


def write_csv() -> bytes:
    lines = ["number,text,flag,gap"]
    lines += [
        f'{i},"text, {i}",{"true" if i % 2 else "false"},{"" if i % 5 == 0 else i / 2}' for i in range(ROWS)
    ]
    return ("\n".join(lines) + "\n").encode()


def write_npy(array: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array)
    return sink.getvalue()


def write_npz(save: Callable[..., None]) -> bytes:
    sink = io.BytesIO()
    texts = np.array([f"t{i}" for i in range(ROWS)])
    save(sink, a=np.arange(ROWS * 3.0).reshape(ROWS, 3), f=np.asfortranarray(np.ones((ROWS, 4))), t=texts)
    return sink.getvalue()


def make_files() -> dict[str, bytes]:
    """Return whole files by name; the suffix says the format."""
    return {
        "file.arrow": write_ipc(stream=False),
        "packed.arrow": write_ipc(stream=False, compression="lz4"),
        "stream.arrows": write_ipc(stream=True),
        "table.parquet": write_parquet(),
        "table.csv": write_csv(),
        "table.csv.gz": gzip.compress(write_csv(), mtime=0),
        "rows.npy": write_npy(np.arange(ROWS * 6, dtype=">i4").reshape(ROWS, 6)),
        "columns.npy": write_npy(np.asfortranarray(np.arange(ROWS * 6.0).reshape(ROWS, 2, 3))),
        "text.npy": write_npy(np.array([f"t{i}" for i in range(ROWS)])),
        "plain.npz": write_npz(np.savez),
        "packed.npz": write_npz(np.savez_compressed),
    }


def format_of(name: str) -> str:
    return {"arrows": "arrow", "gz": "csv"}.get(name.rpartition(".")[2], name.rpartition(".")[2])


def read_all(path: Path, format: str) -> int:
    """Use every value of a source as an import does. Returns its rows, -1 for a file that is refused."""
    rows = 0
    try:
        for source in open_sources([(path, format)], SourceOptions()):
            for block in read_blocks(source, 8 << 20):
                rows += block.rows
                for values in block.columns.values():
                    if isinstance(values, np.ndarray):
                        np.take(values, np.arange(len(values))[::-1], axis=0).tobytes()
                    else:
                        values.take(pa.array(range(len(values) - 1, -1, -1))).to_pylist()
    except SourceError:
        return -1
    return rows
