"""Reads one data set for some seconds in one way, and prints {"first", "rows", "seconds", "waiting"} as JSON.

Arguments: WAY SPEC, with SPEC as JSON:

    files      the files to read, for every way but insitu and job
    home, cache, options, batch   for insitu: the home, the cache, arguments of shuffle, the batch
    seconds    how long to read after the first batch
    row_bytes, header_bytes       of raw records
    step       seconds of computing that follow each batch; 0: none

`first` is the time to the first batch, without the import of libraries. `rows` came in the `seconds` after
it. `waiting` is the part of these in which the next batch was waited for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PIECE = 4 << 20


def read_disk(spec: dict[str, Any]) -> Iterator[int]:
    """Yield bytes, piece by piece, in the order of the files."""
    room = memoryview(bytearray(PIECE))
    for name in spec["files"]:
        descriptor = os.open(name, os.O_RDONLY)
        offset = 0
        while size := os.preadv(descriptor, [room], offset):
            offset += size
            yield size
        os.close(descriptor)


def read_insitu(spec: dict[str, Any]) -> Iterator[int]:
    """Yield the rows of each batch of an epoch."""
    from insitu.base.context import Context
    from insitu.base.paths import Paths
    from insitu.grid import dataset

    yield 0
    shards, own = spec.get("shards", 1), spec.get("shard", 0)
    context = Context(paths=Paths(Path(spec["home"])), shards=(own,), num_shards=shards)
    data = dataset(spec["cache"], context=context, label=None)
    if spec.get("options") is not None:
        data = data.shuffle(0, **spec["options"])
    data = data.batch(spec["batch"])
    start = int(spec.get("place", 0.0) * data.num_steps)
    for batch in data.shard_batches(own, spec.get("epoch", 0), start):
        yield batch.rows


def read_tensorflow(spec: dict[str, Any]) -> Iterator[int]:
    """Yield the rows of each batch of tf.data, which reads raw records and mixes them in a buffer."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import tensorflow as tf

    yield 0
    files = tf.data.Dataset.from_tensor_slices(spec["files"]).shuffle(len(spec["files"]))
    records = files.interleave(
        lambda name: tf.data.FixedLengthRecordDataset(
            name, spec["row_bytes"], header_bytes=spec["header_bytes"], buffer_size=PIECE
        ),
        cycle_length=4,
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    batches = records.shuffle(100_000).batch(spec["batch"])
    decoded = batches.map(lambda raw: tf.io.decode_raw(raw, tf.uint8)).prefetch(tf.data.AUTOTUNE)
    for batch in decoded.as_numpy_iterator():
        yield len(batch)


def read_ray(spec: dict[str, Any]) -> Iterator[int]:
    """Yield the rows of each batch of Ray Data, from Parquet, mixed in a buffer."""
    import ray

    ray.init(num_cpus=os.cpu_count(), log_to_driver=False, include_dashboard=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield 0
    data = ray.data.read_parquet(spec["files"])
    for batch in data.iter_batches(batch_size=spec["batch"], local_shuffle_buffer_size=100_000):
        yield len(batch["x"])


def read_parquet(spec: dict[str, Any]) -> Iterator[int]:
    """Yield the rows of each record batch that pyarrow reads."""
    import pyarrow.parquet as parquet

    yield 0
    for name in spec["files"]:
        for batch in parquet.ParquetFile(name).iter_batches(spec["batch"]):
            yield batch.num_rows


def read_csv(spec: dict[str, Any]) -> Iterator[int]:
    """Yield the rows of each record batch that pyarrow reads."""
    import pyarrow.csv as csv

    yield 0
    for name in spec["files"]:
        for batch in csv.open_csv(name, csv.ReadOptions(block_size=8 << 20)):
            yield batch.num_rows


WAYS = {
    "disk": read_disk,
    "insitu": read_insitu,
    "tensorflow": read_tensorflow,
    "ray": read_ray,
    "parquet": read_parquet,
    "csv": read_csv,
}


def make_step(seconds: float) -> Any:
    """Return a function that computes for so long without the interpreter's lock, as a step of Keras does."""
    import numpy as np

    numbers = np.ones(1 << 16)

    def run() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            np.sqrt(numbers, out=numbers)

    return run if seconds else (lambda: None)


def main() -> None:
    spec = json.loads(sys.argv[2])
    step, batches = make_step(spec.get("step", 0.0)), WAYS[sys.argv[1]](spec)
    pending = next(batches) if sys.argv[1] != "disk" else 0  # libraries are loaded
    started = time.perf_counter()
    next(batches)
    first = time.perf_counter() - started
    rows, waiting = pending, 0.0
    now = begun = time.perf_counter()
    end = begun + spec["seconds"]
    while now < end:
        asked = now
        got = next(batches, 0)
        waiting += time.perf_counter() - asked
        if not got:
            break
        rows += got
        step()
        now = time.perf_counter()
    seconds = time.perf_counter() - begun
    print(json.dumps({"first": first, "rows": rows, "seconds": seconds, "waiting": waiting}), flush=True)
    os._exit(0)  # whatever still reads ahead


if __name__ == "__main__":
    main()
