"""Preload Keras and the backend in a standby process: train a tiny model once, so that they load what they
load on first use. No trace is left: the numbers in layers' names are reset, and random numbers come from
seeds."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np

_ACCELERATORS = ("nvidia[0-9]*", "kfd", "accel[0-9]*")


def has_accelerators(devices: Path = Path("/dev")) -> bool:
    """Return True if a first operation might take memory of a device that the job's tasks need."""
    return any(True for pattern in _ACCELERATORS for _ in devices.glob(pattern))


def warm_up() -> None:
    import keras
    from keras.src.backend.common import global_state

    if has_accelerators():
        return
    counted = global_state.get_global_attribute("object_name_uids")
    names: dict[str, int] = defaultdict(int) if counted is None else counted.copy()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.train_on_batch(np.zeros((1, 1), "float32"), np.zeros((1, 1), "float32"))
    global_state.set_global_attribute("object_name_uids", names)
