"""The models of the training benchmarks, in each library, with the same shapes, optimizer and batches.

Every contender's process prints one line, `RATE rows-per-second`, for all processes together.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np

ROWS = 64
"""Rows of a step for each process."""
STEPS = {"tiny": 100, "cnn": 60, "mlp": 12}
FEATURES = {"tiny": (8,), "cnn": (28, 28, 1), "mlp": (784,)}
LEARNING_RATE = 0.01


def me() -> tuple[int, int]:
    """(index, number of processes), from TF_CONFIG; each process keeps to one core of its own."""
    config = json.loads(os.environ["TF_CONFIG"])
    index, size = config["task"]["index"], len(config["cluster"]["worker"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    return index, size


def data(model: str, size: int) -> tuple[Any, Any]:
    """Global batches for one epoch, the same in each process."""
    rng = np.random.default_rng(0)
    rows = ROWS * size * STEPS[model]
    return rng.random((rows, *FEATURES[model]), dtype=np.float32), rng.integers(0, 10, rows)


def keras_model(keras: Any, model: str) -> Any:
    """`keras` is Keras 3 or tf_keras. 314 (tiny), 225,034 (cnn) and 19,643,370 (mlp) parameters. Images have
    their channels where Keras is set to expect them."""
    layers = keras.layers
    if model == "tiny":
        stack = [keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(10)]
    elif model == "cnn":
        stack = [
            keras.Input((1, 28, 28) if channels_first(keras) else (28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    else:
        stack = [
            keras.Input((784,)),
            layers.Dense(4096, activation="relu"),
            layers.Dense(4000, activation="relu"),
            layers.Dense(10),
        ]
    built = keras.Sequential(stack)
    built.compile(
        keras.optimizers.SGD(LEARNING_RATE, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return built


def channels_first(keras: Any) -> bool:
    return bool(keras.backend.image_data_format() == "channels_first")


def epoch_clock(keras: Any) -> Any:
    """A callback that notes the `seconds` of each epoch."""

    class Clock(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.started = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            # The logs have been read: all that was begun on a device is done.
            self.seconds.append(time.perf_counter() - self.started)

    return Clock()


def rate_of_fit(keras: Any, fit: Any, rows: int) -> float:
    """Rows per second of the faster of two epochs after a first one: what begins a fit isn't counted."""
    clock = epoch_clock(keras)
    fit(epochs=3, verbose=0, callbacks=[clock])
    return rows / min(clock.seconds[1:])
