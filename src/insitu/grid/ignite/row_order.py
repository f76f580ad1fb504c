"""Pure: rows in the order of their partitions and keys, and a digest that is equal for equal rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from insitu.grid.ignite.objects import gather_codes
from insitu.grid.ignite.rows import Positions, Rows
from insitu.grid.ignite.values import NUMBERS, Leaf, decode_leaf
from insitu.grid.ignite.wire import STRING
from insitu.grid.partitions import TEXT, text_buffers
from insitu.grid.sources import raw_bytes
from insitu.spec import Column


def order_rows(rows: Rows, partitions: Positions) -> Positions:
    """Return the rows ordered by partition, then by key: numbers by size, others by their bytes.

    `partitions` is that of each row, ascending. The order depends on partitions and keys alone: a cache
    has each key once.
    """
    keys = _comparable_keys(rows)
    if isinstance(keys, np.ndarray):
        # 0.0 and -0.0 are two keys, and so are NaNs of different bits.
        bits = (keys.view(f"i{keys.itemsize}"),) if keys.dtype.kind == "f" else ()
        order: Positions = np.lexsort((*bits, keys, partitions))
        return order
    both = pa.table({"partition": partitions, "key": keys})
    sorted_rows = pc.sort_indices(both, sort_keys=[("partition", "ascending"), ("key", "ascending")])
    order = sorted_rows.to_numpy().astype(np.int64)
    return order


def count_repeated(rows: Rows, order: Positions) -> int:
    """Return how many rows have the key of the row before them. `order` is that of their keys."""
    keys = take_rows(_comparable_keys(rows), order)
    if isinstance(keys, np.ndarray):
        bits = keys.view(f"u{keys.itemsize}")
        return int((bits[1:] == bits[:-1]).sum())
    return pc.sum(pc.equal(keys[1:], keys[:-1])).as_py() or 0


def _comparable_keys(rows: Rows) -> Any:
    codes = gather_codes(rows.data, rows.keys)
    if len(codes) and (codes == codes[0]).all():
        code = int(codes[0])
        if code in NUMBERS:
            return decode_leaf(rows.data, rows.keys, Leaf("key", code, Column("key", NUMBERS[code])))
        if code == STRING:
            texts = decode_leaf(rows.data, rows.keys, Leaf("key", code, Column("key", TEXT)))
            return texts.cast(pa.large_binary())
    ends = np.empty(2 * len(rows.keys), np.int64)
    ends[::2], ends[1::2] = rows.keys, rows.values
    # Keys and values in turn: every other binary is a key.
    turns = pa.Array.from_buffers(
        pa.large_binary(), max(0, len(ends) - 1), [None, pa.py_buffer(ends), pa.py_buffer(rows.data)]
    )
    return turns.take(pa.array(np.arange(0, len(ends), 2)))


def take_rows(values: Any, order: Positions) -> Any:
    """Return the values of these rows, in this order."""
    if isinstance(values, np.ndarray):
        return values[order]
    return values.take(pa.array(order))


def digest_rows(columns: Sequence[str], values: Mapping[str, Any], bounds: Positions) -> list[str]:
    """Return a digest of the rows [bounds[i], bounds[i + 1]) for each i, in hex: equal for equal rows."""
    digests = [xxhash.xxh3_128() for _ in bounds[1:]]
    for name in columns:
        column = values[name]
        for digest, start, stop in zip(digests, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if isinstance(column, np.ndarray):
                digest.update(raw_bytes(np.ascontiguousarray(column[start:stop])))
            else:
                offsets, data = text_buffers(column.slice(start, stop - start))
                digest.update(raw_bytes(np.diff(offsets)))
                digest.update(raw_bytes(data[offsets[0] : offsets[-1]]))
    return [digest.hexdigest() for digest in digests]
