"""The iterable of a custom loop: each replica's rows of each global batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras

from insitu.base.errors import InputError
from insitu.base.missing_names import missing_name
from insitu.grid import PositionedData
from insitu.train.backends import active_backend
from insitu.train.custom_loop.epoch_log import EpochLog
from insitu.train.custom_loop.per_replica import merge_per_replica, note_batch
from insitu.train.custom_loop.replica_check import LOOP_CHECK_INTERVAL
from insitu.train.custom_loop.worker_feed import WorkerFeed
from insitu.train.elastic import LOOP, LoopPosition
from insitu.train.fit import Bookkeeper, Feed, FeedAdapter
from insitu.train.replica import ShardBatch

LoopFeed = Feed | WorkerFeed
"""Provide the steps of a custom loop."""

_LARGEST = 1 << 52
"""Above all fingerprints: what a float64 holds."""


class DistributedDataset(PositionedData):
    """Each iteration is the next epoch; each item is one step: a structure of arrays, with PerReplica leaves
    if this process has several replicas. A replica that has no rows in a step gets arrays of zero rows.
    `element_spec` has the structure of one replica's rows: `tf.TensorSpec`s on TensorFlow, else KerasTensors.

    `len()` is the number of steps, if it is known, else a TypeError.

    A restarted loop resumes in the epoch whose rows its checkpoint hasn't seen. `state_dict()` says where it
    is; on TensorFlow the dataset may also be a part of a `tf.train.Checkpoint`.

    Example:
        >>> strategy = insitu.get_strategy()
        >>> rows = strategy.distribute_dataset(insitu.dataset("digits/train").batch(32))
        >>> len(rows)
        4
        >>> [tuple(images.shape) for images, labels in rows]
        [(32, 64), (32, 64), (32, 64), (4, 64)]
    """

    def __init__(
        self,
        feed: LoopFeed,
        bookkeeper: Bookkeeper,
        after_step: Callable[[LoopPosition, bool, bool], None],
        left_out: Callable[[], Collection[int]],
        check_data: Callable[[int, LoopPosition], None] | None = None,
        log: EpochLog | None = None,
    ) -> None:
        """`after_step` is called after each step, and once more at the end, with the position, whether the
        step is the first of the iteration, and whether this is the end. `check_data` compares a fingerprint
        of all batches so far among the tasks, which must be the same. `log` finds the position of a restarted
        loop."""
        super().__init__()
        self._feed = feed
        self._bookkeeper = bookkeeper
        self._after_step = after_step
        self._left_out = left_out
        self._check_data = check_data
        self._example = feed.example()
        self._log = log
        self._number = log.add(self._position) if log is not None else 0
        #: The epoch that follows the last one.
        self._next_epoch = 0

    def __len__(self) -> int:
        if self._feed.num_steps is None:
            # As with tf.distribute: `list` and progress bars ask, and continue without a length.
            raise TypeError(
                "The number of steps isn't known before the data has been read. Received: data without "
                "a known size. Leave len() out, or use an insitu.Dataset, arrays, or a tf.data.Dataset with "
                "tf.data.experimental.assert_cardinality."
            )
        return self._feed.num_steps

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes of one replica's rows, whose number is open."""
        make = active_backend().make_spec
        return keras.tree.map_structure(
            lambda leaf: make((None, *leaf.shape[1:]), keras.backend.standardize_dtype(leaf.dtype)),
            self._example,
        )

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._steps(), self.element_spec)

    def __getattr__(self, name: str) -> Any:
        raise missing_name("DistributedDataset", name)

    def state_dict(self) -> dict[str, int]:
        if not self._position.has_begun:
            self._find_place()
        return super().state_dict()

    def _steps(self) -> Iterator[Any]:
        epoch, start = self._begin()
        iteration = self._position.begin()
        index, seen = start - 1, 0
        position = LoopPosition(0, LOOP, epoch=epoch, step=start)
        try:
            for index, step in enumerate(self._feed.steps(epoch, start), start):
                position = LoopPosition(0, LOOP, epoch=epoch, step=index)
                self._bookkeeper.reporter.report(position, "custom loop")
                seen = (seen * 31 + sum({part.fingerprint for part in step.parts})) % _LARGEST
                if self._check_data is not None and (index - start) % LOOP_CHECK_INTERVAL == 0:
                    self._check_data(seen, position)
                self._position.advance(iteration)
                yield merge_per_replica([note_batch(self._data(part)) for part in step.parts])
                # The caller asks for the next step, so it has used this one.
                self._bookkeeper.record(step, self._left_out())
                self._after_step(position, index == start, False)
            if self._check_data is not None:
                self._check_data(seen, position)
            self._position.end(iteration)
            if self._log is not None:
                # Before the tasks meet: none has saved a checkpoint yet.
                self._log.note()
            self._after_step(position, False, True)
        finally:
            # One that is left in its middle may be closed when the interpreter has torn down the rest.
            if not sys.is_finalizing():
                self._position.end(iteration)
                self._bookkeeper.end()

    def _begin(self) -> tuple[int, int]:
        """Return the epoch and the step at which the next iteration begins, having prepared both."""
        self._position.leave()
        self._find_place()
        epoch, start = self._position.epoch, self._position.step
        self._bookkeeper.begin(FeedAdapter(self._feed))  # type: ignore[arg-type]
        if (epoch, start) != (self._next_epoch, 0):
            self._feed.skip_epochs(epoch - self._next_epoch)
            if self._log is not None and self._log.is_restarted:
                self._bookkeeper.restore(LoopPosition(0, LOOP, epoch=epoch, step=start))
        elif self._log is not None:
            self._log.note(self._number)
        self._next_epoch = epoch + 1
        return epoch, start

    def _find_place(self) -> None:
        """Find the position of a restarted loop. Raises UnknownPosition."""
        if self._log is not None:
            matters = self._feed.follows_epochs or self._bookkeeper.keeps_ledger_of(self._feed.cache)
            self._log.find(self._number, repr(self._feed), matters=matters)

    def _data(self, part: ShardBatch) -> Any:
        data = part.data
        if not part.rows:
            data = keras.tree.map_structure(lambda leaf: leaf[:0], self._example)
        return keras.tree.map_structure(active_backend().as_batch, data)


class DistributedIterator:
    """Yields the steps of one epoch. Also has the methods of TensorFlow's iterators.

    Example:
        >>> strategy = insitu.get_strategy()
        >>> steps = iter(strategy.distribute_dataset(insitu.dataset("digits/train").batch(32)))
        >>> images, labels = next(steps)
        >>> tuple(labels.shape)
        (32,)
    """

    def __init__(self, steps: Iterator[Any], element_spec: Any) -> None:
        self._steps = steps
        #: The shapes and dtypes of one replica's rows.
        self.element_spec = element_spec

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        active_backend().leave_graph("The iterator of a distributed dataset")
        return next(self._steps)

    def get_next(self) -> Any:
        """Return the next step. Raises `tf.errors.OutOfRangeError` at the end of the data on TensorFlow,
        StopIteration on other backends."""
        optional = self.get_next_as_optional()
        if not optional.has_value():
            raise active_backend().out_of_range_error()
        return optional.get_value()

    def get_next_as_optional(self) -> OptionalStep:
        """Return the next step, or at the end of the data an OptionalStep without a value."""
        return OptionalStep([step for step in [next(self, None)] if step is not None])


class OptionalStep:
    """A step that may not be there, as `tf.experimental.Optional`."""

    def __init__(self, steps: list[Any]) -> None:
        self._steps = steps

    def has_value(self) -> bool:
        """Return True if there is a step."""
        return bool(self._steps)

    def get_value(self) -> Any:
        """Return the step. Raises InputError if there is none."""
        if not self._steps:
            raise InputError(
                "get_value() needs a step. Received: the end of the data. Ask has_value() before."
            )
        return self._steps[0]
