"""Statistics of a cache's columns: over all rows, block by block, or over a sample.

A column's account takes rows in any portions, and keeps little of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    from insitu.base.paths import Paths
    from insitu.base.spec import Column

    Values = npt.NDArray[Any]

ROWS = 4096
"""Rows of a sample at a bounded cost, unless another number is asked for."""
MAX_ROWS = 20_000
_MOST_BLOCKS = 256
"""Blocks that a sample at a bounded cost may read: the sum of their sizes is bounded so."""
_BINS = 20
"""Most bins of a histogram that is given."""
_FINE_BINS = 4096
"""Most bins of a histogram while values come."""
_MOST_VALUES = 10
"""Most frequent values that are listed."""
_FEW = 1000
"""Different values of a column up to which the most frequent ones are listed."""
_MAX_TEXT = 80
_LEAST_HASHES = 4096
"""Different values from which on they are estimated, by as many hashes: mostly within 3 percent."""
_EXACT = 2.0**52
"""Whole numbers below this, and some more, are exact as floats."""


def describe_columns(paths: Paths, name: str, rows: int = ROWS, seed: int = 0) -> dict[str, Any]:
    """Return statistics of each column of the latest version in the form of docs/reference/json.md, by a
    sample at a bounded cost.

    They are exact if the sample holds all rows: `rows` of docs/reference/json.md equals `rows_of_cache`.
    Raises UnknownCache, CorruptPartition, GridError.
    """
    from insitu.grid import sample_rows, to_block

    sample = sample_rows(paths, name, max(1, min(rows, MAX_ROWS)), seed, _MOST_BLOCKS)
    accounts = [_Account(column, sample.cache.labels) for column in sample.cache.columns]
    for account in accounts if sample.rows else ():
        account.add(to_block(account.column, sample.columns[account.column.name]))
    return {
        "name": name,
        "version": sample.cache.version,
        "seed": seed,
        "rows": sample.rows,
        "run": sample.run,
        "rows_of_cache": sample.cache.rows,
        "columns": [account.report() for account in accounts],
    }


def measure_columns(
    paths: Paths,
    name: str,
    sample: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return the same of all rows of a version, such as orders or orders@3; of `sample` rows if it is given,
    each drawn at random.

    `progress` is called with the bytes done, and those in all. Raises UnknownCache, CorruptPartition, and
    GridError if partitions are on other hosts alone.
    """
    from insitu.grid import Catalog, read_blocks, read_drawn

    cache = Catalog(paths).get_named(name)
    names = [column.name for column in cache.columns]
    rows = cache.rows if sample is None else min(sample, cache.rows)
    drawn = rows < cache.rows
    blocks = read_drawn(paths, cache, names, rows, seed) if drawn else read_blocks(paths, cache, names)
    accounts = [_Account(column, cache.labels) for column in cache.columns]
    done, total = 0, cache.raw_bytes * rows // max(1, cache.rows)
    for block in blocks:
        for account in accounts:
            account.add(block.values[account.column.name])
        done += block.rows
        if progress is not None:
            progress(total * done // rows, total)
    return {
        "name": cache.name,
        "version": cache.version,
        "seed": seed if drawn else None,
        "rows": rows,
        "run": 1,
        "rows_of_cache": cache.rows,
        "columns": [account.report() for account in accounts],
    }


class _Account:
    """Statistics of one column, for rows that come in portions."""

    def __init__(self, column: Column, labels: tuple[str, ...]) -> None:
        self.column = column
        self._labels = labels if column.name == "label" else ()
        self._is_text = column.dtype == "str"
        self._is_ragged = column.dtype.endswith("[*]")
        self._rows = 0
        self._shortest: int | None = None
        self._longest: int | None = None
        self._numbers = _Numbers()
        self._distinct = _Distinct()
        #: How often each value has come; None: too many differ.
        self._counts: dict[Any, int] | None = {}
        if self._is_ragged or column.shape or "float" in column.dtype:
            self._counts = None

    def add(self, values: Any) -> None:
        """Take rows in the form of `BlockRows`."""
        import numpy as np

        self._rows += len(values)
        if self._is_text or self._is_ragged:
            self._add_variable(values)
            return
        if values.dtype.kind == "f" or "float" in str(values.dtype):
            self._numbers.add(values)
            values = values + values.dtype.type(0)  # -0.0 is 0.0
        else:
            distinct, counts = _count_whole(values)
            self._numbers.add(distinct, counts)
            if self._counts is not None:
                self._count(distinct.tolist(), counts.tolist())
        if values.ndim == 1 and values.dtype.kind not in "biu":
            values = values[~np.isnan(values)]
        self._distinct.add(values)

    def _add_variable(self, values: Any) -> None:
        import numpy as np
        import pyarrow.compute as pc

        size = np.dtype(self.column.dtype.removesuffix("[*]")).itemsize if self._is_ragged else 1
        lengths = pc.utf8_length(values) if self._is_text else pc.binary_length(values)
        ends = pc.min_max(lengths)
        low, high = ends["min"].as_py() // size, ends["max"].as_py() // size
        self._shortest = low if self._shortest is None else min(low, self._shortest)
        self._longest = high if self._longest is None else max(high, self._longest)
        self._distinct.add(values)
        if self._is_ragged:
            data = b"".join(value.as_buffer() for value in values)
            numbers = np.frombuffer(data, self.column.dtype.removesuffix("[*]"))
            self._numbers.add(numbers)
        elif self._counts is not None:
            found = pc.value_counts(values)
            self._count([_to_text(v) for v in found.field(0).to_pylist()], found.field(1).to_pylist())

    def _count(self, values: list[Any], counts: list[int]) -> None:
        held = self._counts
        if held is None:
            return
        for value, count in zip(values, counts, strict=True):
            held[value] = held.get(value, 0) + count
        if len(held) > _FEW:
            self._counts = None

    def report(self) -> dict[str, Any]:
        """Return the column in the form of docs/reference/json.md."""
        column = self.column
        found: dict[str, Any] = {
            "name": column.name,
            "dtype": column.dtype,
            "shape": list(column.shape),
            **dict.fromkeys(("minimum", "maximum", "mean", "deviation", "not_finite", "nan", "infinite")),
            **dict.fromkeys(
                ("zeros", "histogram", "different", "is_estimate", "frequent", "shortest", "longest")
            ),
        }
        if not self._rows:
            return found
        found |= {"shortest": self._shortest, "longest": self._longest}
        different, found["is_estimate"] = self._distinct.estimate()
        found["different"] = min(different, self._rows)
        found |= {} if self._is_text else self._numbers.report()
        is_counted = self._is_text or not (column.shape or self._is_ragged or "float" in column.dtype)
        return found | ({"frequent": self._list_frequent()} if is_counted else {})

    def _list_frequent(self) -> list[list[Any]]:
        counts = self._counts or {}
        if len(counts) > max(1, self._rows // 2):
            return []
        if not self._is_text:
            counts = {self._name_value(int(value)): count for value, count in counts.items()}
        frequent = sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:_MOST_VALUES]
        return [[value, count] for value, count in frequent]

    def _name_value(self, value: int) -> str:
        return f"{value} {self._labels[value]}" if 0 <= value < len(self._labels) else str(value)


def _count_whole(values: Values) -> tuple[Values, Values]:
    """Return the distinct whole numbers, and how often each comes."""
    import numpy as np

    flat = values.reshape(-1)
    if flat.dtype.itemsize > 2:
        distinct, counts = np.unique(flat, return_counts=True)
        return distinct, counts
    if flat.dtype == bool:
        flat = flat.view(np.uint8)
    low = int(np.iinfo(flat.dtype).min)
    counts = np.bincount(flat.astype(np.intp) - low if low else flat)
    found = np.flatnonzero(counts)
    return (found + low).astype(flat.dtype), counts[found]


class _Numbers:
    """Least, greatest, mean, standard deviation and a histogram of all numbers that are finite."""

    def __init__(self) -> None:
        self._count = self._nan = self._finite = self._zeros = 0
        self._low: Any = None
        self._high: Any = None
        self._mean = self._squares = 0.0
        self._histogram = _Histogram()

    def add(self, values: Values, counts: Values | None = None) -> None:
        """Take numbers, each as often as `counts` says, by default once."""
        import numpy as np

        numbers = values.reshape(-1)
        is_whole = numbers.dtype.kind in "biu"
        if not is_whole:
            numbers = numbers.astype(np.float64, copy=False)
            self._nan += int(np.count_nonzero(np.isnan(numbers)))
            finite = np.isfinite(numbers)
            self._count += len(numbers)
            numbers = numbers if finite.all() else numbers[finite]
        weights = np.ones(len(numbers)) if counts is None else counts
        total = int(weights.sum())
        self._count += total if is_whole else 0
        if not total:
            return
        self._finite += total
        self._zeros += int(weights[numbers == 0].sum())
        plain = int if is_whole else float
        low, high = plain(numbers.min()), plain(numbers.max())
        self._low = low if self._low is None else min(low, self._low)
        self._high = high if self._high is None else max(high, self._high)
        as_floats = numbers.astype(np.float64, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(np.average(as_floats, weights=weights))
            squares = float((weights * (as_floats - mean) ** 2).sum())
            gap, before = mean - self._mean, self._finite - total
            self._mean += gap * total / self._finite
            self._squares += squares + gap * gap * before * total / self._finite
        self._histogram.add(as_floats, weights, is_whole=is_whole)

    def report(self) -> dict[str, Any]:
        """Return what was found, in the form of docs/reference/json.md."""
        found: dict[str, Any] = {
            "not_finite": 1 - self._finite / self._count if self._count else 0.0,
            "nan": self._nan,
            "infinite": self._count - self._finite - self._nan,
            "zeros": self._zeros / self._finite if self._finite else None,
        }
        if not self._finite:
            return found
        deviation = math.sqrt(self._squares / self._finite) if self._squares >= 0 else math.nan
        return found | {
            "minimum": self._low,
            "maximum": self._high,
            "mean": self._mean if math.isfinite(self._mean) else None,
            "deviation": deviation if math.isfinite(deviation) else None,
            "histogram": self._histogram.report(),
        }


class _Histogram:
    """Counts of numbers in bins whose width is a power of two, each beginning at a multiple of it.

    If numbers come that are far away, neighbours are put together: counts stay exact.
    """

    def __init__(self) -> None:
        self._width = 0.0
        #: The first bin, in widths.
        self._first = 0
        self._counts: Any = None
        self._is_whole = False
        self._is_possible = True

    def add(self, numbers: Values, weights: Values, *, is_whole: bool) -> None:
        """Take finite numbers, float64, each as often as its weight says."""
        import numpy as np

        self._is_whole = is_whole
        low, high = float(numbers.min()), float(numbers.max())
        self._is_possible = self._is_possible and math.isfinite(high - low) and max(-low, high) < 2.0**1000
        if not self._is_possible:
            return
        if self._counts is None:
            self._width = _choose_width(low, high, is_whole=is_whole)
            self._first, self._counts = math.floor(low / self._width), np.zeros(1)
        while self._count_bins(low, high) > _FINE_BINS or max(-low, high) / self._width > _EXACT:
            self._halve()
        first = min(self._first, math.floor(low / self._width))
        places = np.floor(numbers / self._width).astype(np.int64) - first
        counts = np.bincount(places, weights=weights, minlength=self._first - first + len(self._counts))
        counts[self._first - first : self._first - first + len(self._counts)] += self._counts
        self._first, self._counts = first, counts

    def _count_bins(self, low: float, high: float) -> int:
        first = min(self._first, math.floor(low / self._width))
        return max(self._first + len(self._counts), math.floor(high / self._width) + 1) - first

    def _halve(self) -> None:
        """Put neighbours together."""
        import numpy as np

        first = self._first // 2
        places = (self._first + np.arange(len(self._counts))) // 2 - first
        self._counts = np.bincount(places, weights=self._counts)
        self._first, self._width = first, self._width * 2

    def report(self) -> dict[str, Any] | None:
        """Return edges and counts of few bins; None if numbers are too far apart."""
        import numpy as np

        if not self._is_possible or self._counts is None:
            return None
        filled = np.flatnonzero(self._counts)
        self._first, self._counts = self._first + int(filled[0]), self._counts[filled[0] : filled[-1] + 1]
        while len(self._counts) > _BINS:
            self._halve()
        edges = (self._first + np.arange(len(self._counts) + 1)) * self._width
        if self._is_whole and self._width == 1:
            edges -= 0.5  # a bin for each number, which is in its middle
        return {"edges": edges.tolist(), "counts": self._counts.astype(np.int64).tolist()}


def _choose_width(low: float, high: float, *, is_whole: bool) -> float:
    """Return a power of two by which the numbers fill some of the fine bins, and their places are exact."""
    if is_whole and high - low < _FINE_BINS / 2:
        width = 1.0
    else:
        spread = (high - low) or max(abs(low), 1.0)
        width = 2.0 ** math.ceil(math.log2(spread) - math.log2(_FINE_BINS / 2))
    while max(-low, high) / width > _EXACT:
        width *= 2
    return max(width, 2.0**-1000)


class _Distinct:
    """How many values differ: exactly up to _LEAST_HASHES, else by the least hashes of all (Bar-Yossef and
    others, "Counting distinct elements in a data stream", 2002)."""

    def __init__(self) -> None:
        self._least: Any = None

    def add(self, values: Any) -> None:
        """Take rows in the form of `BlockRows`."""
        import numpy as np

        from insitu.grid import hash_values

        hashes = hash_values(values)
        if self._least is not None:
            if len(self._least) == _LEAST_HASHES:
                hashes = hashes[hashes < self._least[-1]]
            hashes = np.concatenate([self._least, hashes])
        self._least = np.unique(hashes)[:_LEAST_HASHES]

    def estimate(self) -> tuple[int, bool]:
        """Return how many values differ, and whether that is an estimate."""
        if self._least is None or len(self._least) < _LEAST_HASHES:
            return 0 if self._least is None else len(self._least), False
        return round((_LEAST_HASHES - 1) / (float(self._least[-1]) / 2.0**64)), True


def _to_text(value: Any) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text[:_MAX_TEXT]
