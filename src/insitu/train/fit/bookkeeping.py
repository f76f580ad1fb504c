"""Keeps the ledger of a model's training: which rows of which shard have entered the model."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from insitu.base.errors import StorageFull
from insitu.base.measure.time_account import EVALUATION
from insitu.base.paths import JobPaths
from insitu.grid import ShardLedger
from insitu.train.elastic import LoopPosition, Membership
from insitu.train.fit.adapter import FeedAdapter
from insitu.train.replica import StepBatch

_LOG = logging.getLogger("insitu")
_RETRY_INTERVAL = 0.5
"""Seconds between two attempts to write a ledger for which there was no room."""


class Bookkeeper:
    """Counts the rows of one model's training. Ledgers are kept in a job only, of the job's own cache."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        #: Reports progress; here it learns of rows, and of the end of a fit.
        self.reporter = membership.reporter
        #: The data of the fit under way. Written by `begin`.
        self._adapter: FeedAdapter | None = None
        #: Whether rows of the fit under way come from the job's cache. Written by `begin`.
        self._keeps_ledger = False
        #: The ledger of each shard's epoch under way, by shard.
        self._ledgers: dict[int, ShardLedger] = {}
        #: Ledgers that are yet to be written, by (epoch, shard).
        self._unpublished: dict[tuple[int, int], ShardLedger] = {}
        #: When to try again to write them, by the monotonic clock in seconds; 0 if there was room.
        self._retry_at = 0.0

    def begin(
        self,
        adapter: FeedAdapter,
        read_updates: Callable[[LoopPosition], int | None] = lambda position: None,
    ) -> None:
        """Begin a fit over the adapter's feed. `read_updates` returns the updates of its model, if known."""
        self._ledgers = {}
        self._adapter = adapter
        self._keeps_ledger = self.keeps_ledger_of(adapter.feed.cache)
        self.reporter.begin_training(read_updates)

    def keeps_ledger_of(self, cache: str | None) -> bool:
        """Return whether rows of a cache are counted, given its name; None for rows of no cache."""
        context = self._membership.context
        return context.job is not None and cache is not None and cache == context.cache

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Count the time while open as evaluation."""
        return self.reporter.sampler.hold(EVALUATION)

    def record(
        self, step: StepBatch, left_out: Collection[int] = (), logs: Mapping[str, Any] | None = None
    ) -> None:
        """Record that the rows of `step` have entered the model, but for those of the shards `left_out`.
        `logs` are the step's."""
        if self._retry_at and time.monotonic() >= self._retry_at:
            self._publish_waiting(at_once=False)
        replicas = self._membership.context.replicas_per_shard
        for part in step.parts:
            self.reporter.rows += part.rows
            # The first replica of a shard accounts for all rows of that shard.
            if self._keeps_ledger and part.shard % replicas == 0:
                ledger = self._ledger(step.epoch, part.shard // replicas)
                for partition, rows in part.origins:
                    ledger.add(partition, rows, left_out=part.shard in left_out)
                ledger.complete = ledger.complete or step.last
                if step.last or part.shard in left_out:
                    # At once: the task that runs the shard next can't find out by itself what was left out.
                    self._publish(ledger, at_once=part.shard in left_out)
        self.reporter.count_step(logs or {})

    def _ledger(self, epoch: int, shard: int) -> ShardLedger:
        ledger = self._ledgers.get(shard)
        if ledger is None or ledger.epoch != epoch:
            ledger = self._ledgers[shard] = ShardLedger(epoch, shard)
        return ledger

    def _publish(self, ledger: ShardLedger, *, at_once: bool = False) -> None:
        self._unpublished[ledger.epoch, ledger.shard] = ledger
        self._publish_waiting(at_once=at_once)

    def _publish_waiting(self, *, at_once: bool) -> None:
        """Write all ledgers that are yet to be written. If there is no room, training continues, and it is
        tried again until the fit ends. Raises StorageFull then, or if it must be `at_once`."""
        job = self._membership.context.job
        if job is None:
            return
        for key, ledger in list(self._unpublished.items()):
            try:
                ledger.publish(job)
            except StorageFull as full:
                if at_once:
                    raise
                if not self._retry_at:
                    _LOG.warning("%s. Training continues; it is tried again.", full)
                self._retry_at = time.monotonic() + _RETRY_INTERVAL
                return
            del self._unpublished[key]
        self._retry_at = 0.0

    def restore(self, position: LoopPosition) -> None:
        """Make up the ledgers of this task's shards, which were trained up to `position`, maybe by others.

        Which rows the steps before held follows from (seed, epoch, shard), as their order does; a step that
        has been exchanged has entered the model on all replicas.
        """
        if not self._keeps_ledger or self._adapter is None:
            return
        feed = self._adapter.feed
        data_epoch, stop = feed.find_pass(*self._adapter.data_position(position.epoch, position.step))
        for shard in self._membership.context.shards_of_job:
            if stop == 0 and data_epoch > 0:
                # Who ran the shard may have been lost between the epoch's last step and its publication.
                self._make_up(shard, data_epoch - 1)
            for epoch in self._find_lost(shard, data_epoch):
                self._make_up(shard, epoch)
            self._make_up(shard, data_epoch, stop)

    def _find_lost(self, shard: int, before: int) -> list[int]:
        """Return the latest epochs whose ledger of a shard was lost with its host, before it was copied.

        Another shard's ledger shows that the epoch was trained: a fit may begin at a later one.
        """
        context = self._membership.context
        lost = []
        for epoch in range(before - 1, -1, -1):
            if context.job is None or (epoch, shard) in self._unpublished:
                break
            if _is_published(context.job, epoch, shard):
                break
            if not any(_is_published(context.job, epoch, other) for other in range(context.num_shards)):
                break
            lost.append(epoch)
        return lost

    def _make_up(self, shard: int, epoch: int, stop: int | None = None) -> None:
        """Make up the ledger of a shard's first `stop` steps of a pass over the rows; None: of all."""
        job = self._membership.context.job
        if self._adapter is None or job is None or epoch < 0:
            return
        # Before an epoch has a step, its rows may not have been read yet.
        whole = self._adapter.feed.count_steps(epoch) or 0 if stop != 0 else 0
        stop = whole if stop is None else stop
        ledger = ShardLedger(epoch, shard)
        published = ShardLedger.published(job, epoch, shard)
        if published is not None:
            ledger.left_out.update(published.left_out)
        for partition, rows in self._adapter.feed.origins(shard, epoch, stop):
            ledger.add(partition, rows)
        ledger.complete = stop > 0 and stop == whole
        if not ledger.complete:
            self._ledgers[shard] = ledger
            return
        if published is None or not published.complete:
            self._publish(ledger)

    def end(self) -> None:
        """End the fit, whether it ended well or not: write down what has entered the model."""
        for shard in self._membership.context.shards_of_job:
            if shard in self._ledgers:
                self._publish_unless_empty(self._ledgers[shard])
        self._publish_waiting(at_once=True)
        self.reporter.report_idle()

    def _publish_unless_empty(self, ledger: ShardLedger) -> None:
        """Publish a ledger; an empty one only in place of another, as of rows that were trained in vain.

        So a fit that is taken up at its end has no ledger of an epoch that it doesn't have.
        """
        job = self._membership.context.job
        if ledger.counts or (job is not None and ShardLedger.published(job, ledger.epoch, ledger.shard)):
            self._publish(ledger)


def _is_published(job: JobPaths, epoch: int, shard: int) -> bool:
    """Return whether a shard's rows of an epoch are all in its published ledger."""
    ledger = ShardLedger.published(job, epoch, shard)
    return ledger is not None and ledger.complete
