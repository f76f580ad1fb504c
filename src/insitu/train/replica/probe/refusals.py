"""Messages about steps that can't be combined over replicas, or of which it isn't known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from insitu.train.replica.updated_weights import UPDATE_ADVICE

_OF_GRADIENTS = "The gradient of a global batch must be the mean over its rows: each replica has only some. "

SUMS = (
    f"{_OF_GRADIENTS}Received: a loss that sums over rows: the gradient, or a part of it, is twice as large "
    "for twice the rows. Use means over rows (keras.ops.mean, or a sum divided by keras.ops.shape(x)[0]), "
    "also in add_loss, and scale the learning rate if you want the size of a sum."
)

NOT_LINEAR = (
    "A train_step may scale and add up gradients, but not clip or normalize them: that must be done to the "
    "mean over all replicas. Received: gradients that are changed otherwise before optimizer.apply(). Use "
    "clipnorm=, clipvalue= or global_clipnorm= of the optimizer."
)

READS_UPDATED = (
    "A train_step can't use weights after optimizer.apply(), or assign them: with several replicas the "
    "update comes after the step, once gradients are combined. Received: a step whose results depend on "
    f"updated weights, or that changes weights. {UPDATE_ADVICE}"
)


def of_synchronized(name: str) -> str:
    """Return the refusal of a layer that normalizes by the rows of all replicas."""
    return (
        "Replicas meet at the end of a step, so each normalizes by its own rows. Received: "
        f"BatchNormalization(synchronized=True) as {name!r}, which normalizes by those of all replicas. "
        "Leave synchronized out, use keras.layers.GroupNormalization, or train on one device."
    )


GLOBAL_ROWS_ON_SERVERS = (
    "Workers on parameter servers have their own rows only. Received: insitu.over_batch(..., "
    "rows='global'). Say rows='replica', or use MultiWorkerMirroredStrategy or MirroredStrategy."
)


def of_global_step(name: str) -> str:
    """Return the refusal of a step that would need the rows of all replicas."""
    return (
        f"{_OF_GRADIENTS}Received: insitu.over_batch({name}, rows='global'). Only losses and "
        "compute_loss get the rows of all replicas. Mark these, or say rows='replica'."
    )


def of_coupled_rows(difference: float) -> str:
    """Return the refusal of a gradient that differs so much, relative to its size, from that of parts."""
    return (
        f"{_OF_GRADIENTS}Received: a loss or train_step in which the rows of a batch depend on each other: "
        f"the gradient of 5 rows differs by {100 * difference:.2g} % from the mean over 2 and 3 of them. Say "
        "over which rows the loss goes, by insitu.over_batch(loss, rows='replica') or rows='global', let the "
        "loss of a row depend on that row alone, or train on one device."
    )


def of_metric(metric: Any, variable: Any) -> str:
    """Return the refusal of a metric's variable."""
    return (
        "With several replicas a metric combines from parts of a batch: by adding up, as a mean by rows, or "
        f"as the largest or smallest value. Received: {variable.name!r} of the metric {metric.name!r} "
        f"({type(metric).__name__}), for which none of these gives what the whole batch gives. Keep sums "
        "over rows, as keras.metrics.Mean does, declare add_variable(aggregation='only_first_replica') if "
        "the rows of one replica will do, or use one device."
    )


def of_weight(variable: Any) -> str:
    """Return the refusal of a weight that a step moves."""
    return (
        "With several replicas a weight that a step moves combines from parts of a batch: by adding up "
        "changes, as a mean by rows, or as the largest or smallest value. Received: "
        f"{variable.path!r}, for which none of these gives what the whole batch gives. Declare what you "
        "accept by add_weight(aggregation='sum', 'mean' or 'only_first_replica'), or train on one device."
    )


def of_server_weight(path: str) -> str:
    """Return the refusal of a weight that servers would average."""
    return (
        f"On parameter servers a weight that a step moves is a mean by rows. Received: {path!r}, which "
        "combines otherwise. Keep it in a metric, or use MultiWorkerMirroredStrategy."
    )


def of_log(name: str, step: str) -> str:
    """Return the refusal of a log."""
    return (
        "A log that a step returns is the result of a metric as it is, or a number that is averaged by rows. "
        f"Received: {name!r} of {step}, which on a whole batch isn't the mean of its parts. Make it a metric "
        "of the model, or compute it from other logs in a callback's on_epoch_end."
    )


# Messages on facts that could not be found out

NO_NUMBERS = "The data holds other values than numbers, of which no rows can be made up"
NOT_FINITE = "Gradients of made-up rows are not finite"
ROUNDING = "Gradients of made-up rows are nothing but rounding errors"
NOT_SCALED = (
    "The train_step takes its gradients otherwise than by the backend's usual functions, so that it isn't "
    "known whether it clips them"
)


def of_coupled_outputs(names: Sequence[str]) -> str:
    """Return why nothing is known of a step whose rows the model itself couples. `names` are of what differs
    from the whole batch; none if gradients do."""
    subject = ", ".join(map(repr, names)) if names else "Gradients"
    return (
        "An output of the model for a row depends on the other rows of its batch, of which each replica has "
        f"only some. {subject} may differ from those of one device"
    )


def of_failed_step(step: str, error: Exception) -> str:
    """Return why nothing is known of a step that fails."""
    first = str(error).strip().partition("\n")[0][:200]
    return f"{step} fails on made-up rows ({type(error).__name__}: {first})"


def of_randomness(step: str) -> str:
    """Return why nothing is known of a step that draws random numbers of which Keras doesn't know."""
    return f"{step} gives other numbers each time, of random numbers that are not Keras' or the backend's"
