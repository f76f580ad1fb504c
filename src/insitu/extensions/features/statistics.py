"""Statistics of columns: one pass over each partition, merged in the order of partitions. Pure.

What a partition gives follows from its rows alone, and the merge from the partitions' order. So the numbers
are the same bits, wherever and by how many processes partitions are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import InputError
from insitu.grid import count_shared

Arrays = dict[str, npt.NDArray[Any]]
"""Statistics as arrays that `numpy.savez` writes."""
QUANTILE_POINTS = 1 << 14
"""Points that stand for the values of a partition, at most. A quantile is wrong by one of so many parts of
the rows."""


class Statistic(Protocol):
    """Computes one kind of statistics."""

    def of_partition(self, blocks: Iterable[npt.NDArray[Any]]) -> Arrays:
        """Return the statistics of a partition's rows. Raises InputError."""

    def merge(self, parts: Sequence[Arrays]) -> Arrays:
        """Return those of all partitions, given in order."""


@dataclass(frozen=True, slots=True)
class MeanAndVariance:
    """Means and variances. Arrays: `count`, `mean` and `squares`, the sum of squared differences from it."""

    #: The axes of a batch that are averaged over.
    axes: tuple[int, ...]

    def of_partition(self, blocks: Iterable[npt.NDArray[Any]]) -> Arrays:
        return self.merge([self._of_block(block) for block in blocks])

    def _of_block(self, block: npt.NDArray[Any]) -> Arrays:
        values = _as_numbers(block).astype(np.float64)
        mean = values.mean(axis=self.axes, keepdims=True)
        squares = np.square(values - mean).sum(axis=self.axes)
        count = values.size // max(1, mean.size)
        return {"count": np.array(count), "mean": mean.reshape(squares.shape), "squares": squares}

    def merge(self, parts: Sequence[Arrays]) -> Arrays:
        found = [part for part in parts if int(part["count"])]
        if not found:
            return {"count": np.array(0), "mean": np.zeros(()), "squares": np.zeros(())}
        total = found[0]
        for part in found[1:]:
            n, m = float(total["count"]), float(part["count"])
            difference = part["mean"] - total["mean"]
            total = {
                "count": np.array(int(n + m)),
                "mean": total["mean"] + difference * (m / (n + m)),
                "squares": total["squares"] + part["squares"] + np.square(difference) * (n * m / (n + m)),
            }
        return total


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Sorted values with their weights. Arrays: `values` and `weights`, which add up to the rows.

    Up to `points` values of a partition are kept as they are. Of more, each kept value stands for the
    equally many below it.
    """

    #: Values that are kept of a partition, at most.
    points: int = QUANTILE_POINTS

    def of_partition(self, blocks: Iterable[npt.NDArray[Any]]) -> Arrays:
        parts = [_as_numbers(block).astype(np.float32).reshape(-1) for block in blocks]
        values = np.sort(np.concatenate(parts)) if parts else np.empty(0, np.float32)
        if len(values) <= self.points:
            return {"values": values, "weights": np.ones(len(values), np.int64)}
        ends = (np.arange(1, self.points + 1) * len(values)) // self.points
        return {"values": values[ends - 1], "weights": np.diff(ends, prepend=0)}

    def merge(self, parts: Sequence[Arrays]) -> Arrays:
        values = np.concatenate([part["values"] for part in parts])
        weights = np.concatenate([part["weights"] for part in parts])
        order = np.argsort(values, kind="stable")
        return {"values": values[order], "weights": weights[order]}


@dataclass(frozen=True, slots=True)
class Counts:
    """How often each value is there. Arrays: `keys`, whole numbers or UTF-8 texts one after another,
    `counts`, and `ends` where texts end; in no order that matters."""

    #: Whether values are texts; else whole numbers.
    of_texts: bool

    def of_partition(self, blocks: Iterable[npt.NDArray[Any]]) -> Arrays:
        return self._pack(_add_up([self._of_block(block) for block in blocks]))

    def _of_block(self, block: npt.NDArray[Any]) -> pa.Table:
        flat = np.asarray(block).reshape(-1)
        is_text = flat.dtype.kind in "OUS"
        if is_text != self.of_texts or not (is_text or flat.dtype.kind in "iub"):
            held, wanted = ("texts", "numbers")[:: 1 if is_text else -1]
            raise InputError(
                f"A vocabulary is of the values that its layer takes. Received: {held} ({flat.dtype}) for a "
                f"layer of whole {wanted}"
            )
        shared = count_shared(flat)
        if shared is not None:
            return pa.table({"key": shared[0], "count": shared[1]})
        found = pa.array(flat, pa.large_string() if is_text else pa.int64()).value_counts()
        return pa.table({"key": found.field("values"), "count": found.field("counts")})

    def merge(self, parts: Sequence[Arrays]) -> Arrays:
        return self._pack(_add_up([self._unpack(part) for part in parts]))

    def _pack(self, table: pa.Table | None) -> Arrays:
        if table is None:
            table = pa.table({"key": pa.array([], pa.int64()), "count": pa.array([], pa.int64())})
        counts = table["count_sum"].to_numpy() if "count_sum" in table.column_names else np.empty(0, np.int64)
        if not self.of_texts:
            return {"keys": table["key"].to_numpy(), "counts": counts}
        texts = [text.encode() for text in table["key"].to_pylist()]
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        return {"keys": np.frombuffer(b"".join(texts), np.uint8), "ends": ends, "counts": counts}

    def _unpack(self, part: Arrays) -> pa.Table:
        keys: Any = pa.array(self.keys_of(part), pa.large_string() if self.of_texts else pa.int64())
        return pa.table({"key": keys, "count": pa.array(part["counts"])})

    def keys_of(self, part: Arrays) -> list[Any]:
        """Return the values, in the order of `counts`."""
        if not self.of_texts:
            return list(part["keys"].tolist())
        data, ends = part["keys"].tobytes(), part["ends"].tolist()
        return [data[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)]

    def by_frequency(self, part: Arrays) -> list[Any]:
        """Return the values, the most frequent first; equally frequent ones in falling order, as Keras has
        them."""
        keys = self.keys_of(part)
        sortable = [key.encode() for key in keys] if self.of_texts else keys
        places = sorted(range(len(keys)), key=lambda i: (part["counts"][i], sortable[i]), reverse=True)
        return [keys[place] for place in places]


class HasNaN(InputError):
    """Values that must be numbers aren't."""


def _add_up(tables: Sequence[pa.Table]) -> pa.Table | None:
    if not tables:
        return None
    found: pa.Table = (
        pa.concat_tables(tables).group_by("key", use_threads=False).aggregate([("count", "sum")])
    )
    if found["key"].null_count:
        raise InputError(
            "A vocabulary is of values. Received: missing values. Fill them, such as by dataset.map"
        )
    return found


def _as_numbers(block: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a block of numbers. Raises InputError for others, and for NaN."""
    values = np.asarray(block)
    if values.dtype.kind not in "iufb":
        raise InputError(f"Means, variances and quantiles are of numbers. Received: {values.dtype}")
    if values.dtype.kind == "f" and np.isnan(values).any():
        row = int(np.argwhere(np.isnan(values))[0][0])
        raise HasNaN(f"Means, variances and quantiles are of numbers. Received: NaN in row {row} of a block")
    return values
