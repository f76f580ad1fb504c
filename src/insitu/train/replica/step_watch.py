"""Find out what a model's step does, while it runs or is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras

from insitu.base.errors import TrainingError
from insitu.train.replica.metric_results import MetricResults, find_metric_results


@dataclass(frozen=True, slots=True)
class StepWatch:
    """Findings while a step runs."""

    means: BatchMeans
    """The means that count each batch once."""
    results: MetricResults
    """The results that metrics gave."""


@contextmanager
def watch_step(model: Any) -> Iterator[StepWatch]:
    """While open, find out what a step of `model` does."""
    if not isinstance(model, keras.Model):
        yield StepWatch(BatchMeans(), MetricResults())
        return
    with find_batch_means() as means, find_metric_results(model) as results:
        yield StepWatch(means, results)


# Find the means that count each batch once.
#
# Keras' Mean counts rows if it gets a value for each row, or their number as a weight. If it gets one number
# for the batch, it counts the batch as one. Then a shard's number counts by its part of the rows


class BatchMeans:
    """`variables` are the totals and counts of means that count each batch once, by id of the variable."""

    def __init__(self) -> None:
        self.variables: set[int] = set()
        self._others: set[int] = set()

    def note(self, metric: Any, counts_batches: bool) -> None:
        """Record an update of `metric`. Raises TrainingError if it counts rows and batches in one step."""
        own = {id(variable) for variable in metric.variables}
        (self.variables if counts_batches else self._others).update(own)
        if self.variables & self._others:
            raise TrainingError(
                "With several replicas a mean counts rows or batches, not both. Received: the metric "
                f"{metric.name!r}, updated in one step by values for rows and by a number for the "
                "batch. Pass the number with sample_weight=rows, or use two metrics."
            )


@contextlib.contextmanager
def find_batch_means() -> Iterator[BatchMeans]:
    """While open, record which means count each batch once."""
    found = BatchMeans()
    original = keras.metrics.Mean.update_state

    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        found.note(metric, sample_weight is None and _is_scalar(values))
        return original(metric, values, sample_weight)

    keras.metrics.Mean.update_state = update_state
    try:
        yield found
    finally:
        keras.metrics.Mean.update_state = original


def _is_scalar(values: Any) -> bool:
    shape = getattr(values, "shape", None)
    if shape is None:
        shape = keras.ops.convert_to_tensor(values).shape
    return getattr(shape, "rank", 0) is not None and len(shape) == 0
