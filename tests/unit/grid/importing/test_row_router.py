"""Rows come to all stores that hold their partitions, whatever the channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from insitu.base.errors import GridError
from insitu.base.paths import Paths
from insitu.base.spec import Column, NodeId
from insitu.grid.importing.row_router import RowRouter, StoresHere, check_same
from insitu.grid.intake.partition_builder import Finished
from insitu.grid.intake.row_plan import Destination, RowPlan
from insitu.grid.partitions import file_checksum
from insitu.grid.sources import Block

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
PLAN = RowPlan(
    token="t-1",
    names=("d",),
    fractions=(1.0,),
    partitions=3,
    columns=(Column("x", "int64"),),
    labels=(),
    label_from="",
    key=None,
    block_rows=10,
    codec=None,
    drop_pages=False,
    primaries=(),
    destinations=(Destination("d", 0, (A, B)), Destination("d", 1, (C,)), Destination("d", 2, (B,))),
)


class Elsewhere:
    """Stores of another channel: they hold destination 1, and count its rows."""

    def __init__(self, there: int, adds: int = 0) -> None:
        self.there, self.begun, self.rows, self.closed = there, -1, adds, False

    def open(self, *, adopt: bool) -> Iterable[tuple[int, int]]:
        return [(1, self.there if adopt else 0)]

    def begin(self, unit: int, counts: npt.NDArray[np.int64]) -> None:
        self.begun = int(counts[1])

    def append(self, block: Block, destinations: npt.NDArray[np.int64] | None) -> None:
        assert destinations is not None
        self.rows += int((destinations == 1).sum())

    def finish(self, units: int) -> Iterable[tuple[int, NodeId, Finished]]:
        return [(1, C, Finished(self.rows, 1, "crc32:00000000", 0, ()))]

    def stop(self, *, close: bool) -> None:
        self.closed = close


def append(router: RowRouter) -> None:
    values = np.arange(90)
    router.begin(0, [0, 0, 0])
    router.append(Block({"x": values}, 90, 0, 0), values % 3)


def test_each_channel_takes_the_rows_that_its_stores_hold(paths: Paths) -> None:
    elsewhere = Elsewhere(40)
    router = RowRouter(PLAN, [StoresHere(paths, PLAN, [A, B]), elsewhere])
    assert router.open(adopt=False).tolist() == [0, 0, 0] == router.open(adopt=True)[[0, 2, 2]].tolist()
    assert router.open(adopt=True)[1] == 40
    append(router)
    finished = router.finish(1)
    router.stop(close=True)
    assert [each.rows for each in finished] == [30, 30, 30] == router.rows.tolist()
    assert elsewhere.begun == 0 and elsewhere.closed
    staged = paths.staged("d", PLAN.token)
    for node, partition in ((A, 0), (B, 0), (B, 2)):
        assert file_checksum(staged.partition(node, partition)) == finished[partition].checksum
    assert not staged.partition(A, 2).exists() and not staged.partition(C, 1).exists()


def test_a_store_that_lacks_rows_ends_the_import(paths: Paths) -> None:
    router = RowRouter(PLAN, [StoresHere(paths, PLAN, [A, B]), Elsewhere(0, adds=-1)])
    append(router)
    with pytest.raises(GridError, match="Partition 1 of d must have 30 rows"):
        router.finish(1)
    router.stop(close=True)


def test_copies_must_be_alike() -> None:
    one = Finished(1, 2, "crc32:00000000", 0, ())
    assert Finished.from_json(one.to_json()) == one
    assert check_same([(A, one), (B, one)], "p") == one
    with pytest.raises(GridError, match=r"Received: p with 2 bytes .* on a, with 3"):
        check_same([(A, one), (B, replace(one, bytes=3))], "p")
