"""What a task writes down while it trains: where it is, and which rows have entered the model."""

from __future__ import annotations

import json

from insitu.context import Context
from insitu.grid import ShardLedger
from insitu.progress import IDLE, ProgressWriter
from insitu.train.feed import Feed, Step


class Bookkeeper:
    """Progress and ledger of one model's training. Outside a job nobody reads them, so none are kept."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._progress: ProgressWriter | None = None
        self._rows = 0
        self._at = (-1, -1)
        self._keeps_ledger = False
        self._ledgers: dict[int, ShardLedger] = {}

    def begin(self, feed: Feed) -> None:
        """A fit over `feed` begins."""
        job = self._context.job
        self._ledgers = {}
        self._keeps_ledger = job is not None and feed.cache == self._context.cache
        if job is not None and self._progress is None:
            self._progress = ProgressWriter(job.progress(self._context.task))

    def at(self, epoch: int, step: int, place: str) -> None:
        """The task is about to do `place` of a step."""
        self._at = (epoch, step)
        if self._progress is not None:
            self._progress.write(epoch, step, self._rows, place)

    def enter(self, step: Step) -> None:
        """The rows of `step` have entered the model."""
        for part in step.parts:
            self._rows += part.rows
            if self._keeps_ledger:
                ledger = self._ledger(step.epoch, part.shard)
                for partition, rows in part.origins:
                    ledger.add(partition, rows)
                if step.last:
                    ledger.complete = True
                    self._publish(ledger)

    def _ledger(self, epoch: int, shard: int) -> ShardLedger:
        ledger = self._ledgers.get(shard)
        if ledger is None or ledger.epoch != epoch:
            ledger = self._ledgers[shard] = ShardLedger(epoch, shard)
        return ledger

    def _publish(self, ledger: ShardLedger) -> None:
        if self._context.job is not None:
            ledger.publish(self._context.job)

    def snapshot(self) -> list[bytes]:
        """The ledger of the epoch under way for each shard of this task; empty where none is kept."""
        ledgers = [self._ledgers.get(shard) for shard in self._context.shards]
        return [json.dumps(ledger.to_json()).encode() if ledger else b"" for ledger in ledgers]

    def restore(self, everyones: list[bytes]) -> None:
        """Goes on from a snapshot of all shards, in shard order."""
        for shard in self._context.shards:
            if everyones[shard]:
                self._ledgers[shard] = ShardLedger.from_json(json.loads(everyones[shard]))

    def end(self) -> None:
        """The fit has ended, well or not: what has entered the model is written down."""
        for ledger in self._ledgers.values():
            self._publish(ledger)
        self.at(*self._at, IDLE)
