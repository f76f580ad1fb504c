"""Orders that are computed in advance."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from insitu.grid.layout import shuffled
from insitu.grid.reading import cache_reader
from insitu.grid.reading.cache_reader import OrdersAhead


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The (epoch, thread) of each order that was computed."""
    found: list[tuple[int, str]] = []

    def note(rows: int, seed: int, epoch: int, shard: int) -> np.ndarray:
        found.append((epoch, threading.current_thread().name))
        return shuffled(rows, seed, epoch, shard)

    monkeypatch.setattr(cache_reader, "order_rows", note)
    monkeypatch.setattr(cache_reader, "LEAST_ROWS", 100)
    return found


def test_a_prepared_order_is_the_same_and_computed_once(computed: list[tuple[int, str]]) -> None:
    orders = OrdersAhead()
    orders.prepare(200, 1, 2, 0)
    orders.prepare(200, 1, 2, 0)
    np.testing.assert_array_equal(orders.get(200, 1, 2, 0), shuffled(200, 1, 2, 0))
    assert [epoch for epoch, _ in computed] == [2] and computed[0][1] != threading.current_thread().name
    np.testing.assert_array_equal(orders.get(200, 1, 2, 0), shuffled(200, 1, 2, 0))
    assert len(computed) == 2, "it isn't kept after its use"


def test_one_that_is_not_used_goes_with_the_next(computed: list[tuple[int, str]]) -> None:
    orders = OrdersAhead()
    orders.prepare(200, 1, 2, 0)
    orders.prepare(200, 1, 2, 1)
    orders.get(200, 1, 7, 0)
    assert [key[1][3] for key in orders._prepared] == [1]


def test_few_rows_need_no_thread(computed: list[tuple[int, str]]) -> None:
    orders = OrdersAhead()
    orders.prepare(99, 1, 9, 0)
    assert not orders._prepared
    orders.get(99, 1, 9, 0)
    # A thread of the test before may still compute what was dropped there.
    assert [each for each in computed if each[0] == 9] == [(9, threading.current_thread().name)]


def test_so_many_rows_that_none_are_sorted_need_no_thread(
    computed: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_reader, "MOST_SORTED", 150)
    orders = OrdersAhead()
    orders.prepare(200, 1, 2, 0)
    assert not orders._prepared
