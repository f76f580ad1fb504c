"""Results of several threads, in the order of what they were made from."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from insitu.grid.sources import parallel
from insitu.grid.sources.parallel import map_ordered


def test_results_come_in_order_though_the_first_is_made_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "count_threads", lambda most: 2)
    second = threading.Event()

    def double(item: int) -> int:
        if item == 0:
            assert second.wait(60)
        second.set()
        return 2 * item

    assert list(map_ordered(double, range(10))) == list(range(0, 20, 2))


def test_items_are_taken_one_more_than_threads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "count_threads", lambda most: 2)
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(10):
            taken.append(item)
            yield item

    results = map_ordered(lambda item: item, items())
    assert next(results) == 0
    assert taken == [0, 1, 2]
    results.close()


def test_an_error_is_raised_in_its_turn() -> None:
    def invert(item: int) -> float:
        return 1 / item

    results = map_ordered(invert, [2, 1, 0, 4])
    assert [next(results), next(results)] == [0.5, 1.0]
    with pytest.raises(ZeroDivisionError):
        next(results)
