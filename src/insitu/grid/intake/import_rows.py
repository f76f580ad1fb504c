"""Which label the rows of a block get, and which partition each of them goes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from insitu.base.errors import SourceError
from insitu.grid.intake.import_plan import LABEL, ImportPlan
from insitu.grid.intake.row_plan import RowPlan
from insitu.grid.layout import hash_integers, hash_rows, hash_texts, partition_of_rows, split_of_rows
from insitu.grid.partitions import text_buffers
from insitu.grid.sources import Block, Source, stem


def label_of(source: Source) -> str:
    """Return the label that a file's name makes."""
    return stem(Path(source.path) if isinstance(source.path, str) else source.path)


def add_labels(numbers: Mapping[str, int], source: Source, block: Block) -> Block:
    """Return the block with the label of its file, as a number, if file names make labels."""
    if not numbers:
        return block
    label = np.full(block.rows, numbers[label_of(source)], dtype=np.int64)
    return replace(block, columns={**block.columns, LABEL: label})


def refuse_nan_labels(source: Source, block: Block, first_row: int) -> None:
    """Raise SourceError if a label is NaN."""
    bad = np.isnan(block.columns[LABEL]).reshape(block.rows, -1).any(axis=1)
    if bad.any():
        raise SourceError(
            f"{source.path}: {int(bad.sum())} of the labels of rows [{first_row}, {first_row + block.rows}) "
            f"are NaN, the first in row {first_row + int(bad.argmax())}, counted over all sources. Drop or "
            f"fill these rows"
        )


def find_destinations(
    plan: ImportPlan | RowPlan, block: Block, first_row: int
) -> npt.NDArray[np.int64] | None:
    """Return the partition of each row, counted over all names; None if there is one alone."""
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
