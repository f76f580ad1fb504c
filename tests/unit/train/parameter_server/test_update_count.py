"""A fit ends by the updates of the servers: those planned, or a lower number of the chief's."""

from __future__ import annotations

from typing import Any

from insitu.train.parameter_server.server_marks import UpdateCount, UpdatePlan


class Marks:
    """What servers keep, and the version that a worker pulled last."""

    def __init__(self) -> None:
        self.version = 0
        self.numbers: dict[tuple[str, int], int] = {}
        self.started: set[int] = set()
        self.reads = 0

    def is_started(self, fit: int) -> bool:
        return fit in self.started

    def set_number(self, name: str, fit: int, number: int) -> None:
        self.numbers[name, fit] = number

    def read_number(self, name: str, fit: int) -> int:
        self.reads += 1
        return self.numbers.get((name, fit), 0)


def counts(marks: Any, workers: int = 1) -> list[UpdateCount]:
    now = [0.0]
    made = [UpdateCount(marks, lambda: now[0]) for _ in range(workers)]
    for count in made:
        count.clock = now  # type: ignore[attr-defined]
    return made


def test_a_fit_ends_with_the_planned_number_also_for_a_worker_that_comes_later() -> None:
    marks = Marks()
    (count,) = counts(marks)
    count.begin(0, UpdatePlan(limit=5))
    marks.version = 4
    assert not count.is_over()
    marks.version = 6
    assert count.is_over() and count.count == 6
    (later,) = counts(marks)
    later.begin(0, UpdatePlan(limit=5))
    assert later.is_at_limit


def test_updates_of_an_earlier_job_count_unless_the_fit_was_started() -> None:
    marks = Marks()
    chief, other = counts(marks, 2)
    chief.offer_first(0, 30)
    marks.started.add(0)
    for count in (chief, other):
        count.begin(0, UpdatePlan(limit=40))
    marks.version = 3
    assert (chief.count, other.count) == (33, 33)
    (again,) = counts(marks)
    again.offer_first(0, 33)  # the chief was restarted, and reads a newer checkpoint
    again.begin(0, UpdatePlan(limit=40))
    assert again.count == 33


def test_the_chief_ends_it_for_all() -> None:
    marks = Marks()
    chief, slow, exact = counts(marks, 3)
    for count in (chief, slow, exact):
        count.begin(2, UpdatePlan(limit=None, asks_each_step=count is exact))
    marks.version = 7
    assert not any(count.is_over() for count in (chief, slow, exact))
    chief.end_at(8)
    marks.version = 8
    assert chief.is_over() and exact.is_over()
    assert not slow.is_over()  # it hasn't looked
    slow.clock[0] += 1  # type: ignore[attr-defined]
    assert slow.is_over()
    reads = marks.reads
    assert slow.is_over() and marks.reads == reads


def test_a_lower_limit_wins() -> None:
    marks = Marks()
    (count,) = counts(marks)
    count.begin(0, UpdatePlan(limit=5))
    count.end_at(9)
    marks.version = 5
    assert count.is_at_limit
