"""Find whether a model has parts that aren't Keras' own, of which it isn't known how they combine."""

from __future__ import annotations

from typing import Any

import keras

from insitu.train.replica.metric_results import flatten_metrics
from insitu.train.replica.state import read_losses

_METHODS = ("train_step", "test_step", "compute_loss", "_compute_loss", "compute_metrics")
"""Methods of a model that make its numbers."""
_OVER_BATCHES = ("dice", "tversky", "circle")
"""Keras' functions of losses that, by their options, are computed over all rows of a batch."""


def has_custom_parts(model: Any) -> bool:
    """Return True if steps, layers, losses or metrics of a built model are the user's own, or losses of Keras
    that may be no means over rows."""
    return has_own_numbers(model) or any(not is_of_keras(type(each)) for each in model._flatten_layers())


def find_synchronized(model: Any) -> str | None:
    """Return the name of a layer that normalizes by the rows of all replicas; None without one."""
    layers = (each for each in model._flatten_layers() if isinstance(each, keras.layers.BatchNormalization))
    return next((layer.name for layer in layers if layer.trainable and layer.synchronized), None)


def is_built_to_train(model: Any) -> bool:
    """Return True unless the model's losses and metrics are still to be built, from labels: predict() hasn't
    any."""
    parts = (getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None))
    return all(part is None or part.built for part in parts)


def has_own_numbers(model: Any) -> bool:
    """Return True if what the model's metrics and logs are made of is computed by the user's code."""
    return (
        any(not is_of_keras(getattr(type(model), name, None)) for name in _METHODS)
        or any(not _is_loss_of_keras(loss) for loss in read_losses(model))
        or _has_outputs_without_columns(model)
        or getattr(model, "computes_own_numbers", False)
        or any(not _is_loss_of_keras(metric) for metric in flatten_metrics(model.metrics))
    )


def _has_outputs_without_columns(model: Any) -> bool:
    """Return True if an output is one number a row: what Keras' losses do to its columns, they do to the rows
    then."""
    outputs = getattr(model, "outputs", None) or ()
    return any(len(output.shape) < 2 for output in keras.tree.flatten(outputs))


def has_own_train_step(model: Any) -> bool:
    """Return True if the gradient passes through code of the user's on its way to the optimizer."""
    return not is_of_keras(type(model).train_step)


def is_of_keras(thing: Any) -> bool:
    """Return True for a class or function of Keras or insitu, and for None."""
    module = getattr(thing, "__module__", None) or ""
    return thing is None or module.partition(".")[0] in ("keras", "insitu")


def _is_loss_of_keras(loss: Any) -> bool:
    """Return True for a loss or metric of Keras that wraps no function of the user's, and none over whole
    batches."""
    function = getattr(loss, "fn", None) or getattr(loss, "_fn", None)
    if function is not None and not is_of_keras(function if callable(function) else type(function)):
        return False
    if getattr(function, "__name__", "") in _OVER_BATCHES:
        return False
    return is_of_keras(type(loss))
