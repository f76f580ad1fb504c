"""Statistics of a cache's columns, estimated from a sample of rows at a bounded cost."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    from insitu.base.paths import Paths
    from insitu.base.spec import Column

    Values = npt.NDArray[Any]

ROWS = 4096
"""Rows of a sample, unless another number is asked for."""
MAX_ROWS = 20_000
_MOST_BLOCKS = 256
"""Blocks that a sample may read: the sum of their sizes is bounded so."""
_BINS = 20
_MOST_VALUES = 10
"""Most frequent values that are listed."""
_FEW = 1000
"""Different values of a column up to which the most frequent ones are listed."""
_MAX_TEXT = 80


def describe_columns(paths: Paths, name: str, rows: int = ROWS, seed: int = 0) -> dict[str, Any]:
    """Return statistics of each column of the latest version in the form of docs/json.md.

    They are exact if the sample holds all rows: `rows` of docs/json.md equals `rows_of_cache`. Raises
    UnknownCache, CorruptPartition, GridError.
    """
    from insitu.grid import sample_rows

    sample = sample_rows(paths, name, max(1, min(rows, MAX_ROWS)), seed, _MOST_BLOCKS)
    return {
        "name": name,
        "version": sample.cache.version,
        "seed": seed,
        "rows": sample.rows,
        "run": sample.run,
        "rows_of_cache": sample.cache.rows,
        "columns": [
            _describe_column(column, sample.columns[column.name], sample.cache.labels)
            for column in sample.cache.columns
        ],
    }


def _describe_column(column: Column, values: Values, labels: tuple[str, ...]) -> dict[str, Any]:
    import numpy as np

    described: dict[str, Any] = {
        "name": column.name,
        "dtype": column.dtype,
        "shape": list(column.shape),
        **dict.fromkeys(("minimum", "maximum", "mean", "deviation", "not_finite", "zeros", "histogram")),
        **dict.fromkeys(("different", "frequent", "shortest", "longest")),
    }
    if not len(values):
        return described
    if values.dtype == object:
        lengths = [len(value) for value in values]
        described |= {"shortest": min(lengths), "longest": max(lengths)}
        if column.dtype == "str":
            return described | _count_values([_to_text(value) for value in values])
        values = np.concatenate([np.asarray(value).ravel() for value in values])
    if values.dtype.kind not in "biuf" and not _is_small_float(values):
        return described
    described |= _describe_numbers(values)
    if values.ndim == 1 and values.dtype.kind in "biu" and column.dtype != "str" and not column.shape:
        names = labels if column.name == "label" else ()
        described |= _count_values([_name_value(int(value), names) for value in values])
    return described


def _is_small_float(values: Values) -> bool:
    """Return whether these are such as bfloat16, which NumPy doesn't know of itself."""
    return "float" in str(values.dtype)


def _describe_numbers(values: Values) -> dict[str, Any]:
    """Return minimum, maximum, mean, standard deviation and a histogram of all numbers that are finite."""
    import numpy as np

    numbers = values.reshape(-1)
    if numbers.dtype.kind not in "biu":
        numbers = numbers.astype(np.float64)
    finite = numbers if numbers.dtype.kind in "biu" else numbers[np.isfinite(numbers)]
    found: dict[str, Any] = {
        "not_finite": 1 - len(finite) / len(numbers) if len(numbers) else 0.0,
        "zeros": float(np.count_nonzero(finite == 0)) / len(finite) if len(finite) else None,
    }
    if not len(finite):
        return found
    low, high = finite.min(), finite.max()
    as_floats = finite.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(as_floats.mean()), float(as_floats.std())
    plain = int if finite.dtype.kind in "biu" else float
    found |= {
        "minimum": plain(low),
        "maximum": plain(high),
        "mean": mean if math.isfinite(mean) else None,
        "deviation": deviation if math.isfinite(deviation) else None,
    }
    if math.isfinite(float(high) - float(low)):
        bins = _BINS
        if plain is int and int(high) - int(low) < _BINS:
            bins = int(high) - int(low) + 1
            edges = (float(low) - 0.5, float(high) + 0.5)
        else:
            edges = (float(low), float(high))
        counts, borders = np.histogram(as_floats, bins, edges if edges[0] < edges[1] else None)
        found["histogram"] = {"edges": borders.tolist(), "counts": counts.tolist()}
    return found


def _count_values(values: list[str]) -> dict[str, Any]:
    """Return how many values differ, and the most frequent ones if these are few."""
    counts = Counter(values)
    frequent: list[tuple[str, int]] = []
    if len(counts) <= min(_FEW, max(1, len(values) // 2)):
        frequent = sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:_MOST_VALUES]
    return {"different": len(counts), "frequent": [[value, count] for value, count in frequent]}


def _name_value(value: int, labels: tuple[str, ...]) -> str:
    return f"{value} {labels[value]}" if 0 <= value < len(labels) else str(value)


def _to_text(value: Any) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text[:_MAX_TEXT]
