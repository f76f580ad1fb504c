"""Shuffled batches of 256 rows of 784 bytes with an int64 label: insitu compared with common readers.

    python benchmarks/read_speed.py [--quick] [--json FILE]

All read the same rows in one process, one epoch a round, in turn, from files in the page cache:

    bare np.take      rows of one array in memory in random order: the speed of the memory, without a reader
    insitu            insitu.dataset(...).shuffle().batch(256), from one partition and from eight
    torch DataLoader  a TensorDataset in memory, shuffle=True, batch_size=256, no workers
    tf.data           a TFRecord file, parsed row by row, shuffle(10_000).batch(256), prefetched
    Ray Data          iter_batches(batch_size=256, local_shuffle_buffer_size=10_000) over Parquet

Only insitu and torch shuffle all rows. The other two shuffle within a buffer, as they are usually used. A
library that is not installed is named in the table. The figure is rows per second. A warm-up epoch is not
counted.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np

ROW_BYTES = 784
BATCH = 256


def make_rows(count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 255, (count, ROW_BYTES), dtype=np.uint8), rng.integers(0, 10, count)


def epoch_speed(rows: int, batches: Callable[[], Iterable[Any]], length: Callable[[Any], int]) -> float:
    """Rows per second of one epoch. Raises RuntimeError unless it has all rows."""
    seen = 0

    def run() -> None:
        nonlocal seen
        for batch in batches():
            seen += length(batch)

    seconds = common.timed(run)
    if seen != rows:
        raise RuntimeError(f"an epoch of {seen} rows, expected {rows}")
    return rows / seconds


def insitu_reader(source: Path, home: Path, rows: int, partitions: int) -> Callable[[], float]:
    from insitu.base.context import Context
    from insitu.base.paths import Paths
    from insitu.grid import dataset, import_cache

    paths, name = Paths(home), f"rows{partitions}"
    import_cache(paths, name, [str(source)], partitions=partitions)
    data = dataset(name, context=Context(paths=paths)).shuffle(0).batch(BATCH)
    return lambda: epoch_speed(rows, lambda: data, lambda batch: len(batch[1]))


def bare_take(x: Any, y: Any) -> Callable[[], float]:
    rng = np.random.default_rng(1)

    def batches() -> Iterator[Any]:
        order = rng.permutation(len(y))
        for start in range(0, len(y), BATCH):
            rows = order[start : start + BATCH]
            yield np.take(x, rows, axis=0), np.take(y, rows)

    return lambda: epoch_speed(len(y), batches, lambda batch: len(batch[1]))


def torch_reader(x: Any, y: Any) -> Callable[[], float]:
    try:
        import torch
    except ImportError as error:
        return missing(f"torch is not installed ({error})")
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(
        TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=BATCH, shuffle=True
    )
    return lambda: epoch_speed(len(y), lambda: loader, lambda batch: len(batch[1]))


def tfrecord_reader(x: Any, y: Any, path: Path) -> Callable[[], float]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ImportError as error:
        return missing(f"tensorflow is not installed ({error})")

    with tf.io.TFRecordWriter(str(path)) as writer:
        for row, label in zip(x, y, strict=True):
            features = {
                "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[row.tobytes()])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(label)])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    form = {"x": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def parse(record: Any) -> Any:
        parsed = tf.io.parse_single_example(record, form)
        return tf.io.decode_raw(parsed["x"], tf.uint8), parsed["label"]

    def batches() -> Iterator[Any]:
        data = (
            tf.data.TFRecordDataset(str(path)).shuffle(10_000).map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        )
        yield from data.batch(BATCH).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

    return lambda: epoch_speed(len(y), batches, lambda batch: len(batch[1]))


def ray_reader(x: Any, y: Any, path: Path) -> Callable[[], float]:
    try:
        import ray
    except ImportError as error:
        return missing(f"ray is not installed ({error}): pip install 'ray[data]'")
    import pyarrow as pa
    import pyarrow.parquet as pq

    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), ROW_BYTES)
    pq.write_table(pa.table({"x": lists, "label": y}), path, row_group_size=10_000)
    with contextlib.redirect_stdout(sys.stderr):
        ray.init(num_cpus=os.cpu_count(), log_to_driver=False, include_dashboard=False)
        data = ray.data.read_parquet(str(path)).materialize()

    def batches() -> Iterator[Any]:
        yield from data.iter_batches(batch_size=BATCH, local_shuffle_buffer_size=10_000)

    return lambda: epoch_speed(len(y), batches, lambda batch: len(batch["label"]))


def missing(why: str) -> Callable[[], float]:
    def run() -> float:
        raise common.Unavailable(why)

    return run


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument(
        "--rows", type=int, default=None, help="rows of an epoch (300000; 10000 with --quick)"
    )
    options = parser.parse_args()
    rows = options.rows or (10_000 if options.quick else 300_000)
    machine = common.machine()
    x, y = make_rows(rows)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "rows.npz"
        np.savez(source, x=x, label=y)
        common.say(f"making {rows:,} rows for each reader")
        contenders = {
            "bare np.take": bare_take(x, y),
            "insitu, 1 partition": insitu_reader(source, Path(folder) / "home", rows, 1),
            "insitu, 8 partitions": insitu_reader(source, Path(folder) / "home", rows, 8),
            "torch DataLoader": torch_reader(x, y),
            "tf.data from TFRecord": tfrecord_reader(x, y, Path(folder) / "rows.tfrecord"),
            "Ray Data iter_batches": ray_reader(x, y, Path(folder) / "rows.parquet"),
        }
        rounds = options.rounds or (1 if options.quick else 3)
        results = common.alternate(contenders, "rows/s", rounds, warm_up=0 if options.quick else 1)
    print(common.machine_line(machine) + "\n")
    print(common.results_table(results, "insitu, 1 partition", form="{:,.0f}".format))
    common.save_json(options.json, "read_speed", machine, rows=rows, results=common.results_json(results))


if __name__ == "__main__":
    main()
