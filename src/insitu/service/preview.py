"""Rows of a cache to look at: a few, drawn at random, as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.paths import Paths

MAX_ROWS = 200
_MAX_NUMBERS = 4096
"""Numbers that are given of one value, which is more than a small picture has."""
_MAX_TEXT = 2000


def preview_rows(paths: Paths, name: str, count: int = 24, seed: int = 0) -> dict[str, Any]:
    """Return rows of the latest version in the form of docs/json.md. The same seed gives the same rows.

    They come from partitions on this machine. Raises UnknownCache, CorruptPartition, GridError where none is
    here.
    """
    import numpy as np

    from insitu.grid import sample_rows

    sample = sample_rows(paths, name, max(1, min(count, MAX_ROWS)), seed)
    cache, columns = sample.cache, [column.name for column in sample.cache.columns]
    rows = [
        {column: _to_plain(np.asarray(sample.columns[column][i])) for column in columns}
        for i in range(sample.rows)
    ]
    return {"name": name, "version": cache.version, "seed": seed, "labels": list(cache.labels), "rows": rows}


def _to_plain(value: Any) -> Any:
    """Return a value as JSON can hold it: numbers as nested lists, text cut to a length. None if it is too
    large."""
    import math

    if value.dtype.kind in "OSU":
        text = value.item()
        return (text.decode(errors="replace") if isinstance(text, bytes) else str(text))[:_MAX_TEXT]
    if value.size > _MAX_NUMBERS:
        return None
    if value.dtype.kind == "f" or value.dtype.kind not in "biu":
        numbers = value.astype("float64")
        if value.ndim == 0:
            return float(numbers) if math.isfinite(numbers) else str(numbers)
        return [_to_plain(part) for part in numbers]
    return value.tolist()
