"""Data of which each worker, or each replica, has a part of its own: what is read isn't cut for replicas.

`tf.distribute` has it in `distribute_datasets_from_function`, whose datasets have batches of replicas, and in
datasets with `AutoShardPolicy.OFF`, whose batches are global ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any

from insitu.train.fit import Feed
from insitu.train.replica import ShardBatch, StepBatch, map_batch

Cut = Callable[[ShardBatch], Iterator[ShardBatch]]


class WorkerFeed:
    """Gives each replica of this task the next batch of its feed, until no task has a batch left.

    A replica whose feed has ended, while another's continues, has no rows. `feeds` are one for all replicas
    of this task, or one for each.
    """

    cache: str | None = None
    is_refreshed = False
    """A custom loop takes what its data has, each time."""

    def __init__(
        self,
        feeds: Sequence[Feed],
        shards: Sequence[int],
        count_left: Callable[[int], int],
        cut: Cut | None = None,
    ) -> None:
        """`count_left` adds up, over all tasks, the batches that they have for a step. `cut` cuts a batch
        that was read into those of replicas."""
        self._feeds = feeds
        self._shards = tuple(shards)
        self._count_left = count_left
        self._cut = cut
        self.source = feeds[0].source
        self.part_rows: int | None = None
        self.follows_epochs = any(feed.follows_epochs for feed in feeds)

    def __repr__(self) -> str:
        return repr(self._feeds[0])

    @property
    def num_steps(self) -> int | None:
        """None: how much data the other tasks have isn't known."""
        return None

    def example(self, rows: int = 1) -> Any:
        return self._feeds[0].example(rows)

    def steps(self, epoch: int, start_step: int) -> Iterator[StepBatch]:
        # Replicas of one feed take its batches in turn.
        each = 1 if len(self._feeds) > 1 else len(self._shards)
        skipped = 0 if self._cut is not None else start_step * each
        read = [self._batches(feed, epoch, skipped) for feed in self._feeds]
        of_replicas = read if len(read) > 1 else read * len(self._shards)
        for batches in of_replicas if self._cut is not None else ():
            deque(islice(batches, start_step), maxlen=0)
        while True:
            parts = [next(batches, None) for batches in of_replicas]
            if not self._count_left(sum(part is not None for part in parts)):
                return
            yield StepBatch(
                epoch,
                tuple(
                    ShardBatch(shard, 0, None) if part is None else ShardBatch(shard, part.rows, part.data)
                    for shard, part in zip(self._shards, parts, strict=True)
                ),
            )

    def skip_epochs(self, count: int) -> None:
        for feed in self._feeds:
            feed.skip_epochs(count)

    def _batches(self, feed: Feed, epoch: int, start: int) -> Iterator[ShardBatch]:
        for step in feed.steps(epoch, start):
            (part,) = step.parts
            yield from (part,) if self._cut is None else self._cut(part)

    def assign_shards(self, shards: Sequence[int]) -> None:
        self._shards = tuple(shards)

    def origins(self, shard: int, epoch: int, stop_step: int) -> Iterable[tuple[int, Any]]:
        return ()


def cut_for_replicas(rows: int, replicas: int, first: int) -> Cut:
    """Return a function that cuts global batches of `rows` rows into those of `replicas` replicas, in the
    order in which the task takes them whose first replica is number `first`.

    Tasks take unequal parts in turn, so that those of one step add up to a global batch, as TensorFlow has
    it.
    """

    def cut(batch: ShardBatch) -> Iterator[ShardBatch]:
        whole, more = divmod(max(rows, batch.rows), replicas)
        sizes = [whole + ((first + index) % replicas < more) for index in range(replicas)]
        for size, stop in zip(sizes, accumulate(sizes), strict=True):
            start, stop = stop - size, min(stop, batch.rows)
            if start < stop:
                piece = slice(start, stop)
                yield ShardBatch(batch.shard, stop - start, map_batch(itemgetter(piece), batch.data))

    return cut
