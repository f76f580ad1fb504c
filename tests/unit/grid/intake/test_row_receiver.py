"""Rows that come from several readers enter partitions in the order of their units, each once."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from agent_hosts import wait_until

from insitu.base.errors import GridError, InputError
from insitu.base.paths import Paths
from insitu.base.spec import Column, NodeId
from insitu.grid.intake import row_receiver
from insitu.grid.intake.partition_builder import Finished
from insitu.grid.intake.row_plan import Destination, RowPlan
from insitu.grid.intake.row_receiver import RowIntake, RowMessage
from insitu.grid.partitions import file_checksum, make_batch
from insitu.grid.sources import Block

A, B = NodeId("a"), NodeId("b")
COLUMNS = (Column("x", "int64"),)
PLAN = RowPlan(
    token="t-1",
    names=("d",),
    fractions=(1.0,),
    partitions=3,
    columns=COLUMNS,
    labels=(),
    label_from="",
    key=None,
    block_rows=10,
    codec=None,
    drop_pages=False,
    primaries=(),
    destinations=(Destination("d", 0, (A,)), Destination("d", 1, (B,)), Destination("d", 2, (A, B))),
)


@pytest.fixture
def intake(paths: Paths) -> Iterator[RowIntake]:
    found = RowIntake(paths, A, PLAN)
    yield found
    found.stop()


def message(unit: int, sequence: int, first: list[int], second: list[int], last: bool = False) -> RowMessage:
    values = np.array([*first, *second], np.int64)
    batch = make_batch(COLUMNS, len(values), {"x": values})
    return RowMessage(unit, sequence, last, np.array([len(first), len(second)]), batch)


def make_messages(units: int, each: int) -> list[RowMessage]:
    """Messages of some units: row i of unit u is u * 1000 + i in one partition, negative in the other."""
    found = []
    for unit in range(units):
        for number in range(each):
            rows = [unit * 1000 + number * 10 + i for i in range(7)]
            found.append(message(unit, number, rows, [-row for row in rows[:3]], number == each - 1))
    return found


def read(paths: Paths, partition: int, finished: Finished) -> list[int]:
    file = paths.staged("d", PLAN.token).partition(A, partition)
    assert file.stat().st_size == finished.bytes
    with pa.OSFile(str(file), "rb") as opened, pa.ipc.open_file(opened) as reader:
        assert all(reader.get_batch(i).num_rows == 10 for i in range(reader.num_record_batches - 1))
        return [int(value) for value in reader.read_all()["x"].to_pylist()]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("in_memory", [0, 300, 1 << 20])
def test_rows_enter_in_the_order_of_units_if_they_come_in_another(
    paths: Paths, seed: int, in_memory: int, intake: RowIntake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of units come in any order; each sends its messages in order, some twice. Of what waits no more
    than that is in memory."""
    monkeypatch.setattr(row_receiver, "_AHEAD_BYTES", in_memory)
    draw = random.Random(seed)
    readers = [[m for m in make_messages(4, 5) if m.unit == unit] for unit in range(4)]
    intake.open(adopt=True)
    intake.begin(0, [0, 0])
    while any(readers):
        reader = draw.choice([r for r in readers if r])
        if not intake.take(reader[0]):
            continue  # the partitions don't keep pace
        assert intake._bytes <= in_memory
        if draw.random() < 0.7:
            reader.pop(0)
    first, second = intake.finish(4)
    expected = [u * 1000 + n * 10 + i for u in range(4) for n in range(5) for i in range(7)]
    assert read(paths, 0, first) == expected
    assert read(paths, 2, second) == [-row for row in expected if row % 10 < 3]
    assert not list(paths.staged("d", PLAN.token).root.glob("ahead-a/*")) and intake._bytes == 0


def test_rows_that_are_read_on_this_host_enter_without_messages(paths: Paths, intake: RowIntake) -> None:
    values = np.arange(95, dtype=np.int64)
    with pytest.raises(InputError, match="takes rows once it has begun"):
        intake.append(Block({"x": values}, 95, 0, 0), values % 2)
    intake.begin(0, [0, 0])
    for first in range(0, 95, 19):
        some = values[first : first + 19]
        intake.append(Block({"x": some}, 19, 0, 0), some % 2)
    intake.end_unit()
    even, odd = intake.finish(1)
    assert read(paths, 0, even) == list(range(0, 95, 2)) and read(paths, 2, odd) == list(range(1, 95, 2))
    intake.stop()
    with pytest.raises(GridError, match="has ended on this host"):
        intake.append(Block({"x": values}, 95, 0, 0), values % 2)


@pytest.mark.parametrize("is_changed", [False, True])
def test_large_blocks_are_read_back_from_the_disk(paths: Paths, is_changed: bool) -> None:
    columns = (Column("x", "uint8", (1000,)),)
    intake = RowIntake(paths, A, replace(PLAN, columns=columns, block_rows=400))
    try:
        intake.begin(0, [0, 0])
        values = np.random.default_rng(0).integers(0, 255, (2500, 1000), dtype=np.uint8)
        intake.append(Block({"x": values}, 2500, 0, 0), np.zeros(2500, np.int64))
        path = paths.staged("d", PLAN.token).partition(A, 0)
        wait_until(lambda: path.exists() and path.stat().st_size > 6 * 400_000, "six blocks")
        if is_changed:
            with path.open("r+b") as file:
                os.pwrite(file.fileno(), b"changed", 1_000_000)
        intake.end_unit()
        if is_changed:
            with pytest.raises(GridError, match="must have the checksum"):
                intake.finish(1)
        else:
            found, _ = intake.finish(1)
            assert file_checksum(path) == found.checksum and path.stat().st_size == found.bytes
            with pa.OSFile(str(path), "rb") as file, pa.ipc.open_file(file) as reader:
                read = reader.read_all()["x"].combine_chunks().to_numpy_ndarray()
            assert (read == values).all()
        assert intake._builders._writers[0].is_read_back
    finally:
        intake.stop()


def test_what_does_not_follow_is_refused(intake: RowIntake) -> None:
    intake.begin(0, [0, 0])
    with pytest.raises(InputError, match="Message 0 of unit 0 follows"):
        intake.take(message(0, 1, [1], []))
    assert intake.take(message(0, 0, [1], [], last=True))
    with pytest.raises(InputError, match="of unit 1 follows"):
        intake.take(message(1, 3, [1], []))
    with pytest.raises(InputError, match="a count for each of 2 files"):
        intake.take(RowMessage(1, 0, False, np.array([1]), message(1, 0, [1], []).batch))
    with pytest.raises(InputError, match="begins once"):
        intake.begin(0, [0, 0])
    with pytest.raises(GridError, match=r"An import of 2 units ends with the last one. Received: 1"):
        intake.finish(2)


def test_an_error_of_the_disk_reaches_the_senders(paths: Paths, intake: RowIntake) -> None:
    intake.begin(0, [0, 0])
    paths.staged("d", PLAN.token).store(A).rmdir()
    with pytest.raises(FileNotFoundError):
        for number in range(1000):
            intake.take(message(0, number, list(range(10)), []))
    intake.stop()


def test_what_an_intake_has_taken_ends_with_it(intake: RowIntake) -> None:
    intake.begin(0, [0, 0])
    intake.take(message(3, 0, [1], []))
    intake.stop()
    with pytest.raises(GridError, match="has ended on this host"):
        intake.take(message(0, 0, [1], []))


def test_a_node_without_partitions_takes_no_rows(paths: Paths) -> None:
    with pytest.raises(InputError, match="c holds none"):
        RowIntake(paths, NodeId("c"), PLAN)


def test_a_plan_goes_over_the_wire() -> None:
    assert RowPlan.from_json(PLAN.to_json()) == PLAN
    assert (PLAN.held_by(A), PLAN.held_by(B)) == ([0, 2], [1, 2])


@pytest.mark.parametrize(
    "change",
    [
        {"token": "../x"},
        {"names": ["../x"]},
        {"fractions": []},
        {"block_rows": 0},
        {"codec": "zip"},
        {"columns": []},
        {"columns": [{"name": "x", "dtype": "object", "shape": []}]},
        {"destinations": []},
        {"destinations": [{"cache": "other", "partition": 0, "owners": ["a"]}] * 3},
        {"destinations": [{"cache": "d", "partition": 0, "owners": ["../a"]}] * 3},
        {"more": 1},
    ],
)
def test_plans_of_other_forms_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        RowPlan.from_json({**PLAN.to_json(), **change})
    with pytest.raises(InputError):
        RowPlan.from_json(None)
