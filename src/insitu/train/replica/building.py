"""Build a model for training or for prediction."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.backend import compute_output_spec

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
