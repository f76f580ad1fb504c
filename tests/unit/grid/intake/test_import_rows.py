"""What is done to rows between reading and routing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.intake.import_rows import ImportRows, columns_of_rows, count_routed
from insitu.grid.intake.row_plan import Destination, RowPlan
from insitu.grid.layout import hash_rows, partition_of_rows, split_of_rows
from insitu.grid.sources import Block

X = Column("x", "float32")
SOURCE: Any = SimpleNamespace(path="/data/dog.npy", columns=(X,))


def make_plan(columns: tuple[Column, ...], labels: tuple[str, ...] = (), partitions: int = 3) -> RowPlan:
    names = ("d/train", "d/test") if partitions > 1 else ("d",)
    return RowPlan(
        token="t",
        names=names,
        fractions=(0.5, 0.5) if partitions > 1 else (1.0,),
        partitions=partitions,
        columns=columns,
        labels=labels,
        label_from="filename" if labels else "",
        key=None,
        block_rows=10,
        codec=None,
        drop_pages=False,
        primaries=(),
        destinations=tuple(Destination(name, p, ()) for name in names for p in range(partitions)),
    )


def make_block(rows: int, name: str = "x") -> Block:
    return Block({name: np.arange(rows, dtype=np.float32)}, rows, 0, 0)


def test_the_name_of_a_file_makes_a_column() -> None:
    columns = columns_of_rows(SOURCE, "filename")
    assert columns == (X, Column("label", "int64")) and columns_of_rows(SOURCE, "") == (X,)
    rows = ImportRows(make_plan(columns, ("cat", "dog")))
    prepared = rows.prepare(SOURCE, make_block(4), 0)
    assert prepared.columns["label"].tolist() == [1] * 4 and prepared.columns["x"].tolist() == [0, 1, 2, 3]


def test_labels_of_nan_are_refused() -> None:
    rows, block = ImportRows(make_plan((Column("label", "float32"),))), make_block(4, "label")
    assert rows.prepare(SOURCE, block, 0) is block
    block.columns["label"][2] = np.nan
    with pytest.raises(
        SourceError, match=r"1 of the labels of rows .100, 104. are NaN, the first in row 102"
    ):
        rows.prepare(SOURCE, block, 100)


def test_the_index_of_a_row_chooses_its_destination() -> None:
    rows, block = ImportRows(make_plan((X,))), make_block(50)
    hashes = hash_rows(7, 57)
    expected = split_of_rows(hashes, (0.5, 0.5)) * 3 + partition_of_rows(hashes, 3)
    found = rows.route(block, 7)
    assert found is not None and found.tolist() == expected.tolist()
    assert count_routed(block, found, 6).tolist() == np.bincount(expected, minlength=6).tolist()


def test_rows_that_bring_their_partition_go_there() -> None:
    plan = make_plan((X,))
    rows = ImportRows(replace(plan, primaries=("a", "b", "a")))  # type: ignore[arg-type]
    block = replace(make_block(3), partitions=np.array([2, 0, 1]))
    assert rows.route(block, 0) is block.partitions
    alone = ImportRows(make_plan((X,), partitions=1))
    assert alone.route(block, 0) is None and count_routed(block, None, 1).tolist() == [3]
