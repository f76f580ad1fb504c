"""The order of rows and how it is cut into batches."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import InputError
from insitu.grid.layout import order as module
from insitu.grid.layout.order import (
    BatchPlan,
    ChosenOrder,
    ShuffledPlan,
    batch_sizes,
    order_rows,
    shuffled,
    steps_of_shard,
)


def test_the_order_is_that_of_every_release() -> None:
    """A job that continues after an upgrade must find its rows in the order that it left them in."""
    assert shuffled(12, seed=7, epoch=0, shard=0).tolist() == PINNED_0
    assert shuffled(12, seed=7, epoch=1, shard=0).tolist() == PINNED_1
    assert shuffled(12, seed=7, epoch=0, shard=1).tolist() == PINNED_2


PINNED_0 = [8, 4, 1, 6, 3, 2, 11, 7, 5, 9, 10, 0]
PINNED_1 = [11, 3, 7, 10, 8, 1, 9, 6, 4, 5, 0, 2]
PINNED_2 = [11, 3, 9, 1, 6, 2, 5, 4, 8, 0, 7, 10]


@given(st.integers(0, 3000), st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_an_order_is_a_permutation(rows: int, seed: int, epoch: int, shard: int) -> None:
    order = shuffled(rows, seed, epoch, shard)
    assert np.array_equal(np.sort(order), np.arange(rows))
    assert np.array_equal(order, shuffled(rows, seed, epoch, shard))


def test_orders_are_well_mixed() -> None:
    """Every row comes at every place about equally often."""
    firsts = [int(shuffled(8, seed, 0, 0)[0]) for seed in range(4000)]
    assert np.bincount(firsts, minlength=8).min() > 400 and np.bincount(firsts).max() < 600


@given(st.integers(1, 1000), st.integers(1, 50))
def test_batch_sizes_are_even(size: int, shards: int) -> None:
    if size < shards:
        with pytest.raises(InputError, match="at least one row per shard"):
            batch_sizes(size, shards)
        return
    sizes = batch_sizes(size, shards)
    assert sum(sizes) == size and max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 30),
    st.booleans(),
    st.integers(1, 60),
)
def test_batches_hold_each_row_once(lengths: list[int], size: int, shuffle: bool, window: int) -> None:
    starts = [0, *np.cumsum(lengths).tolist()]
    order = shuffled(starts[-1], 3, 1, 2) if shuffle else np.arange(starts[-1])
    plan = ShuffledPlan(starts, size, order)
    plan.window_steps = max(1, window // size)
    assert plan.steps == steps_of_shard(starts[-1], size)
    seen: list[tuple[int, int]] = []
    for step in range(plan.steps):
        pieces = plan.rows_of_batch(step)
        if not shuffle:
            ranges = BatchPlan(starts, size).ranges(step)
            assert ranges == [(k, rows[0], rows[-1] + 1) for k, rows in pieces]
        rows = [(k, int(row)) for k, of_partition in pieces for row in of_partition]
        assert len(rows) == min(size, starts[-1] - step * size)
        assert [k for k, _ in pieces] == sorted({k for k, _ in pieces})
        positions = sorted(starts[k] + row for k, row in rows)
        assert positions == sorted(order[step * size : (step + 1) * size].tolist())
        seen += rows
    assert sorted(seen) == [(k, row) for k, length in enumerate(lengths) for row in range(length)]


def test_any_step_can_be_the_first() -> None:
    order = shuffled(10_000, 0, 0, 0)
    through = ShuffledPlan([0, 4000, 10_000], 32, order)
    expected = [through.rows_of_batch(step) for step in range(through.steps)]
    for step in (300, 0, 17, 312, 16):
        pieces = ShuffledPlan([0, 4000, 10_000], 32, order).rows_of_batch(step)
        assert [(k, rows.tolist()) for k, rows in pieces] == [
            (k, rows.tolist()) for k, rows in expected[step]
        ]


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(sum), st.integers(1, 30), st.integers(1, 13)
)
def test_a_plan_finds_the_partition_of_each_row(lengths: list[int], size: int, bits: int) -> None:
    starts = [0, *np.cumsum(lengths).tolist()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FINDER_BITS", bits)
        plan = ShuffledPlan(starts, size, np.random.default_rng(0).permutation(starts[-1]))
        found = [
            (k, row) for step in range(plan.steps) for k, rows in plan.rows_of_batch(step) for row in rows
        ]
    assert sorted(found) == [(k, row) for k, count in enumerate(lengths) for row in range(count)]


@pytest.fixture
def few_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of more than 50 rows count as too large to be sorted."""
    monkeypatch.setattr(module, "MOST_SORTED", 50)


def test_an_order_that_is_not_sorted_has_each_row_once_and_follows_from_its_key(few_sorted: None) -> None:
    orders = [order_rows(1000, *key) for key in [(1, 0, 0), (1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]]
    found = [order[0:1000].tolist() for order in orders]
    assert all(sorted(each) == list(range(1000)) for each in found)
    assert found[0] == found[1] and len({tuple(each) for each in found}) == 4
    assert np.concatenate([orders[0][0:300], orders[0][300:2000]]).tolist() == found[0]
    assert len(orders[0]) == 1000 and order_rows(50, 1, 0, 0)[0:50].tolist() == shuffled(50, 1, 0, 0).tolist()


def test_rows_that_were_chosen_come_in_that_order(few_sorted: None) -> None:
    positions, order = np.arange(0, 300, 3), order_rows(100, 1, 0, 0)
    chosen = ChosenOrder(positions, order)
    assert len(chosen) == 100 and chosen[10:20].tolist() == (order[10:20] * 3).tolist()


def test_a_shard_of_ten_billion_rows_begins_at_once() -> None:
    """Neither the memory nor the work for a batch grows with the rows."""
    starts = [0, 3 * 10**9, 10**10]
    tracemalloc.start()
    plan = ShuffledPlan(starts, 256, order_rows(10**10, 7, 0, 0))
    seen = [plan.rows_of_batch(step) for step in (0, plan.steps // 2, plan.steps - 1)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20
    assert plan.steps == 39_062_500 and all(sum(len(rows) for _, rows in each) == 256 for each in seen)
    for each in seen:
        assert all(rows.min() >= 0 and rows.max() < starts[k + 1] - starts[k] for k, rows in each)
    # A row in three is in the first partition.
    assert 40 < len(seen[0][0][1]) < 120


PINNED_PERMUTED = [24, 16, 11, 8, 3, 39, 41, 26]


def test_an_order_that_is_not_sorted_is_that_of_every_release(few_sorted: None) -> None:
    assert order_rows(60, 7, 1, 2)[0:8].tolist() == PINNED_PERMUTED
