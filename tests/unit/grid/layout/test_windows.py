"""The order of shards that are shuffled by blocks and windows."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from insitu.grid.layout.order import ShuffledPlan
from insitu.grid.layout.windows import FileOrder, WindowedOrder, WindowOrder, rows_before


def make_order(lengths: list[int], block_rows: int, window_blocks: int, **key: int) -> WindowedOrder:
    starts = [0, *np.cumsum(lengths).tolist()]
    return WindowedOrder(starts, block_rows, window_blocks, **{"seed": 3, "epoch": 1, "shard": 2, **key})


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 9))
def test_each_row_comes_once(lengths: list[int], block_rows: int, window_blocks: int) -> None:
    order = make_order(lengths, block_rows, window_blocks)
    assert np.array_equal(np.sort(order[:]), np.arange(sum(lengths)))


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_it_can_be_entered_anywhere(
    lengths: list[int], block_rows: int, window_blocks: int, start: int, stop: int
) -> None:
    whole = make_order(lengths, block_rows, window_blocks)[:]
    assert np.array_equal(make_order(lengths, block_rows, window_blocks)[start:stop], whole[start:stop])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 9))
def test_rows_of_a_window_are_those_of_its_blocks(
    lengths: list[int], block_rows: int, window_blocks: int
) -> None:
    order, starts = make_order(lengths, block_rows, window_blocks), [0, *np.cumsum(lengths).tolist()]
    whole, seen = order[:], 0
    for window in range(order.num_windows):
        held = order.blocks_of_window(window)
        assert len(held.parts) <= window_blocks and held.rows.min() > 0
        expected = [
            row
            for part, block, rows in zip(held.parts, held.blocks, held.rows, strict=True)
            for row in range(starts[part] + block * block_rows, starts[part] + block * block_rows + rows)
        ]
        found = whole[seen : seen + len(expected)]
        assert sorted(found.tolist()) == expected
        assert {order.window_of(place) for place in range(seen, seen + len(expected))} == {window}
        seen += len(expected)
    assert seen == sum(lengths)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 9))
def test_windows_of_rows_as_they_lie(lengths: list[int], block_rows: int, window_blocks: int) -> None:
    starts, seen = [0, *np.cumsum(lengths).tolist()], 0
    order = FileOrder(starts, block_rows, window_blocks)
    assert np.array_equal(order[:], np.arange(sum(lengths)))
    for window in range(order.num_windows):
        rows = int(order.blocks_of_window(window).rows.sum())
        assert {order.window_of(place) for place in range(seen, seen + rows)} == {window}
        seen += rows
    assert seen == sum(lengths)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(0, 300),
    st.booleans(),
)
def test_rows_before_a_place_are_those_of_the_order(
    lengths: list[int], block_rows: int, window_blocks: int, stop: int, in_order: bool
) -> None:
    starts = [0, *np.cumsum(lengths).tolist()]
    order: WindowOrder = make_order(lengths, block_rows, window_blocks)
    if in_order:
        order = FileOrder(starts, block_rows, window_blocks)
    stop = min(stop, sum(lengths))
    found = [starts[k] + row for k, rows in rows_before(order, starts, stop) for row in rows.tolist()]
    assert sorted(found) == sorted(order[0:stop].tolist())


def test_orders_differ_by_seed_epoch_and_shard() -> None:
    base = make_order([4000], 16, 8)[:]
    for key in ({"seed": 4}, {"epoch": 2}, {"shard": 3}):
        assert np.mean(make_order([4000], 16, 8, **key)[:] == base) < 0.01


def test_the_order_is_that_of_every_release() -> None:
    """A job that continues after an upgrade must find its rows in the order that it left them in."""
    assert make_order([5, 7], 3, 2)[:].tolist() == PINNED


PINNED = [1, 0, 2, 3, 4, 10, 11, 9, 8, 6, 5, 7]


def test_batches_are_cut_from_it() -> None:
    starts = [0, 50, 120]
    order = make_order([50, 70], 8, 3)
    plan = ShuffledPlan(starts, 32, order)
    rows = [(k, row) for step in range(plan.steps) for k, found in plan.rows_of_batch(step) for row in found]
    assert sorted(rows) == [(0, row) for row in range(50)] + [(1, row) for row in range(70)]
    of_first_batch = {starts[k] + row for k, found in plan.rows_of_batch(0) for row in found}
    assert of_first_batch == set(order[:32].tolist())


def test_ten_billion_rows_take_the_memory_of_a_window() -> None:
    tracemalloc.start()
    order = make_order([10**9 + 7] * 10, 1337, 256)
    assert len(order[5 * 10**9 : 5 * 10**9 + 256]) == 256
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
