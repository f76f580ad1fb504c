"""What is done to rows between reading and routing, wherever they are read: here, or on other hosts.

A transformation of rows has its place here: `columns_of_rows` says which columns it makes of those of the
sources, `ImportRows.prepare` makes their values. Readers give blocks as they are in the sources; all that
follows sees the columns of the caches.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column
from insitu.grid.intake.row_plan import FOLDER, RowPlan
from insitu.grid.layout import hash_integers, hash_rows, hash_texts, partition_of_rows, split_of_rows
from insitu.grid.partitions import is_variable, text_buffers
from insitu.grid.sources import LABEL, Block, Source, folder_name, stem

_OF_SAMPLES = 0x5DEECE66D
"""Makes other numbers of rows, so that a sample is independent of rows' partitions."""

Rows = npt.NDArray[np.int64]


def columns_of_rows(source: Source, label_from: str, row_id: str | None = None) -> tuple[Column, ...]:
    """Return the columns that the caches get, with `label` unless `label_from` is empty.

    Raises SourceError if one that is added is there already.
    """
    columns = source.columns
    for name, flag in ((LABEL if label_from else None, f"--label-from-{label_from}"), (row_id, "--row-id")):
        if name is None:
            continue
        if not name.strip():
            raise InputError(f"{flag} names a column. Received: {name!r}")
        if any(column.name == name for column in columns):
            raise SourceError(f"{source.path} has a column {name!r} of its own, so {flag} can't add one")
        columns = (*columns, Column(name, "int64"))
    return columns


def label_of(source: Source, label_from: str) -> str:
    """Return the label that the name of a source's file makes, or that of its folder. Raises SourceError."""
    path = Path(source.path) if isinstance(source.path, str) else source.path
    return folder_name(path) if label_from == FOLDER else stem(path)


class ImportRows:
    """The rows of one import, as `plan` says: their columns, and the partition of each."""

    def __init__(self, plan: RowPlan) -> None:
        self._plan = plan
        self._numbers = {label: number for number, label in enumerate(plan.labels)}
        labels = (c for c in plan.columns if c.name == LABEL and not is_variable(c))
        self._may_be_nan = any(np.dtype(column.dtype).kind == "f" for column in labels)

    def prepare(self, source: Source, block: Block, first_row: int) -> Block:
        """Return a block of a source with the columns of the caches.

        `first_row` is the index of its first row. Raises SourceError.
        """
        plan = self._plan
        if plan.label_from:
            number = self._numbers[label_of(source, plan.label_from)]
            label = np.full(block.rows, number, dtype=np.int64)
            block = replace(block, columns={**block.columns, LABEL: label})
        if self._may_be_nan:
            _refuse_nan_labels(source, block, first_row)
        numbers = np.arange(first_row, first_row + block.rows, dtype=np.int64)
        if plan.row_id is not None:
            block = replace(block, columns={**block.columns, plan.row_id: numbers})
        if plan.sample is not None:
            block = replace(block, numbers=numbers)
            block = take_rows(block, hash_integers(numbers ^ _OF_SAMPLES) < int(plan.sample * 2.0**64))
        return block

    def route(self, block: Block, first_row: int) -> Rows | None:
        """Return the destination of each row of a block that was prepared; None if there is one alone.

        `first_row` is the index of its first row in the cache.
        """
        plan = self._plan
        if len(plan.names) * plan.partitions == 1:
            return None
        if plan.primaries:
            return block.partitions
        if plan.key is None and block.numbers is not None:
            hashes = hash_integers(block.numbers)
        elif plan.key is None:
            hashes = hash_rows(first_row, first_row + block.rows)
        elif isinstance(values := block.columns[plan.key], np.ndarray):
            hashes = hash_integers(values)
        else:
            offsets, data = text_buffers(values)
            hashes = hash_texts(data, offsets)
        partition = partition_of_rows(hashes, plan.partitions)
        if len(plan.names) == 1:
            return partition
        return split_of_rows(hashes, plan.fractions) * plan.partitions + partition


def take_rows(block: Block, is_kept: npt.NDArray[np.bool_]) -> Block:
    """Return the rows of a block that are kept."""
    if is_kept.all():
        return block
    kept = pa.array(is_kept)
    columns = {
        name: values[is_kept] if isinstance(values, np.ndarray) else values.filter(kept)
        for name, values in block.columns.items()
    }
    partitions = None if block.partitions is None else block.partitions[is_kept]
    numbers = None if block.numbers is None else block.numbers[is_kept]
    return replace(block, columns=columns, rows=int(is_kept.sum()), partitions=partitions, numbers=numbers)


def count_routed(block: Block, destinations: Rows | None, length: int) -> Rows:
    """Return how many rows of a block each of `length` destinations gets, as `ImportRows.route` says."""
    numbers = np.zeros(block.rows, np.int64) if destinations is None else destinations
    return np.bincount(numbers, minlength=length)


def _refuse_nan_labels(source: Source, block: Block, first_row: int) -> None:
    bad = np.isnan(block.columns[LABEL]).reshape(block.rows, -1).any(axis=1)
    if bad.any():
        raise SourceError(
            f"{source.path}: {int(bad.sum())} of the labels of rows [{first_row}, {first_row + block.rows}) "
            f"are NaN, the first in row {first_row + int(bad.argmax())}, counted over all sources. Drop or "
            f"fill these rows"
        )
