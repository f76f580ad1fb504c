"""The columns of a shard that is mapped as a whole, so that rows of all its partitions are taken at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.errors import CorruptPartition
from insitu.grid.layout import Rows, ShuffledPlan, count_blocks_before
from insitu.grid.partitions import (
    AddressSpace,
    BlockChecks,
    BlockedValues,
    Partition,
    body_alignment,
    is_variable,
    row_bytes,
)
from insitu.spec import Column


class ShardColumns:
    """Chosen columns of all partitions of a shard, by the position of a row in the shard."""

    def __init__(
        self,
        partitions: Sequence[Partition],
        all_columns: tuple[Column, ...],
        columns: Sequence[Column],
        *,
        few: bool = False,
    ) -> None:
        """`partitions` are open and not empty. `columns` are chosen out of `all_columns`. `few`: most rows
        won't be read. Raises OSError.
        """
        sizes = [partition.bytes for partition in partitions]
        space = AddressSpace([p.path for p in partitions], sizes, body_alignment(all_columns))
        self._starts = np.concatenate(([0], np.cumsum([p.rows for p in partitions])))
        self._block_rows = max(p.block_rows for p in partitions)
        first_blocks = count_blocks_before(np.diff(self._starts), self._block_rows)
        #: What is added to the position of a row, by its partition, to count rows as `BlockedValues` does.
        self._shifts = first_blocks * self._block_rows - self._starts
        self._columns = columns
        self._checks = self._make_checks(space, partitions)
        self._fixed = {c.name: self._join(space, partitions, c) for c in columns if not is_variable(c)}
        self._texts = {c.name: [p.values[c.name] for p in partitions] for c in columns if is_variable(c)}
        if not few:
            pieces = list(self._pieces())
            used = sum(size for _, size in pieces)
            # Where texts lie isn't known here, and one large piece is mapped faster than many small ones.
            space.prefault(pieces=None if self._texts or 2 * used > sum(sizes) else pieces)

    def _make_checks(self, space: AddressSpace, partitions: Sequence[Partition]) -> list[list[BlockChecks]]:
        """Return what checks each partition: its columns of fixed size where they are mapped together, its
        texts where they are mapped alone. Nothing for files without checksums of blocks."""
        fixed = [column for column in self._columns if not is_variable(column)]
        texts = [column for column in self._columns if is_variable(column)]
        checks: list[list[BlockChecks]] = [[] for _ in partitions]
        for found, partition, offset in zip(checks, partitions, space.offsets.tolist(), strict=True):
            if fixed and partition.is_marked:
                found.append(BlockChecks(partition.layout(fixed), space, offset, len(partition.places)))
            if texts and partition.is_marked:
                found.append(partition.make_checks(texts))
        return checks

    def find_damage(self, plan: ShuffledPlan, step: int) -> tuple[int, CorruptPartition] | None:
        """Check the blocks of the batch of `step` that haven't been. Return the number of a partition that is
        damaged, and how; None: none is."""
        if not self._checks:
            return None
        for k, rows in plan.rows_of_batch(step):
            for checks in self._checks[k]:
                try:
                    # Texts of a partition are put together at their first use.
                    checks.check(rows // self._block_rows if not self._texts else checks.all_blocks)
                except CorruptPartition as error:
                    return k, error
        if all(checks.done for found in self._checks for checks in found):
            self._checks = []
        return None

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield (first byte of memory, bytes) for each block of each column of fixed size."""
        for column in self._columns:
            if not is_variable(column):
                size = self._block_rows * row_bytes(column)
                yield from ((start, size) for start in self._fixed[column.name].starts.tolist())

    def _join(self, space: AddressSpace, partitions: Sequence[Partition], column: Column) -> BlockedValues:
        starts = []
        for offset, partition in zip(space.offsets.tolist(), partitions, strict=True):
            values: Any = partition.values[column.name]
            starts.append(offset + values.starts[: -(-partition.rows // self._block_rows)])
        return BlockedValues(space.memory, column, self._block_rows, np.concatenate(starts))

    def _locate(self, positions: Rows, parts: Rows, place: int) -> list[Rows]:
        """Return where the rows at the given positions lie: int64 of as many, for each column but texts."""
        rows = positions + self._shifts[parts]
        return [values.locate(rows) for values in self._fixed.values()]

    def take_batch(self, plan: ShuffledPlan, step: int) -> list[npt.NDArray[Any]]:
        """Return the columns of the batch of `step`, in the order of its rows."""
        selection, located = plan.rows_of_batch(step), plan.locate_batch(step, self._locate)
        count = sum(len(rows) for _, rows in selection)
        fixed = iter(located)
        arrays = []
        for column in self._columns:
            out = np.empty((count, *column.shape), object if is_variable(column) else column.dtype)
            if is_variable(column):
                self._take_texts(column.name, selection, out)
            else:
                self._fixed[column.name].take_located(next(fixed), out)
            arrays.append(out)
        return arrays

    def _take_texts(self, name: str, selection: Sequence[tuple[int, Rows]], out: npt.NDArray[Any]) -> None:
        start = 0
        for k, rows in selection:
            self._texts[name][k].take(rows, out[start : start + len(rows)])
            start += len(rows)
