"""Who is slow: told from when tasks come to the exchange, or from the steps they are behind."""

from __future__ import annotations

from insitu.base.progress import Progress
from insitu.base.spec import TaskId
from insitu.cluster.decide.stragglers import find_stragglers

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


def test_the_one_that_always_comes_last_is_named_with_how_late_it_is() -> None:
    samples = [
        {W0: Progress(0, i, 0, i + 0.0, "exchange"), W1: Progress(0, i, 0, i + 0.25, "exchange")}
        for i in range(4)
    ]
    (lag,) = find_stragglers(samples)
    assert (lag.task, lag.share, lag.seconds, lag.steps) == (W1, 1.0, 0.25, 0)


def test_nobody_is_named_where_they_take_turns_or_too_little_was_seen() -> None:
    samples = [
        {W0: Progress(0, i, 0, i + 0.1 * (i % 2), "exchange"), W1: Progress(0, i, 0, i + 0.05, "exchange")}
        for i in range(4)
    ]
    assert find_stragglers(samples) == []
    assert (
        find_stragglers([{W0: Progress(0, 1, 0, 1.0, "exchange"), W1: Progress(0, 1, 0, 2.0, "exchange")}])
        == []
    )
    assert find_stragglers([]) == []


def test_of_tasks_that_do_not_wait_for_each_other_it_is_the_one_behind() -> None:
    (lag,) = find_stragglers(
        [{W0: Progress(2, 90, 0, 0.0, "gradient"), W1: Progress(2, 40, 0, 0.0, "gradient")}]
    )
    assert (lag.task, lag.steps) == (W1, 50)
