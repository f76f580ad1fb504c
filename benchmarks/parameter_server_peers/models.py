"""The models of the parameter-server benchmark: dense networks of 55,050 and 5,825,546 parameters.

Plain gradient descent on rows whose labels a linear map has planted, the same in each contender.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

WIDTHS = {"small": (64, 64), "large": (2048, 2048)}
PARAMETERS = {"small": 55_050, "large": 5_824_522}
STEPS = {
    "small": int(os.environ.get("SMALL_STEPS", "1200")),
    "large": int(os.environ.get("LARGE_STEPS", "60")),
}
"""Steps of each worker that are measured."""
BATCH = 16
"""Rows of one worker's step."""
LEARNING_RATE = 0.01


def keep_to_core(index: int) -> None:
    """This process runs on one core: that of its index, round-robin."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})


def rows(count: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    planted = rng.standard_normal((784, 10), dtype=np.float32)
    x = rng.random((count, 784), dtype=np.float32)
    return x, np.argmax((x - 0.5) @ planted, axis=1)


def keras_model(keras: Any, size: str) -> Any:
    """Not compiled."""
    layers = [keras.layers.Dense(width, activation="relu") for width in WIDTHS[size]]
    return keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
