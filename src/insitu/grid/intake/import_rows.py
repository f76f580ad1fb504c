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

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.intake.row_plan import FOLDER, RowPlan
from insitu.grid.layout import hash_integers, hash_rows, hash_texts, partition_of_rows, split_of_rows
from insitu.grid.partitions import is_variable, text_buffers
from insitu.grid.sources import LABEL, Block, Source, folder_name, stem

Rows = npt.NDArray[np.int64]


def columns_of_rows(source: Source, label_from: str) -> tuple[Column, ...]:
    """Return the columns that the caches get, with `label` unless `label_from` is empty.

    Raises SourceError if there is a label already.
    """
    if not label_from:
        return source.columns
    if any(column.name == LABEL for column in source.columns):
        raise SourceError(
            f"{source.path} has a column {LABEL!r} of its own, so --label-from-{label_from} can't add one"
        )
    return (*source.columns, Column(LABEL, "int64"))


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

        `first_row` is the index of its first row, for messages. Raises SourceError.
        """
        if self._plan.label_from:
            number = self._numbers[label_of(source, self._plan.label_from)]
            label = np.full(block.rows, number, dtype=np.int64)
            block = replace(block, columns={**block.columns, LABEL: label})
        if self._may_be_nan:
            _refuse_nan_labels(source, block, first_row)
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
        if plan.key is None:
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
