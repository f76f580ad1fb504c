"""Refuses training without labels where the model's loss needs them, before Keras fails on `None`."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.losses.losses import LossFunctionWrapper

from insitu.errors import InputError
from insitu.grid import Dataset

_USUAL_NAMES = ("y", "labels", "target", "targets", "class")


def check_labels(model: Any, data: Any, method: str) -> None:
    """Raise InputError where `model.fit` or `model.evaluate` of `data` must fail for want of labels.

    Looks only at an `insitu.Dataset`, and only where failure is certain: a model with a step or a loss of
    its own may do without labels, and so may one that learns by `add_loss` alone.
    """
    if not isinstance(data, Dataset) or not _needs_labels(
        model, "train_step" if method == "fit" else "test_step"
    ):
        return
    if keras.utils.unpack_x_y_sample_weight(data.element_spec)[1] is not None:
        return
    if data.label is not None:
        advice = "Let the functions given to .map return (features, label)"
    else:
        names = [column.name for column in data.cache.columns]
        likely = next((name for name in _USUAL_NAMES if name in names), names[-1])
        advice = (
            f"The cache has the columns {', '.join(names)}: say which one holds the labels, such as "
            f"insitu.dataset({data.cache.name!r}, label={likely!r})"
        )
    raise InputError(
        f"{method} needs labels for the loss that the model was compiled with. Received: {data!r} without "
        f"labels. {advice}"
    )


def _needs_labels(model: Any, step: str) -> bool:
    """Return whether `step` and the loss are Keras' own, and so compute the loss from labels."""
    for name in (step, "compute_loss"):
        if name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name):
            return False
    losses = keras.tree.flatten(getattr(getattr(model, "_compile_loss", None), "_user_loss", None))
    return any(_is_of_keras(loss) for loss in losses)


def _is_of_keras(loss: Any) -> bool:
    """Return whether Keras calls `loss` with labels and predictions of equal shape.

    It does so for names, functions and its own classes. Other classes may ignore the labels.
    """
    if isinstance(loss, keras.losses.Loss):
        return isinstance(loss, LossFunctionWrapper)
    return isinstance(loss, str) or callable(loss)
