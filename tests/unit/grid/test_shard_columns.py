"""The columns of a shard whose partitions are mapped as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from partition_rows import columns, make_rows, write_rows

from insitu.base.spec import Column
from insitu.grid.layout import ShuffledPlan
from insitu.grid.partitions import AddressSpace, Partition
from insitu.grid.reading.cache_reader import ShardColumns


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    columns(), st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, 20), st.integers(1, 30)
)
def test_rows_come_as_they_were_written(
    tmp_path: Path, columns: tuple[Column, ...], lengths: list[int], block_rows: int, size: int
) -> None:
    partitions, parts = [], []
    for number, rows in enumerate(lengths):
        path = tmp_path / f"part-{number}"
        path.unlink(missing_ok=True)
        parts.append(make_rows(columns, rows, seed=number))
        write_rows(path, columns, parts[-1], rows, block_rows or max(1, rows))
        partitions.append(Partition(path, columns, rows, block_rows))
    starts = [0, *np.cumsum(lengths).tolist()]
    whole = {c.name: np.concatenate([part[c.name] for part in parts]) for c in columns}
    order = np.random.default_rng(0).permutation(starts[-1])
    plan = ShuffledPlan(starts, size, order)
    shard = ShardColumns(partitions, columns, columns)
    for step in range(plan.steps):
        selection = plan.rows_of_batch(step)
        taken = shard.take_batch(plan, step)
        positions = np.concatenate([starts[k] + rows for k, rows in selection])
        assert sorted(positions) == sorted(order[step * size : (step + 1) * size])
        for column, values in zip(columns, taken, strict=True):
            np.testing.assert_array_equal(values, whole[column.name][positions])


@pytest.mark.parametrize(("names", "few", "expected"), [("a", False, 3), ("ab", False, None), ("a", True, 0)])
def test_only_pages_that_will_be_used_are_mapped_ahead(
    tmp_path: Path, names: str, few: bool, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = (Column("a", "int64"), Column("b", "uint8", (100,)))
    write_rows(tmp_path / "p", columns, make_rows(columns, 50), 50, 20)
    asked: list[int | None] = []
    monkeypatch.setattr(
        AddressSpace, "prefault", lambda self, pieces: asked.append(None if pieces is None else len(pieces))
    )
    chosen = [column for column in columns if column.name in names]
    ShardColumns([Partition(tmp_path / "p", columns, 50, 20)], columns, chosen, few=few)
    assert asked == ([] if few else [expected])
