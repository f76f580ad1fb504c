"""Find which logs of a step are the results of metrics.

A step returns numbers. A metric's result is computed again, once the metric holds the rows of all shards; any
other number is averaged over shards by rows. Names prove nothing: a step may call its own loss "loss".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Source = tuple[Any, str | None]
"""A metric, and the name of one of its results if it has several."""
LogPath = tuple[str, ...]
"""The names that lead to a log: one, or several for a dict in the logs."""


class MetricResults:
    """The results that the metrics of a model have given."""

    def __init__(self) -> None:
        self._sources: dict[int, Source] = {}
        self._kept: list[Any] = []
        """All results, so that no other tensor gets the id of one."""

    def note(self, metric: Any, result: Any) -> None:
        """Record a result of `metric`."""
        parts = result.items() if isinstance(result, Mapping) else [(None, result)]
        for name, value in parts:
            # The first that gives a result computes it; those around it pass it on.
            self._sources.setdefault(id(value), (metric, name))
            self._kept.append(value)

    def find(self, value: Any) -> Source | None:
        """Return the source of `value`, None for a number that is no metric's result."""
        return self._sources.get(id(value))


def read_result(source: Source) -> Any:
    """Compute a result again."""
    metric, name = source
    return metric.result() if name is None else metric.result()[name]


def flatten_logs(logs: Any) -> dict[LogPath, Any]:
    """Return the values of what a step returns: a dict, which may hold dicts."""
    flat: dict[LogPath, Any] = {}
    for name, value in (logs or {}).items():
        inner = flatten_logs(value) if isinstance(value, Mapping) else {(): value}
        flat.update({(name, *path): each for path, each in inner.items()})
    return flat


def nest_logs(flat: Mapping[LogPath, Any]) -> dict[str, Any]:
    """Return the dict that `flatten_logs` has taken apart."""
    logs: dict[str, Any] = {}
    for (*outer, name), value in flat.items():
        inner = logs
        for each in outer:
            inner = inner.setdefault(each, {})
        inner[name] = value
    return logs


@contextlib.contextmanager
def find_metric_results(model: Any) -> Iterator[MetricResults]:
    """While open, record the results of the model's metrics."""
    found = MetricResults()

    def noting(metric: Any, result: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            value = result(*arguments, **options)
            found.note(metric, value)
            return value

        return noted

    metrics = unique_metrics(model)
    for metric in metrics:
        # Around Keras' attribute tracking: this is no part of the metric's state.
        object.__setattr__(metric, "result", noting(metric, metric.result))
    try:
        yield found
    finally:
        for metric in metrics:
            object.__delattr__(metric, "result")


def flatten_metrics(metrics: Any) -> Iterator[Any]:
    """Yield metrics and those inside them."""
    for metric in metrics:
        yield metric
        yield from flatten_metrics([*getattr(metric, "metrics", ()), *getattr(metric, "_metrics", ())])


def unique_metrics(model: Any) -> list[Any]:
    """Return the metrics of a model and those inside them, each once."""
    return list({id(metric): metric for metric in flatten_metrics(model.metrics)}.values())
