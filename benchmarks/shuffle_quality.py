"""How well orders of rows mix data that is stored sorted by class, and what that does to a training.

    python benchmarks/shuffle_quality.py [--json FILE] [--plot docs/explanations/shuffle_quality.svg]

The geometry is that of 46 million rows of 784 bytes (36 GB), in which a window of 128 MiB has 128 blocks of
1,337 rows, scaled down to `--rows` rows: blocks and the buffer of tf.data are smaller by the same factor, so
that each sees the same share of the data. Rows are Quick, Draw! bitmaps (by default in the folder that
the environment variable DATA names; else scikit-learn's digits), ten classes, repeated with noise, sorted
by class. Orders, one epoch each:

    as stored      no shuffle
    tf.data        Dataset.shuffle with a buffer of 100,000 of 46 million rows, over the rows as stored
    insitu         blocks in a random order, the rows of a window of 128 blocks mixed
    full           every order equally likely (exact=True)

For each: the correlation of the stored places of rows that follow each other; the mean distance of these
places, in shares of all rows (a third when full); how much the share of a class in 256 rows in a row, and in
16 times as many, differs from what it is on average, compared with a full shuffle (1 is as good); the
accuracy on rows held out of a network (64 hidden units, Adam) that was trained for one epoch in this order,
the mean and the range over seeds.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np

FULL_ROWS, BLOCK_ROWS, WINDOW_BLOCKS, BUFFER_ROWS = 46_000_000, 1337, 128, 100_000
PARTITIONS, BATCH, CLASSES = 8, 256, 10
LONG = 16
"""Batches over which the slow drift of classes is measured."""


def load(folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (float32[n, pixels] in [0, 1], int64[n] classes) of ten classes."""
    if folder is not None:
        parts = [np.load(path) for path in sorted(folder.glob("*.npy"))[:CLASSES]]
        x = np.concatenate(parts).astype(np.float32) / 255
        return x, np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)


def make_rows(x: np.ndarray, y: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` rows, repeated with noise, sorted by class."""
    rng = np.random.default_rng(0)
    chosen = np.sort(rng.integers(0, CLASSES, count))
    of_class = [np.flatnonzero(y == label) for label in range(CLASSES)]
    rows = np.concatenate([rng.choice(of_class[c], int((chosen == c).sum())) for c in range(CLASSES)])
    noise = rng.integers(0, 32, (4096, x.shape[1])).astype(np.float32) / 255
    values = x[rows]
    for start in range(0, count, len(noise)):
        values[start : start + len(noise)] += noise[: len(values[start : start + len(noise)])]
    return values, chosen


def stored_places(count: int) -> tuple[np.ndarray, list[int]]:
    """Return the place in the sources of each row by its position in a cache, and the partitions' starts."""
    from insitu.grid.layout import hash_rows, partition_of_rows

    partitions = partition_of_rows(hash_rows(0, count), PARTITIONS)
    counts = np.bincount(partitions, minlength=PARTITIONS)
    return np.argsort(partitions, kind="stable"), [0, *np.cumsum(counts).tolist()]


def windowed(count: int, seed: int) -> np.ndarray:
    from insitu.grid.layout import WindowedOrder

    places, starts = stored_places(count)
    block_rows = max(1, round(BLOCK_ROWS * count / FULL_ROWS))
    order = WindowedOrder(starts, block_rows, WINDOW_BLOCKS, seed=seed, epoch=0, shard=0)
    return places[order[0:count]]


def buffered(count: int, seed: int) -> np.ndarray:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import tensorflow as tf

    buffer = max(1, round(BUFFER_ROWS * count / FULL_ROWS))
    rows = tf.data.Dataset.range(count).shuffle(buffer, seed=seed).batch(1 << 16)
    return np.concatenate(list(rows.as_numpy_iterator()))


def full(count: int, seed: int) -> np.ndarray:
    from insitu.grid.layout import shuffled

    return shuffled(count, seed, 0, 0).astype(np.int64)


ORDERS: dict[str, Callable[[int, int], np.ndarray]] = {
    "as stored": lambda count, seed: np.arange(count),
    "tf.data": buffered,
    "insitu": windowed,
    "full": full,
}


def class_shares(order: np.ndarray, y: np.ndarray, rows: int) -> np.ndarray:
    """Return the share of class 0 in each piece of `rows` rows in a row."""
    labels = y[order[: len(order) // rows * rows]].reshape(-1, rows)
    return (labels == 0).mean(axis=1)


def measure_mixing(order: np.ndarray, y: np.ndarray) -> dict[str, float]:
    count = len(order)
    steps = np.abs(np.diff(order)) / count
    # Of rows drawn at random, without putting them back.
    share = float((y == 0).mean())

    def spread(rows: int) -> float:
        expected = np.sqrt(share * (1 - share) / rows * (1 - rows / count))
        return float(np.sqrt(np.mean((class_shares(order, y, rows) - share) ** 2)) / expected)

    return {
        "correlation": float(np.corrcoef(order[:-1], order[1:])[0, 1]),
        "distance": float(steps.mean()),
        "batch_spread": spread(BATCH),
        "long_spread": spread(LONG * BATCH),
    }


def train(x: np.ndarray, y: np.ndarray, order: np.ndarray, held_out: Any, seed: int) -> float:
    """Return the accuracy on the rows held out, after an epoch in this order."""
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((x.shape[1],)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    # Piece by piece, since a copy of all rows in the new order may not fit into memory.
    piece = 200 * BATCH
    for start in range(0, len(order), piece):
        chosen = order[start : start + piece]
        model.fit(x[chosen], y[chosen], batch_size=BATCH, shuffle=False, verbose=0)
    return float(model.evaluate(*held_out, batch_size=4096, verbose=0)[1])


def plot(target: Path, orders: dict[str, np.ndarray], y: np.ndarray, accuracy: dict[str, Any]) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(f"--plot needs matplotlib ({error}): pip install matplotlib") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "insitu"
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    shares = np.linspace(0, 1, 101)
    for name, order in orders.items():
        distances = np.sort(np.abs(np.diff(order)) / len(order))
        left.plot(np.quantile(distances, shares), shares, label=name)
        drift = class_shares(order, y, LONG * BATCH)
        middle.plot(np.linspace(0, 1, len(drift)), drift, label=name, linewidth=1)
    left.set(title="Distance of rows that follow each other", xlabel="share of all rows", ylabel="up to it")
    middle.set(title=f"Share of class 0 in {LONG * BATCH:,} rows", xlabel="share of the epoch", ylim=(0, 0.5))
    left.legend()
    names = list(accuracy)
    right.bar(names, [statistics.mean(accuracy[name]) for name in names], color="tab:gray")
    for number, name in enumerate(names):
        right.plot([number] * len(accuracy[name]), accuracy[name], "k.", markersize=4)
    right.set(title="Accuracy after one epoch", ylim=(0, 1))
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=None, help="460000; 20000 with --quick")
    parser.add_argument("--data", type=Path, default=common.DRAWINGS, metavar="FOLDER", help="a .npy a class")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help="write a plot there")
    options = parser.parse_args()
    machine = common.machine()
    rows = options.rows or (20_000 if options.quick else 460_000)
    seeds = options.rounds or (1 if options.quick else 3)
    folder = options.data if options.data.is_dir() else None
    source_x, source_y = load(folder)
    kept = np.random.default_rng(9).permutation(len(source_x))
    held_out = (source_x[kept[: len(kept) // 10]], source_y[kept[: len(kept) // 10]])
    rest = kept[len(kept) // 10 :]
    x, y = make_rows(source_x[rest], source_y[rest], rows)
    mixing: dict[str, dict[str, float]] = {}
    accuracy: dict[str, list[float]] = {}
    for name, make in ORDERS.items():
        common.say(f"  {name}")
        mixing[name] = measure_mixing(make(rows, 0), y)
        accuracy[name] = [train(x, y, make(rows, seed), held_out, seed) for seed in range(seeds)]
    lines = [
        [
            name,
            f"{found['correlation']:+.4f}",
            f"{found['distance']:.3f}",
            f"{found['batch_spread']:.1f}",
            f"{found['long_spread']:.1f}",
            f"{statistics.mean(accuracy[name]):.4f}",
            f"{min(accuracy[name]):.4f} to {max(accuracy[name]):.4f}",
        ]
        for name, found in mixing.items()
    ]
    header = ["order", "correlation", "mean distance", f"spread in {BATCH} rows"]
    header += [f"in {LONG * BATCH:,} rows", f"accuracy, {seeds} seed(s)", "range"]
    print(common.machine_line(machine))
    print(f"\n{'Quick, Draw!' if folder else 'digits of scikit-learn'}, {rows:,} rows sorted by class\n")
    print(common.table(header, lines))
    if options.plot is not None:
        plot(options.plot, {name: make(rows, 0) for name, make in ORDERS.items()}, y, accuracy)
    common.save_json(options.json, "shuffle_quality", machine, rows=rows, mixing=mixing, accuracy=accuracy)


if __name__ == "__main__":
    main()
