"""Refuses models that several replicas can't train: each computes on a part of the global batch."""

from __future__ import annotations

from typing import Any

from insitu.errors import TrainingError


def find_fixed_batch_size(model: Any) -> int | None:
    """Return the number of rows that the inputs of `model` are declared for, if they are."""
    for tensor in getattr(model, "inputs", None) or ():
        shape = getattr(tensor, "shape", None)
        if shape and shape[0] is not None:
            return int(shape[0])
    return None


def check_batch_shape(model: Any, num_replicas: int) -> None:
    """Raise TrainingError where `model` takes batches of one size only, or keeps a state for each row of a
    batch, and there are several replicas."""
    if num_replicas == 1:
        return
    rows = find_fixed_batch_size(model)
    stateful = [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    if rows is None and not stateful:
        return
    received = f"the stateful layer {stateful[0]!r}" if stateful else f"inputs of {rows} rows"
    raise TrainingError(
        "Each replica computes on a part of the global batch. So a model must take batches of any size, and "
        f"may keep no state of rows from one batch to the next. Received: {model.name!r} with {received} and "
        f"{num_replicas} replicas. Leave stateful=True and the size of the batch (batch_shape, batch_size) "
        "out, or train on one device."
    )
