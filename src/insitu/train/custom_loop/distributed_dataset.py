"""The iterable of a custom loop: each replica's rows of each global batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras

from insitu.errors import InputError
from insitu.train.custom_loop.per_replica import merge_per_replica
from insitu.train.elastic import LOOP, LoopPosition
from insitu.train.fit import Bookkeeper, Feed, FeedAdapter
from insitu.train.replica import ShardBatch


class DistributedDataset:
    """Each iteration is the next epoch; each item is one step: a structure of arrays, with PerReplica leaves
    where this process has several replicas. A replica that has no rows in a step gets arrays of zero rows.

    `len()` is the number of steps, where it is known. Raises InputError where it isn't.
    """

    def __init__(
        self,
        feed: Feed,
        bookkeeper: Bookkeeper,
        after_step: Callable[[int, bool], None],
        left_out: Callable[[], Collection[int]],
    ) -> None:
        self._feed = feed
        self._bookkeeper = bookkeeper
        self._after_step = after_step
        self._left_out = left_out
        self._example = feed.example()
        self._epoch = 0

    def __len__(self) -> int:
        if self._feed.num_steps is None:
            raise InputError(
                "The number of steps isn't known before the data has been read. Received: data without "
                "a known size. Leave len() out, or use an insitu.Dataset, arrays, or a tf.data.Dataset with "
                "tf.data.experimental.assert_cardinality."
            )
        return self._feed.num_steps

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        self._bookkeeper.begin(FeedAdapter(self._feed))
        index = -1
        try:
            for index, step in enumerate(self._feed.steps(epoch, 0)):
                position = LoopPosition(0, LOOP, epoch=epoch, step=index)
                self._bookkeeper.reporter.report(position, "custom loop")
                yield merge_per_replica([self._data(part) for part in step.parts])
                # The caller asks for the next step, so it has used this one.
                self._bookkeeper.record(step, self._left_out())
                self._after_step(index, False)
            self._after_step(index, True)
        finally:
            self._bookkeeper.end()

    def _data(self, part: ShardBatch) -> Any:
        if part.rows:
            return part.data
        return keras.tree.map_structure(lambda leaf: leaf[:0], self._example)
