"""Partitions of random columns, for tests of their files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from insitu.base.spec import Column
from insitu.grid.partitions import TEXT, PartitionWriter

CODECS = st.sampled_from(["lz4", "zstd"])
DTYPES = ("bool", "uint8", "int16", "float32", "int64", "float64", TEXT)


@st.composite
def columns(draw: st.DrawFn) -> tuple[Column, ...]:
    """Up to five columns of any kind."""
    made = []
    for number in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = () if dtype == TEXT else tuple(draw(st.lists(st.integers(1, 5), max_size=2)))
        made.append(Column(f"c{number}", dtype, shape))
    return tuple(made)


def make_rows(columns: tuple[Column, ...], rows: int, seed: int = 0) -> dict[str, Any]:
    """Return the values of each column: an array [rows, *shape], for text one of objects."""
    rng = np.random.default_rng(seed)
    values: dict[str, Any] = {}
    for column in columns:
        if column.dtype == TEXT:
            texts = ["ä" * int(n) + str(i) * (i % 3) for i, n in enumerate(rng.integers(0, 9, rows))]
            values[column.name] = np.array([*texts, None], dtype=object)[:-1]
        else:
            raw = rng.integers(0, 2, rows * math.prod(column.shape)).astype(column.dtype)
            if column.dtype != "bool":
                raw = rng.integers(0, 100, rows * math.prod(column.shape)).astype(column.dtype)
            values[column.name] = raw.reshape(rows, *column.shape)
    return values


def write_rows(
    path: Path, columns: tuple[Column, ...], values: Mapping[str, Any], rows: int, block_rows: int
) -> tuple[int, str]:
    """Write a partition; return (bytes, checksum)."""
    writer = PartitionWriter(path, columns)
    write_blocks(writer, columns, values, rows, block_rows)
    return writer.close()


def write_blocks(
    writer: PartitionWriter,
    columns: tuple[Column, ...],
    values: Mapping[str, Any],
    rows: int,
    block_rows: int,
    first: int = 0,
) -> None:
    """Write the rows from `first` on, in blocks."""
    for start in range(first, rows, block_rows):
        stop = min(rows, start + block_rows)
        block = {
            c.name: pa.array(values[c.name][start:stop], pa.large_utf8())
            if c.dtype == TEXT
            else np.ascontiguousarray(values[c.name][start:stop])
            for c in columns
        }
        writer.write(stop - start, block)
