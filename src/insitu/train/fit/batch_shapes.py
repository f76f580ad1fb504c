"""Refuses models that several replicas can't train: each computes on a part of the global batch."""

from __future__ import annotations

from typing import Any

from insitu.errors import TrainingError
from insitu.train.replica import SAMPLE_ROWS


def find_fixed_batch_size(model: Any) -> int | None:
    """Return the number of rows that the inputs of `model` are declared for, if they are."""
    for tensor in getattr(model, "inputs", None) or ():
        shape = getattr(tensor, "shape", None)
        if shape and shape[0] is not None:
            return int(shape[0])
    return None


def check_batch_shape(model: Any, num_replicas: int) -> None:
    """Raise TrainingError where `model` keeps a state for each row of a batch, and there are several
    replicas.

    The size of the batch itself is no reason: Keras holds nobody to it, and sets it in a Sequential model
    that it builds from a first batch.
    """
    if num_replicas == 1:
        return
    stateful = [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    if stateful:
        raise TrainingError(
            "Each replica computes on a part of the global batch. So a model may keep no state of rows from "
            f"one batch to the next. Received: {model.name!r} with the stateful layer {stateful[0]!r} and "
            f"{num_replicas} replicas. Leave stateful=True and the size of the batch (batch_shape, "
            "batch_size) out, or train on one device."
        )


def choose_example_rows(model: Any) -> int:
    """Return how many rows of the first batch show what `model` trains on: those that it is fixed to, or else
    enough to choose some of them for a probe."""
    return find_fixed_batch_size(model) or SAMPLE_ROWS
