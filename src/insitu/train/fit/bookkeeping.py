"""What a task writes down while it trains: where it is, and which rows have entered the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from insitu.errors import StorageFull
from insitu.grid import ShardLedger
from insitu.train.elastic import Membership
from insitu.train.fit.adapter import FeedAdapter
from insitu.train.replica import StepBatch

_LOG = logging.getLogger("insitu")
_PAUSE = 0.5
"""Seconds between two attempts to write a ledger for which there was no room."""


class Bookkeeper:
    """Progress and ledger of one model's training. Outside a job nobody reads them, so none are kept."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._telling = membership.telling
        self._adapter: FeedAdapter | None = None
        self._keeps_ledger = False
        self._ledgers: dict[int, ShardLedger] = {}
        self._unpublished: dict[tuple[int, int], ShardLedger] = {}
        self._try_again_at = 0.0

    def begin(self, adapter: FeedAdapter) -> None:
        """A fit over the adapter's feed begins."""
        context = self._membership.context
        self._ledgers = {}
        self._adapter = adapter
        self._keeps_ledger = context.job is not None and adapter.feed.cache == context.cache
        self._telling.open()

    def at(self, epoch: int, step: int, place: str) -> None:
        """The task is about to do `place` of a step."""
        self._telling.at(epoch, step, place)

    def enter(self, step: StepBatch, left_out: Collection[int] = ()) -> None:
        """The rows of `step` have entered the model, but for those of the shards that were `left_out`."""
        if self._try_again_at and time.monotonic() >= self._try_again_at:
            self._publish_waiting(at_once=False)
        replicas = self._membership.context.replicas_per_shard
        for part in step.parts:
            self._telling.rows += part.rows
            # The first replica of a shard accounts for all rows of that shard.
            if self._keeps_ledger and part.shard % replicas == 0:
                ledger = self._ledger(step.epoch, part.shard // replicas)
                for partition, rows in part.origins:
                    ledger.add(partition, rows, left_out=part.shard in left_out)
                ledger.complete = ledger.complete or step.last
                if step.last or part.shard in left_out:
                    # What was left out at once: whoever runs the shard next can't find out by itself.
                    self._publish(ledger, at_once=part.shard in left_out)

    def _ledger(self, epoch: int, shard: int) -> ShardLedger:
        ledger = self._ledgers.get(shard)
        if ledger is None or ledger.epoch != epoch:
            ledger = self._ledgers[shard] = ShardLedger(epoch, shard)
        return ledger

    def _publish(self, ledger: ShardLedger, *, at_once: bool = False) -> None:
        self._unpublished[ledger.epoch, ledger.shard] = ledger
        self._publish_waiting(at_once=at_once)

    def _publish_waiting(self, *, at_once: bool) -> None:
        """Where there is no room, training goes on, and it is tried again until the fit ends. Raises
        StorageFull then, or where it must be `at_once`."""
        job = self._membership.context.job
        if job is None:
            return
        for key, ledger in list(self._unpublished.items()):
            try:
                ledger.publish(job)
            except StorageFull as full:
                if at_once:
                    raise
                if not self._try_again_at:
                    _LOG.warning("%s. Training goes on; it is tried again.", full)
                self._try_again_at = time.monotonic() + _PAUSE
                return
            del self._unpublished[key]
        self._try_again_at = 0.0

    def take_up(self, epoch: int, step: int) -> None:
        """The shards of this task were trained up to `step` of Keras' `epoch`, maybe by other tasks: their
        ledgers go on from there.

        Which rows the steps before held follows from (seed, epoch, shard), as their order does; a step that
        has been exchanged has entered the model on all replicas.
        """
        if not self._keeps_ledger or self._adapter is None:
            return
        data_epoch, stop = self._adapter.data_position(epoch, step)
        whole = self._adapter.feed.num_steps or 0
        for shard in self._membership.context.shards_of_job:
            if stop == 0 and data_epoch > 0:
                # Who ran the shard may have been lost between the epoch's last step and its publication.
                self._make_up(shard, data_epoch - 1, whole)
            self._make_up(shard, data_epoch, stop)

    def _make_up(self, shard: int, epoch: int, stop: int) -> None:
        job = self._membership.context.job
        if self._adapter is None or job is None or epoch < 0:
            return
        ledger = ShardLedger(epoch, shard)
        published = ShardLedger.published(job, epoch, shard)
        if published is not None:
            ledger.left_out.update(published.left_out)
        for partition, rows in self._adapter.feed.origins(shard, epoch, stop):
            ledger.add(partition, rows)
        ledger.complete = stop > 0 and stop == self._adapter.feed.num_steps
        if not ledger.complete:
            self._ledgers[shard] = ledger
            return
        if published is None or not published.complete:
            self._publish(ledger)

    def end(self) -> None:
        """The fit has ended, well or not: what has entered the model is written down."""
        for shard in self._membership.context.shards_of_job:
            if shard in self._ledgers:
                self._publish_account(self._ledgers[shard])
        self._publish_waiting(at_once=True)
        self._telling.idle()

    def _publish_account(self, ledger: ShardLedger) -> None:
        """An empty account is worth writing only in place of another, as of rows that were trained in vain.

        So a fit that is taken up where it had ended tells of no epoch that it doesn't have.
        """
        job = self._membership.context.job
        if ledger.accounts or (job is not None and job.epoch_ledger(ledger.epoch, ledger.shard).exists()):
            self._publish(ledger)
