"""One of two workers that train with or without compression: `compression_rank.py DATA SEED EPOCHS HOW`.

They believe to be on two hosts, since within one nothing is compressed. Worker 0 prints accuracy and loss on
the held-out rows, as `RESULT accuracy loss`.
"""

import os
import sys
from pathlib import Path
from unittest import mock

import models

index, size = models.me()
os.environ.update(INSITU_TASK=f"worker:{index}", INSITU_SHARDS=f"{index}/{size}")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import insitu  # noqa: E402

HELD_OUT = 0.2
BATCH = 256


def load(folder):
    """(images as float32 in [0, 1] of (n, side, side, 1), labels)"""
    files = sorted(Path(folder).glob("*.npy")) if folder else []
    if files:
        rows = [np.load(file) for file in files]
        labels = np.concatenate([np.full(len(part), label) for label, part in enumerate(rows)])
        return (np.concatenate(rows).reshape(-1, 28, 28, 1) / 255).astype("float32"), labels
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images[..., None] / 16).astype("float32"), digits.target


def build(side):
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((side, side, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu", padding="same"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def main():
    folder, seed, epochs, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    images, labels = load(folder)
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = np.split(order, [int(len(order) * HELD_OUT)])
    keras.utils.set_random_seed(seed)
    strategy = insitu.MultiWorkerMirroredStrategy("ring", compression=None if how == "float32" else how)
    with strategy.scope():
        model = build(images.shape[1])
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(images[train], labels[train], batch_size=BATCH, epochs=epochs, verbose=0)
    loss, accuracy = model.evaluate(images[test], labels[test], batch_size=BATCH, verbose=0)
    if index == 0:
        print(f"RESULT {accuracy} {loss}")


with mock.patch("insitu.exchange.memory.read_host_identity", lambda: f"host {index}"):
    main()
