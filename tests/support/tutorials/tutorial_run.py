"""What the scripts of this folder share: the strategy that the environment names, data, and the results.

TUTORIAL_STRATEGY is `mirrored` (over all devices), `workers`, or `default`, which is the reference: plain
Keras and TensorFlow on one device. A script that is run by a job writes the results of each task.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import insitu

NAME = os.environ.get("TUTORIAL_STRATEGY", "default")
if NAME == "mirrored":
    insitu.config.set_virtual_devices(2)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

keras.utils.set_random_seed(11)

distribute: Any = tf.distribute if NAME == "default" else insitu
"""Where a script takes its names from: the only thing that differs."""
ROWS = 90


def make_strategy() -> Any:
    """Return the strategy that each script says to be its own."""
    if NAME == "mirrored":
        return distribute.MirroredStrategy()
    return distribute.MultiWorkerMirroredStrategy() if NAME == "workers" else tf.distribute.get_strategy()


def images(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Return bright and dark squares, and which they are."""
    x = np.random.default_rng(5).uniform(size=(rows, 8, 8, 1)).astype("float32")
    return x, (x.mean((1, 2, 3)) > 0.5).astype("int64")


def report(**results: Any) -> None:
    """Write the results of this task, numbers and arrays of them, to the folder TUTORIAL_RESULTS."""
    path = Path(os.environ["TUTORIAL_RESULTS"]) / f"{insitu.context().task}.json".replace(":", "-")
    path.write_text(json.dumps({name: np.asarray(value).tolist() for name, value in results.items()}))


def weights_of(model: Any) -> Any:
    """Return all weights of a model, end to end."""
    return np.concatenate([weight.ravel() for weight in model.get_weights()])
