"""Build a model for training or for prediction."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state

from insitu.base.process.preload_hooks import register_preload
from insitu.train.replica.leaves import map_batch


def is_unbuilt(model: Any) -> bool:
    """Return whether training on a batch makes variables: of the model, its loss or its metrics."""
    parts = (*model._flatten_layers(), model._compile_loss, model._compile_metrics)
    return not all(part is None or part.built for part in parts)


def build_to_train(model: Any, example: Any) -> None:
    """Make all variables that training and evaluation on batches like `example` need, metrics' too."""
    try:
        model._symbolic_build(data_batch=example)
    except RuntimeError as error:
        if "automatically build the model" not in str(error):
            raise
        raise RuntimeError(
            f"{error}\nIf the model has all of its variables once it is made, as one with a `train_step` and "
            "without `call`, or with a layer that computes by NumPy, set `self.built = True` at the end of "
            "its `__init__`."
        ) from error.__cause__


def build_to_predict(model: Any, example: Any) -> None:
    """Make the variables of the model and its optimizer. Losses and metrics can't be built without labels,
    which `example`, a batch of inputs, doesn't hold: the first `fit` or `evaluate` builds them."""
    if not all(layer.built for layer in model._flatten_layers()):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(example)
        compute_output_spec(model, map_batch(_symbolic, x), training=False)
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _symbolic(leaf: Any) -> Any:
    return keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype))


# Preload Keras and the backend in a standby process: train a tiny model once, so that they load what they
# load on first use. No trace is left: the numbers in layers' names are reset, and random numbers come from
# seeds


_ACCELERATORS = ("nvidia[0-9]*", "kfd", "accel[0-9]*")


def has_accelerators(devices: Path = Path("/dev")) -> bool:
    """Return True if a first operation might take memory of a device that the job's tasks need."""
    return any(True for pattern in _ACCELERATORS for _ in devices.glob(pattern))


def warm_up() -> None:
    if has_accelerators():
        return
    counted = global_state.get_global_attribute("object_name_uids")
    names: dict[str, int] = defaultdict(int) if counted is None else counted.copy()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.train_on_batch(np.zeros((1, 1), "float32"), np.zeros((1, 1), "float32"))
    global_state.set_global_attribute("object_name_uids", names)


register_preload(warm_up)
