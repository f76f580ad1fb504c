"""What all strategies share: the scope, and the low-level calls of a custom loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np
from keras.src.trainers.trainer import Trainer

from insitu.context import Context
from insitu.context import context as read_context
from insitu.errors import TrainingError
from insitu.train.adapter import teach_keras
from insitu.train.backends import make_replica
from insitu.train.binding import Binding
from insitu.train.gather import by_shard, gather_rows
from insitu.train.membership import Membership
from insitu.train.sources import make_feed
from insitu.train.state import broadcast_state, check_trainable_by_shards, read_state
from insitu.train.step import Step, TwoPhaseStep

ReduceOp = Literal["sum", "mean"]
_active: list[Strategy] = []


class Strategy:
    """How replicas and variables are laid out and synchronised.

    Models compiled inside `scope()` train under the strategy: their `fit`, `evaluate` and `predict` are
    collective, so every task calls them in the same order.
    """

    def __init__(self, *, transport: str = "auto", context: Context | None = None) -> None:
        teach_keras()
        self._membership = Membership(context or read_context(), transport)

    @property
    def membership(self) -> Membership:
        """Who this process is among the tasks."""
        return self._membership

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of shards: each is one replica, whichever process computes it."""
        return self._membership.num_shards

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Models that are compiled inside belong to this strategy. Scopes of two strategies don't nest."""
        if _active and _active[-1] is not self:
            raise TrainingError(
                f"A scope can't be opened inside another strategy's. Received: {type(self).__name__} inside "
                f"{type(_active[-1]).__name__}. Close that one first."
            )
        _active.append(self)
        original = Trainer.compile

        def compile(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            Binding(model, self)

        Trainer.compile = compile
        try:
            yield self
        finally:
            Trainer.compile = original
            _active.pop()

    def make_step(self, model: Any, example: Any, *, first: bool) -> Step:
        """The step of `model`, compiled and built, for batches like `example`. The first time, all replicas
        get the state of rank 0. Collective."""
        check_trainable_by_shards(model, self.num_replicas_in_sync)
        group = self._membership.group()
        if first:
            broadcast_state(read_state(model), group)
        return TwoPhaseStep(make_replica(model, example), group)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """`fn(*args, **kwargs)` on this task's replica. What it returns is this replica's value."""
        return fn(*args, **(kwargs or {}))

    def reduce(self, reduce_op: ReduceOp, value: Any, axis: int | None = None) -> Any:
        """`value` (a structure of arrays or scalars, one of a replica) summed or averaged over replicas.

        With `axis=0`, also over the rows of each replica's value, whose number may differ: a mean weighs each
        row the same. Returns NumPy arrays of the same dtype (float64 for a mean of integers). Collective.
        """
        if reduce_op.lower() not in ("sum", "mean") or axis not in (None, 0):
            raise TrainingError(
                f"reduce takes 'sum' or 'mean', and axis None or 0. Received: {reduce_op!r}, axis={axis}"
            )
        return keras.tree.map_structure(lambda leaf: self._reduce_leaf(reduce_op.lower(), leaf, axis), value)

    def _reduce_leaf(self, reduce_op: str, leaf: Any, axis: int | None) -> Any:
        group = self._membership.group()
        array = np.asarray(keras.ops.convert_to_numpy(leaf))
        count = 1 if axis is None else array.shape[0]
        total = array if axis is None else array.sum(axis=0, dtype=array.dtype)
        if reduce_op == "mean" and array.dtype.kind in "iub":
            total = total.astype(np.float64)
        own = np.array([[count]], np.float64)
        counts = group.all_gather(by_shard(own)).sum()
        gathered = gather_rows(group, [total[None]], total[None])
        result = gathered[0]
        for other in gathered[1:]:
            result = result + other
        return result / result.dtype.type(counts) if reduce_op == "mean" else result

    def gather(self, value: Any, axis: int = 0) -> Any:
        """The values of all replicas one after the other along `axis`; their size there may differ.
        Collective."""

        def leaf(tensor: Any) -> Any:
            array = np.moveaxis(np.asarray(keras.ops.convert_to_numpy(tensor)), axis, 0)
            return np.moveaxis(gather_rows(self._membership.group(), [array], array[:1]), 0, axis)

        return keras.tree.map_structure(leaf, value)

    def distribute_dataset(self, dataset: Any) -> Any:
        """An iterable of this replica's part of each global batch of `dataset`; None for a step in which it
        has no rows. Each iteration is the next epoch."""
        context = self._membership.context
        if len(context.shards) != 1:
            raise TrainingError(
                "A custom loop runs one shard in each process. Received: a task with the shards "
                f"{list(context.shards)}. Start the job without --shards."
            )
        feed = make_feed(dataset, **self._membership.feed_options)
        return _OwnBatches(feed)

    experimental_distribute_dataset = distribute_dataset


class _OwnBatches:
    def __init__(self, feed: Any) -> None:
        self._feed = feed
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for step in self._feed.steps(epoch, 0):
            yield step.parts[0].data
