"""Scale losses so that each row of the global batch weighs the same, whatever the replicas' sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from insitu.base.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Share:
    """A replica's share of a step. Scalars of the backend, traced or not."""

    rows: Any
    """Rows of this replica."""
    global_rows: Any
    """Rows of all replicas."""
    replica_id: Any = 0
    """The number of this replica among those of all tasks."""
    strategy: Any = None
    """The strategy that runs the step."""


_current: list[Share] = []


@contextlib.contextmanager
def share_scope(share: Share) -> Iterator[None]:
    """While open, the running step belongs to a replica with that share."""
    _current.append(share)
    try:
        yield
    finally:
        _current.pop()


def current_share() -> Share | None:
    return _current[-1] if _current else None


def average_loss(loss: Any, sample_weight: Any, global_batch_size: Any, replicas: int) -> Any:
    """See `Strategy.compute_average_loss`."""
    ops = keras.ops
    loss = ops.convert_to_tensor(loss)
    if len(loss.shape) == 0:
        raise TrainingError(
            "compute_average_loss takes the loss of each row. Received: a scalar. Make the loss with "
            "reduction='none' (keras.losses.X(reduction='none'))."
        )
    if sample_weight is not None:
        weight = ops.cast(ops.convert_to_tensor(sample_weight), loss.dtype)
        for _ in range(len(loss.shape) - len(weight.shape)):
            weight = ops.expand_dims(weight, -1)
        loss = loss * weight
    total = ops.sum(loss)
    if global_batch_size is None:
        share = current_share()
        if share is None and replicas > 1:
            raise TrainingError(
                "Outside strategy.run the rows of the global batch are unknown. Received: "
                "global_batch_size=None. Call compute_average_loss in the step that strategy.run runs, or "
                "pass global_batch_size."
            )
        global_batch_size = ops.shape(loss)[0] if share is None else scale_rows(ops.shape(loss)[0])
    elif isinstance(global_batch_size, int) and global_batch_size < 1:
        raise TrainingError(f"global_batch_size must be at least 1. Received: {global_batch_size}")
    return total / ops.cast(global_batch_size, loss.dtype)


def scale_rows(rows: Any) -> Any:
    """Return the rows of all replicas of something that has `rows` here: of a batch, or a multiple of them,
    as when a loss has a row for each token."""
    share = current_share()
    if share is None:
        return rows
    ops = keras.ops
    own = ops.maximum(ops.cast(share.rows, "float32"), 1)
    return ops.round(ops.cast(rows, "float32") * (ops.cast(share.global_rows, "float32") / own))


def scale_by_share(loss: Any, replicas: int) -> Any:
    """See `Strategy.scale_regularization_loss`."""
    ops = keras.ops
    total = ops.sum(ops.convert_to_tensor(loss))
    share = current_share()
    if share is None:
        return total / replicas
    return total * ops.cast(share.rows, total.dtype) / ops.cast(share.global_rows, total.dtype)
