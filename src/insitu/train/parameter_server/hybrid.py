"""The hybrid: dense variables live in the workers and are updated together; rows of tables live on servers
and are updated row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.parameters import Future
from insitu.train.parameter_server.lookup import IndexedBatch, TableLookup
from insitu.train.parameter_server.session import ParameterServerSession, ShardPush, match_dense_slices
from insitu.train.parameter_server.step import LossScale
from insitu.train.replica import BatchTotals, Logs, LossCounts, Replica, Span, holds_table_rows


class HybridReplica:
    """A `Replica` whose floats are the dense ones alone, for a step that exchanges these. It pulls the rows
    of a batch before it computes the gradient. It pushes the rows' gradients after the exchange has
    succeeded, so that a repeated step pushes once. It also undoes the loss' `scale` for the rows, as the
    optimizer does for the dense variables."""

    def __init__(
        self, replica: Replica, session: ParameterServerSession, lookup: TableLookup, scale: LossScale
    ) -> None:
        self._inner, self._session, self._lookup, self._scale = replica, session, lookup, scale
        self._rows = [v for v, _ in replica.float_spans() if holds_table_rows(v)]
        self._dense_slices = match_dense_slices(replica.float_spans())
        self._gradients = slice(0, max((s.stop for v, s in replica.float_spans() if v.trainable), default=0))
        self.floats_size = self._dense_slices[-1][1].stop if self._dense_slices else 0
        self.floats_dtype = replica.floats_dtype
        self.train_record_size = replica.train_record_size
        self.test_record_size = replica.test_record_size
        self.seeds_size, self.plan_number = replica.seeds_size, replica.plan_number
        self.copy_out = replica.copy_out
        self._whole = np.zeros(replica.floats_size, replica.floats_dtype)
        """The applied gradient, with zeros for the rows, which aren't updated here."""
        self._computed: dict[int, ShardPush] = {}
        self._pushed: list[Future[str]] = []
        session.locate_table_rows(replica.float_spans())

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        """See `Replica`."""
        batch = self._lookup.pull(data)
        if shard not in self._computed:
            self._computed[shard] = ShardPush(shard, 0, np.zeros_like(self._whole), None)
        whole = self._computed[shard].floats
        with self._lookup.rows_loaded(batch):
            self._inner.gradient(shard, batch.data, whole, record)
        self._clear()
        for own, dense in self._dense_slices:
            floats[dense] = whole[own]
        self._scale.begin()
        if self._scale.unscale(whole[self._gradients]):
            self._computed[shard] = ShardPush(shard, int(record[0]), whole, batch)
        else:
            self._computed[shard] = ShardPush(shard, 0, whole, None)

    def watch_weights(self, variables: Sequence[Any]) -> bool:
        """See `Replica`."""
        return self._inner.watch_weights(variables)

    def take_watched(self) -> Sequence[NDArray[Any]]:
        """See `Replica`."""
        return self._inner.take_watched()

    def keep_own_losses(self, *, training: bool) -> None:
        """See `Replica`."""
        self._inner.keep_own_losses(training=training)

    def needs_totals(self, *, training: bool) -> bool:
        """See `Replica`."""
        return self._inner.needs_totals(training=training)

    def find_out(self, *, training: bool) -> None:
        """See `Replica`."""
        with (
            self._lookup.by_row_index()
        ):  # of a batch that is made up: this task has no rows in its first step
            self._inner.find_out(training=training)

    def count_losses(self, shard: int, data: Any, *, training: bool) -> LossCounts:
        """See `Replica`."""
        if data is None:
            with self._lookup.by_row_index():
                return self._inner.count_losses(shard, None, training=training)
        batch = self._lookup.pull(data) if training else self._seen(data)
        with self._lookup.rows_loaded(batch):
            counts = self._inner.count_losses(shard, batch.data, training=training)
        self._clear()
        return counts

    def set_totals(self, batch: BatchTotals, *, training: bool) -> None:
        """See `Replica`."""
        self._inner.set_totals(batch, training=training)

    def apply(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        """See `Replica`."""
        for own, dense in self._dense_slices:
            self._whole[own] = floats[dense]
        logs = self._inner.apply(self._whole, records)
        self.wait_for_pushes()
        # The numbers of a shard's pushes have no gap, so shards without rows push too.
        nothing = {shard: ShardPush(shard, 0, self._whole, None) for shard in self._session.shards}
        self._pushed = self._session.push_rows_of(list({**nothing, **self._computed}.values()))
        for shard, push in self._computed.items():
            self._computed[shard] = ShardPush(shard, 0, push.floats, None)
        return logs

    def wait_for_pushes(self) -> None:
        """Wait until the servers have the last pushes."""
        pushed, self._pushed = self._pushed, []
        for future in pushed:
            future.result()

    def _clear(self) -> None:
        """Set the rows to zero: replicas are equal between steps."""
        for variable in self._rows:
            variable.assign(np.zeros(tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)))

    def load(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        """See `Replica`: nothing is loaded from elsewhere here."""
        raise NotImplementedError

    def assign(self, floats: NDArray[Any]) -> None:
        """See `Replica`."""
        for own, dense in self._dense_slices:
            self._whole[own] = floats[dense]
        self._inner.assign(self._whole)

    def float_spans(self) -> list[tuple[Any, Span]]:
        """See `Replica`. Spans are relative to the dense floats."""
        found, at = [], 0
        for variable, span in self._inner.float_spans():
            if not holds_table_rows(variable):
                size = span.stop - span.start
                found.append((variable, Span(at, at + size, span.shape)))
                at += size
        return found

    def evaluate(self, shard: int, data: Any, record: NDArray[np.float64]) -> None:
        """See `Replica`."""
        batch = self._seen(data)
        with self._lookup.rows_loaded(batch):
            self._inner.evaluate(shard, batch.data, record)
        self._clear()

    def merge(self, records: NDArray[np.float64]) -> Logs:
        """See `Replica`."""
        return self._inner.merge(records)

    def predict(self, data: Any) -> Any:
        """See `Replica`."""
        outputs = []
        for piece in self._lookup.pieces(data):
            batch = self._seen(piece)
            with self._lookup.rows_loaded(batch):
                outputs.append(self._inner.predict(batch.data))
        self._clear()
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *outputs)

    def run_with_seeds_of(self, shard: int, run: Callable[[], Any]) -> tuple[Any, NDArray[np.float64]]:
        """See `Replica`."""
        return self._inner.run_with_seeds_of(shard, run)

    def assign_seeds(self, values: NDArray[np.float64]) -> None:
        """See `Replica`."""
        self._inner.assign_seeds(values)

    def _seen(self, data: Any) -> IndexedBatch:
        self.wait_for_pushes()
        return self._lookup.pull(data, create=False)
