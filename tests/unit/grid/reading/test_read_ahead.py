"""Shards that are read window by window."""

from __future__ import annotations

import os
import threading
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from partition_rows import columns, make_rows, write_rows

from insitu.base.errors import CorruptPartition
from insitu.base.spec import Column
from insitu.grid.layout import FileOrder, ShuffledPlan, WindowedOrder, WindowOrder
from insitu.grid.partitions import BlockReader, Partition
from insitu.grid.reading.read_ahead import ReadAhead, ShardSource, WindowedColumns, read_rows


def make_shard(
    folder: Path, columns: tuple[Column, ...], lengths: list[int], block_rows: int, direct: bool = False
) -> tuple[ShardSource, dict[str, np.ndarray]]:
    """Return a shard of partitions of so many rows, and all rows of each column."""
    readers, parts = [], []
    for number, rows in enumerate(lengths):
        path = folder / f"part-{number}"
        path.unlink(missing_ok=True)
        parts.append(make_rows(columns, rows, seed=number))
        write_rows(path, columns, parts[-1], rows, block_rows)
        partition = Partition(path, columns, rows, block_rows)
        readers.append(BlockReader(partition, columns, columns, direct=direct))
    whole = {c.name: np.concatenate([part[c.name] for part in parts]) for c in columns}
    return ShardSource(readers, np.array([0, *np.cumsum(lengths)]), block_rows, columns, columns), whole


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    columns(),
    st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(sum),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 50),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_rows_come_in_the_order_of_the_windows(
    tmp_path: Path,
    columns: tuple[Column, ...],
    lengths: list[int],
    block_rows: int,
    window_blocks: int,
    size: int,
    start: int,
    in_order: bool,
    direct: bool,
) -> None:
    shard, whole = make_shard(tmp_path, columns, lengths, block_rows, direct)
    order: WindowOrder = WindowedOrder(shard.starts, block_rows, window_blocks, seed=1, epoch=2, shard=0)
    if in_order:
        order = FileOrder(shard.starts, block_rows, window_blocks)
    plan = ShuffledPlan(shard.starts, size, order)
    read = WindowedColumns(shard, order, ReadAhead())
    for step in range(start, plan.steps):
        positions = np.concatenate([shard.starts[k] + rows for k, rows in plan.rows_of_batch(step)])
        for column, values in zip(columns, read.take_batch(plan, step), strict=True):
            np.testing.assert_array_equal(values, whole[column.name][positions])
    read.close()


@pytest.mark.parametrize("width", [115, 127, 139])
@pytest.mark.parametrize("block_rows", [6, 9])
def test_direct_reads_of_rows_of_odd_size_leave_other_blocks_alone(
    tmp_path: Path, width: int, block_rows: int
) -> None:
    """Such blocks have no pages of their own, and some begin where they could be read in place."""
    columns = (Column("x", "uint8", (width,)), Column("y", "int64"))
    shard, whole = make_shard(tmp_path, columns, [26, 30, 16, 17], block_rows, direct=True)
    order = WindowedOrder(shard.starts, block_rows, 2, seed=1, epoch=2, shard=0)
    plan = ShuffledPlan(shard.starts, 30, order)
    read = WindowedColumns(shard, order, ReadAhead())
    for step in range(plan.steps):
        positions = np.concatenate([shard.starts[k] + rows for k, rows in plan.rows_of_batch(step)])
        for column, values in zip(columns, read.take_batch(plan, step), strict=True):
            np.testing.assert_array_equal(values, whole[column.name][positions])
    read.close()


COLUMNS = (Column("x", "int64"),)


class Held:
    """A source whose reads wait until they may continue; it notes which were asked for."""

    def __init__(self, reader: BlockReader) -> None:
        self.may_go_on = threading.Event()
        self.began = threading.Event()
        self.asked: list[int] = []
        self._reader = reader

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)

    def read(self, block: int, memory: np.ndarray, start: int, *, owns_pages: bool = False) -> None:
        self.asked.append(block)
        self.began.set()
        assert self.may_go_on.wait(60)
        self._reader.read(block, memory, start, owns_pages=owns_pages)


def make_held(folder: Path) -> tuple[Held, ShardSource, WindowedOrder, ShuffledPlan]:
    shard, _ = make_shard(folder, COLUMNS, [120], 10)
    held = Held(shard.partitions[0])
    shard = ShardSource([held], shard.starts, 10, COLUMNS, COLUMNS)
    order = WindowedOrder(shard.starts, 10, 3, seed=1, epoch=0, shard=0)
    return held, shard, order, ShuffledPlan(shard.starts, 30, order)


def test_the_next_window_is_read_and_no_further(tmp_path: Path) -> None:
    held, shard, order, plan = make_held(tmp_path)
    held.may_go_on.set()
    read = WindowedColumns(shard, order, ReadAhead())
    for step, windows in enumerate([2, 3, 4, 4]):
        read.take_batch(plan, step)
        read.begin(step + 1)
        for window in list(read._windows.values()):
            for future in window._reads:
                future.result(20)
        assert len(held.asked) == len(set(held.asked)) == 3 * windows
    read.close()


def test_the_first_window_of_the_next_epoch_is_asked_for_once(tmp_path: Path) -> None:
    held, shard, order, plan = make_held(tmp_path)
    held.may_go_on.set()
    read, calls = WindowedColumns(shard, order, ReadAhead()), []
    read.at_last_window = lambda: calls.append(len(held.asked))
    for step in range(4):
        assert not calls or step == 3
        read.take_batch(plan, step)
    assert len(calls) == 1


def test_closing_ends_reads_that_have_not_begun(tmp_path: Path) -> None:
    held, shard, order, _ = make_held(tmp_path)
    ahead = ReadAhead()
    read = WindowedColumns(shard, order, ahead)
    read.begin(0)
    read.begin(1)
    closing = threading.Thread(target=read.close)
    closing.start()
    held.may_go_on.set()
    closing.join(60)
    assert not closing.is_alive() and len(held.asked) <= 6
    assert len(ahead.take_memory(1)) > 1


def test_closing_waits_for_no_read(tmp_path: Path) -> None:
    held, shard, order, _ = make_held(tmp_path)
    ahead = ReadAhead()
    read = WindowedColumns(shard, order, ahead)
    read.begin(0)
    memory = read._windows[0]._memory
    reads = list(read._windows[0]._reads)
    assert held.began.wait(60)
    read.close()
    assert not any(free is memory for free in ahead._free), "something is still read into it"
    held.may_go_on.set()
    wait([each for each in reads if not each.cancelled()], 20)
    for _ in range(400):  # the thread gives it back after that
        if any(free is memory for free in ahead._free):
            return
        threading.Event().wait(0.05)
    raise AssertionError("the memory wasn't given back")


def test_a_forked_process_reads_what_was_under_way(tmp_path: Path) -> None:
    held, shard, order, plan = make_held(tmp_path)
    read = WindowedColumns(shard, order, ReadAhead())
    read.begin(0)
    assert held.began.wait(60)
    child = os.fork()
    if not child:
        code = 1
        try:
            held.may_go_on.set()
            code = 0 if len(read.take_batch(plan, 0)[0]) == 30 else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    held.may_go_on.set()
    assert len(read.take_batch(plan, 0)[0]) == 30


@pytest.mark.parametrize("count", [1, 700])
def test_some_rows_are_read(tmp_path: Path, count: int) -> None:
    columns = (Column("x", "int16", (3,)), Column("t", "str"))
    shard, whole = make_shard(tmp_path, columns, [995], 10)
    rows = np.random.default_rng(0).integers(0, 995, count)
    for column, found in zip(columns, read_rows(shard, rows, ReadAhead()), strict=True):
        np.testing.assert_array_equal(found, whole[column.name][rows])


def test_errors_of_a_thread_come_to_the_one_who_asks(tmp_path: Path) -> None:
    shard, _ = make_shard(tmp_path, COLUMNS, [120], 10)
    (tmp_path / "part-0").write_bytes(bytes((tmp_path / "part-0").stat().st_size))
    order = WindowedOrder(shard.starts, 10, 3, seed=1, epoch=0, shard=0)
    with pytest.raises(CorruptPartition, match="block"):
        WindowedColumns(shard, order, ReadAhead()).take_batch(ShuffledPlan(shard.starts, 30, order), 0)
