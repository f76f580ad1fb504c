"""Inform a script of its place: which strategy's scope is open, and which replica of a step runs.

These are the questions that `tf.distribute` answers by `get_strategy`, `has_strategy`,
`in_cross_replica_context` and `get_replica_context`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

from insitu.base.errors import TrainingError
from insitu.base.missing_names import missing_name
from insitu.train.custom_loop.averaging import Share, current_share

_scopes: list[Any] = []
"""The strategies whose scopes are open, the innermost last."""


@contextlib.contextmanager
def open_scope(strategy: Any) -> Iterator[None]:
    """While open, `strategy` is the current one."""
    _scopes.append(strategy)
    try:
        yield
    finally:
        _scopes.pop()


def find_strategy() -> Any:
    """Return the strategy of the step that runs, else that of the innermost scope, else None."""
    share = current_share()
    if share is not None:
        return share.strategy
    return _scopes[-1] if _scopes else None


def has_strategy() -> bool:
    """Return True in a strategy's scope, and in a step that `strategy.run` runs.

    Example:
        >>> insitu.has_strategy()
        False
    """
    return find_strategy() is not None


def in_cross_replica_context() -> bool:
    """Return True in a strategy's scope, outside of steps.

    Example:
        >>> with insitu.OneDeviceStrategy("cpu:0").scope():
        ...     insitu.in_cross_replica_context()
        True
    """
    return current_share() is None and bool(_scopes)


def get_replica_context() -> ReplicaContext | None:
    """Return which replica runs. In a strategy's scope, outside of steps, None, as `tf.distribute` has it.

    Outside of all scopes it is replica 0 of 1.

    Example:
        >>> insitu.get_replica_context().replica_id_in_sync_group
        0
        >>> with insitu.OneDeviceStrategy("cpu:0").scope():
        ...     insitu.get_replica_context() is None
        True
    """
    share = current_share()
    if share is None:
        return None if _scopes else ReplicaContext(None, None)
    return ReplicaContext(share.strategy, share)


class ReplicaContext:
    """One replica of a step, as `tf.distribute.ReplicaContext`.

    Example:
        >>> replica = insitu.get_replica_context()
        >>> replica.replica_id_in_sync_group, replica.num_replicas_in_sync
        (0, 1)
    """

    def __init__(self, strategy: Any, share: Share | None) -> None:
        #: The strategy that runs the step; None outside of all.
        self.strategy = strategy
        self._share = share

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all tasks."""
        return 1 if self.strategy is None else int(self.strategy.num_replicas_in_sync)

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The number of this replica, in [0, num_replicas_in_sync). A scalar of the backend in a step, traced
        if the step is compiled."""
        return 0 if self._share is None else self._share.replica_id

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Return `value` if there is one replica. Raises TrainingError for several."""
        del reduce_op, options
        return value if self.num_replicas_in_sync == 1 else self._refuse("all_reduce")

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Return `value` if there is one replica. Raises TrainingError for several."""
        del axis, options
        return value if self.num_replicas_in_sync == 1 else self._refuse("all_gather")

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise TrainingError: replicas can't meet in the middle of a step."""
        del merge_fn, args, kwargs
        self._refuse("merge_call")

    def __getattr__(self, name: str) -> Any:
        raise missing_name("ReplicaContext", name)

    def _refuse(self, name: str) -> NoReturn:
        raise TrainingError(
            "Replicas meet at the end of a step, where optimizers sum their gradients, not in its middle. "
            f"Received: {name} in a step that strategy.run runs. Return the value from the step, and combine "
            "it by strategy.reduce or strategy.gather; a loss is scaled by strategy.compute_average_loss."
        )
