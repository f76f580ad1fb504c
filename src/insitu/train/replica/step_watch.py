"""Find out what a model's step does, while it runs or is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras

from insitu.train.replica.batch_means import BatchMeans, find_batch_means
from insitu.train.replica.metric_results import MetricResults, find_metric_results


@dataclass(frozen=True, slots=True)
class StepWatch:
    """What is found out while a step runs."""

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
