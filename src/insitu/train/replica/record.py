"""The record of a shard in a step: one float64 vector of all values that are summed over shards, or taken
from one shard, beside the gradients.

float64 holds every value of float32, of int32 and of integers below 2**53 exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.train.replica.combination import Operation, combine
from insitu.train.replica.flat import Span, compute_spans
from insitu.train.replica.state import ModelState, is_floating

EXTRA_LOGS = 32
"""Elements for logs of a user's train_step or test_step that are no metrics of the model."""


class RecordLayout:
    """The spans of a record's values.

    A record is [rows | sums | firsts | others | extra logs].
    """

    def __init__(self, state: ModelState, *, training: bool) -> None:
        firsts = (*state.seeds, *(state.first if training else ()), *state.metric_first)
        others = (*(state.combined if training else ()), *state.metric_combined)
        variables = (*state.sums, *firsts, *(variable for variable, _ in others))
        spans = compute_spans([tuple(v.shape) for v in variables], start=1)
        first, other = len(state.sums), len(state.sums) + len(firsts)
        self.sums: tuple[tuple[Any, Span], ...] = tuple(zip(state.sums, spans, strict=False))
        """(variable, span) of what is summed over shards, each of which starts from 0."""
        self.firsts: tuple[tuple[Any, Span], ...] = tuple(zip(firsts, spans[first:other], strict=True))
        """(variable, span) of what is taken from the first shard with rows."""
        self.others: tuple[tuple[Any, Span, Operation], ...] = tuple(
            (variable, span, operation)
            for (variable, operation), span in zip(others, spans[other:], strict=True)
        )
        """(variable, span, operation) of what combines by an operation."""
        self.sums_stop = spans[first - 1].stop if first else 1
        self.extra_start = spans[-1].stop if spans else 1
        self.size = self.extra_start + EXTRA_LOGS
        self.averaged: NDArray[np.intp] = np.empty(0, np.intp)
        """Elements of sums that are averaged by rows instead. Written by `average`."""

    def entries(self) -> Iterator[tuple[Any, Span]]:
        """Yield (variable, span) of all variables."""
        yield from self.sums
        yield from self.firsts
        yield from ((variable, span) for variable, span, _ in self.others)

    def average(self, variables: Collection[int]) -> None:
        """Average the sums whose variable's id is in `variables` by rows, instead of adding them up."""
        spans = [span for variable, span in self.sums if id(variable) in variables]
        elements = [np.arange(span.start, span.stop) for span in spans]
        self.averaged = np.concatenate(elements) if elements else np.empty(0, np.intp)

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
        if self.averaged.size or self.others:
            self._combine_others(combined, records[active], records[active, 0] / total)
        return combined

    def _combine_others(
        self, combined: NDArray[np.float64], records: NDArray[np.float64], shares: NDArray[np.float64]
    ) -> None:
        combined[self.averaged] = combine(Operation.MEAN, records[:, self.averaged], shares)
        for variable, span, operation in self.others:
            part = slice(span.start, span.stop)
            value = combine(operation, records[:, part], shares)
            combined[part] = value if is_floating(variable) else np.rint(value)
