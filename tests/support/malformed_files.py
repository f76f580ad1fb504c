"""Files of each format that `insitu import` reads, and readers that use all that they hold.

Used by the property tests and by the coverage-guided fuzzers.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from image_files import encode, make_image
from record_writer import encode_example, frame

from insitu.base.errors import SourceError
from insitu.grid.intake.source_blocks import read_blocks
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


RECORD_FEATURES = "raw:uint8[6],number:int64,values:float32[2],ids:int32[*],text:str"


def make_records() -> list[bytes]:
    """Return records of tf.train.Example with the features that RECORD_FEATURES names."""
    return [
        encode_example(
            {
                "raw": ("bytes", [bytes(range(i, i + 6))]),
                "number": ("int64", [i * 100 - 50]),
                "values": ("float", [i / 2, 1.0]),
                "ids": ("int64", [i, 300] * (i % 3)),
                "text": ("bytes", [f"t{i} \u00e9".encode()]),
            }
        )
        for i in range(ROWS)
    ]


def write_tfrecord(records: list[bytes] | None = None) -> bytes:
    return b"".join(map(frame, make_records() if records is None else records))


def write_ndjson() -> bytes:
    drawing = [[[0, 9, 255], [1, 2, 3]], [[4], [5]]]
    rows = [
        {"i": i, "x": None if i % 5 == 0 else i / 2, "t": f"t {i}", "v": [i, 1], "drawing": drawing[: i % 3]}
        for i in range(ROWS)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_lines() -> bytes:
    return "".join(f"text {i} \u00e9\n" for i in range(ROWS)).encode()


def pack_zst(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(data)
    return bytes(sink.getvalue())


def write_samples() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for i in range(ROWS):
            members = {
                "png": encode(make_image(i, (6, 4))),
                "cls": str(i % 3).encode(),
                "json": json.dumps({"i": i, "t": {"v": [i, 1]}}).encode(),
                "npy": write_npy(np.array([i, 2])),
            }
            for kind, data in members.items():
                info = tarfile.TarInfo(f"{i:03}.{kind}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def write_images() -> bytes:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    formats = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
    rows = [{"bytes": encode(make_image(i, (6, 4)), formats[i % 5]), "path": f"{i}"} for i in range(ROWS)]
    sink = io.BytesIO()
    pq.write_table(pa.table({"image": pa.array(rows, kind)}), sink, row_group_size=25)
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
        "rows.tfrecord": write_tfrecord(),
        "packed.tfrecord.gz": gzip.compress(write_tfrecord(), mtime=0),
        "lines.ndjson": write_ndjson(),
        "packed.ndjson.gz": gzip.compress(write_ndjson(), mtime=0),
        "lines.txt": write_lines(),
        "packed.txt.zst": pack_zst(write_lines()),
        "packed.txt.bz2": bz2.compress(write_lines()),
        "samples.tar": write_samples(),
        "packed.tar.gz": gzip.compress(write_samples(), mtime=0),
        "images.parquet": write_images(),
    }


def format_of(name: str) -> str:
    for packing in (".gz", ".zst", ".bz2"):
        name = name.removesuffix(packing)
    suffix = name.rpartition(".")[2]
    return {"arrows": "arrow", "txt": "text", "tar": "webdataset"}.get(suffix, suffix)


def read_all(path: Path, format: str) -> int:
    """Use every value of a source as an import does. Returns its rows, -1 for a file that is refused."""
    images = SourceOptions(images=(4, 6, 3))
    options = {
        "tfrecord": [SourceOptions(features=RECORD_FEATURES)],
        "ndjson": [SourceOptions(render=8)],
        "webdataset": [images],
        "parquet": [images, SourceOptions()],  # a size is refused for a table without images
    }.get(format, [SourceOptions()])
    return max(_read(path, format, each) for each in options)


def _read(path: Path, format: str, options: SourceOptions) -> int:
    rows = 0
    try:
        for source in open_sources([(path, format)], options):
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
