"""The record of a shard in a step: one float64 vector of all values that are summed over shards, or taken
from one shard, beside the gradients.

float64 holds every value of float32, of int32 and of integers below 2**53 exactly.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.train.replica.flat import Span, compute_spans
from insitu.train.replica.state import ModelState

EXTRA_LOGS = 32
"""Elements for logs of a user's train_step that are no metrics of the model."""


class RecordLayout:
    """The spans of a record's values.

    A record is [rows | sums | firsts | extra logs].
    """

    def __init__(self, state: ModelState, *, training: bool) -> None:
        firsts = (*state.seeds, *state.first) if training else ()
        firsts = (*firsts, *state.metric_first)
        spans = compute_spans([tuple(v.shape) for v in (*state.sums, *firsts)], start=1)
        self.sums: tuple[tuple[Any, Span], ...] = tuple(zip(state.sums, spans, strict=False))
        """(variable, span) of what is summed over shards."""
        self.firsts: tuple[tuple[Any, Span], ...] = tuple(zip(firsts, spans[len(state.sums) :], strict=True))
        """(variable, span) of what is taken from the first shard with rows."""
        self.sums_stop = 1 + sum(prod(tuple(v.shape)) for v in state.sums)
        self.extra_start = spans[-1].stop if spans else 1
        self.size = self.extra_start + EXTRA_LOGS

    def combine(self, records: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return one record for all shards. `records` has shape (shards, size); rows of shards without data
        don't count. Sums run in shard order, so that every task gets the same bits."""
        active = np.flatnonzero(records[:, 0] > 0)
        combined: NDArray[np.float64] = records[active[0]].copy()
        total = records[active, 0].sum()
        extra = combined[self.extra_start :]
        extra *= records[active[0], 0] / total
        for shard in active[1:]:
            combined[: self.sums_stop] += records[shard, : self.sums_stop]
            extra += records[shard, self.extra_start :] * (records[shard, 0] / total)
        return combined
