"""Let TensorFlow's own functions know the replica that `strategy.run` runs.

In a step, `tf.nn.compute_average_loss`, `tf.nn.scale_regularization_loss` and `tf.distribute.get_strategy()`,
`has_strategy()`, `in_cross_replica_context()` and `get_replica_context()` answer for insitu's strategy. Left
alone, they would see one replica of one, and the loss would come out multiplied by the number of replicas.

TensorFlow and Keras ask the same functions for their own purposes: their calls get the original answers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import nn_impl_distribute, resource_variable_ops, summary_ops_v2

from insitu.base.errors import TrainingError
from insitu.train.custom_loop import (
    current_share,
    find_strategy,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
    scale_by_share,
    scale_rows,
)

_LIBRARIES = ("keras", "tensorflow", "tf_keras")
_NN_OF_KERAS = "keras.src.backend.tensorflow.nn"
"""Asks for the replica if moments are those of all replicas."""
_ASSIGNMENTS = ("assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update")


def install() -> None:
    """Replace TensorFlow's functions. Done once."""
    if getattr(tf.distribute.get_strategy, "knows_insitu", False):
        return
    names: dict[str, Callable[[], Any]] = {
        "get_strategy": find_strategy,
        "has_strategy": has_strategy,
        "in_cross_replica_context": in_cross_replica_context,
        "get_replica_context": get_replica_context,
    }
    for name, answer in names.items():
        setattr(tf.distribute, name, _for_scripts(getattr(tf.distribute, name), answer))
    nn_impl_distribute.distribute_lib = _DistributeLib(nn_impl_distribute.distribute_lib)


def _for_scripts(original: Callable[[], Any], answer: Callable[[], Any]) -> Callable[[], Any]:
    def function() -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller == _NN_OF_KERAS and current_share() is not None:
            _refuse_synchronized_mean()
        if find_strategy() is None or caller.partition(".")[0] in _LIBRARIES:
            return original()
        return answer()

    function.__name__, function.__doc__ = original.__name__, original.__doc__
    function.knows_insitu = True  # type: ignore[attr-defined]
    return function


def _refuse_synchronized_mean() -> None:
    """Raise TrainingError if Keras is about to take the moments of one replica for those of all."""
    if find_strategy().num_replicas_in_sync > 1:
        raise TrainingError(
            "Replicas meet at the end of a step, so each normalizes by its own rows. Received: moments with "
            "synchronized=True in a step of strategy.run, as BatchNormalization(synchronized=True) has them. "
            "Leave synchronized out, or use keras.layers.GroupNormalization."
        )


class _DistributeLib:
    """Stands for TensorFlow's module `distribute_lib` in the functions that scale losses."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def get_strategy(self) -> Any:
        """Return something with the number of replicas, as losses are scaled by it."""
        if current_share() is None:
            return self._original.get_strategy()
        return SimpleNamespace(num_replicas_in_sync=_Replicas())


class _Replicas:
    """The number of replicas in arithmetic on losses: exact also if replicas have unequal rows."""

    def __rmul__(self, rows: Any) -> Any:
        """Return the rows of all replicas; TensorFlow multiplies those of one."""
        return rows if current_share() is None else tf.cast(scale_rows(rows), rows.dtype)

    def __rtruediv__(self, loss: Any) -> Any:
        """Return the replica's part of a loss that doesn't depend on rows."""
        return scale_by_share(loss, 1)


@contextlib.contextmanager
def record_summaries(replica_id: Any, first: int) -> Iterator[None]:
    """See `Backend`."""
    state = summary_ops_v2._summary_state
    before = state.is_recording_distribution_strategy
    if state.writer is not None:
        state.is_recording_distribution_strategy = tf.logical_and(tf.equal(replica_id, first), before)
    try:
        yield
    finally:
        state.is_recording_distribution_strategy = before


@contextlib.contextmanager
def refuse_raw_variables() -> Iterator[None]:
    """While open, a `tf.Variable` that is assigned raises TrainingError: it would be each replica's own.

    Keras' variables are assigned in another way while a step is traced.
    """
    owners = (resource_variable_ops.BaseResourceVariable, resource_variable_ops.ResourceVariable)
    originals = [
        (owner, name, vars(owner)[name]) for owner in owners for name in _ASSIGNMENTS if name in vars(owner)
    ]

    def refuse(variable: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        raise TrainingError(
            "A step that strategy.run runs changes Keras variables, which are combined over replicas. "
            f"Received: an assignment to the tf.Variable {variable.name!r}. Make it a keras.Variable "
            '(aggregation="sum" or "mean" says how replicas combine), a metric, or a layer\'s weight.'
        )

    for owner, name, _ in originals:
        setattr(owner, name, refuse)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
