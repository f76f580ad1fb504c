"""The hybrid: dense variables in the workers, updated together; rows of tables on servers, updated apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.parameters import Future
from insitu.train.parameter_server.lookup import Batch, Lookup
from insitu.train.parameter_server.loss_scale import LossScale
from insitu.train.parameter_server.session import Link, Outgoing
from insitu.train.replica import Logs, Replica, Span, holds_rows_of_table


class TableReplica:
    """A `Replica` whose floats are the dense ones alone: for a step that exchanges these. Before a gradient
    the rows of its batch are pulled. Rows' gradients are pushed once the exchange has succeeded, so that a
    step that is done again pushes once. The loss' `scale` is undone for them here, as the optimizer undoes it
    for the dense ones.
    """

    def __init__(self, replica: Replica, link: Link, lookup: Lookup, scale: LossScale) -> None:
        self._inner, self._link, self._lookup, self._scale = replica, link, lookup, scale
        self._rows = [v for v, _ in replica.float_spans() if holds_rows_of_table(v)]
        self._parts = list(_dense_parts(replica.float_spans()))
        self._gradients = slice(0, max((s.stop for v, s in replica.float_spans() if v.trainable), default=0))
        self.floats_size = self._parts[-1][1].stop if self._parts else 0
        self.floats_dtype = replica.floats_dtype
        self.train_record_size = replica.train_record_size
        self.test_record_size = replica.test_record_size
        self.copy_out = replica.copy_out
        self._whole = np.zeros(replica.floats_size, replica.floats_dtype)
        """What is applied: zeros for the rows, which aren't updated here."""
        self._computed: dict[int, Outgoing] = {}
        self._pushed: list[Future[str]] = []
        link.lay_out_rows(replica.float_spans())

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        """See `Replica`."""
        batch = self._lookup.pull(data)
        if shard not in self._computed:
            self._computed[shard] = Outgoing(shard, 0, np.zeros_like(self._whole), None)
        whole = self._computed[shard].floats
        with self._lookup.placed(batch):
            self._inner.gradient(shard, batch.data, whole, record)
        self._clear()
        for ours, theirs in self._parts:
            floats[theirs] = whole[ours]
        self._scale.begin()
        if self._scale.undo(whole[self._gradients]):
            self._computed[shard] = Outgoing(shard, int(record[0]), whole, batch)
        else:
            self._computed[shard] = Outgoing(shard, 0, whole, None)

    def apply(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        """See `Replica`."""
        for ours, theirs in self._parts:
            self._whole[ours] = floats[theirs]
        logs = self._inner.apply(self._whole, records)
        self.settle()
        # Each shard's pushes are numbered without a gap, also where it had no rows.
        nothing = {shard: Outgoing(shard, 0, self._whole, None) for shard in self._link.shards}
        self._pushed = self._link.push_rows_of(list({**nothing, **self._computed}.values()))
        for shard, one in self._computed.items():
            self._computed[shard] = Outgoing(shard, 0, one.floats, None)
        return logs

    def settle(self) -> None:
        """Waits for what was pushed last."""
        pushed, self._pushed = self._pushed, []
        for future in pushed:
            future.result()

    def _clear(self) -> None:
        """Replicas are alike between steps."""
        for variable in self._rows:
            variable.assign(np.zeros(tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)))

    def load(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        """See `Replica`: nothing is loaded from elsewhere here."""
        raise NotImplementedError

    def assign(self, floats: NDArray[Any]) -> None:
        """See `Replica`."""
        for ours, theirs in self._parts:
            self._whole[ours] = floats[theirs]
        self._inner.assign(self._whole)

    def float_spans(self) -> list[tuple[Any, Span]]:
        """See `Replica`; with the places among the dense floats."""
        found, at = [], 0
        for variable, span in self._inner.float_spans():
            if not holds_rows_of_table(variable):
                size = span.stop - span.start
                found.append((variable, Span(at, at + size, span.shape)))
                at += size
        return found

    def evaluate(self, shard: int, data: Any, record: NDArray[np.float64]) -> None:
        """See `Replica`."""
        batch = self._seen(data)
        with self._lookup.placed(batch):
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
            with self._lookup.placed(batch):
                outputs.append(self._inner.predict(batch.data))
        self._clear()
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *outputs)

    def _seen(self, data: Any) -> Batch:
        self.settle()
        return self._lookup.pull(data, create=False)


def _dense_parts(spans: Sequence[tuple[Any, Span]]) -> Iterator[tuple[slice, slice]]:
    """(place among all floats, place among the dense ones), neighbours together."""
    at, start, stop = 0, 0, 0
    for variable, span in spans:
        if holds_rows_of_table(variable):
            continue
        if span.start != stop:
            if stop > start:
                yield slice(start, stop), slice(at, at + stop - start)
            at, start = at + stop - start, span.start
        stop = span.stop
    if stop > start:
        yield slice(start, stop), slice(at, at + stop - start)
