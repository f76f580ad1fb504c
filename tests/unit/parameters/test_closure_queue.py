"""Closures are handed out once, and again where a worker is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from insitu.base.errors import InputError
from insitu.parameters import closure_queue
from insitu.parameters.closure_queue import ClosureQueue, Holder

FIRST, SECOND = Holder(0, 1), Holder(1, 1)
NOTHING = np.zeros(0)


def result(text: bytes = b"x") -> Any:
    return np.frombuffer(text, np.uint8)


def restored(queue: ClosureQueue) -> ClosureQueue:
    return ClosureQueue.restore(queue.describe(), queue.list_arrays())


def test_each_number_is_handed_out_once_and_all_must_end() -> None:
    queue = ClosureQueue()
    assert [queue.take(FIRST, 3), queue.take(SECOND, 3), queue.take(FIRST, 3)] == [0, 1, 0]
    queue.finish(0, result(), NOTHING, failed=False)
    assert queue.take(FIRST, 3) == 2
    queue.finish(1, result(), NOTHING, failed=False)
    assert queue.take(SECOND, 3) == -1 and not queue.is_complete(3) and queue.is_complete(2)
    queue.finish(2, result(), NOTHING, failed=False)
    assert queue.is_complete(3) and not queue.is_complete(4)


def test_a_lost_workers_closure_goes_to_another_and_counts_once() -> None:
    queue = ClosureQueue()
    assert (queue.take(FIRST, 2), queue.take(SECOND, 2)) == (0, 1)
    assert queue.release(0) == [0] and queue.release(0) == []
    queue = restored(queue)
    assert not queue.is_complete(2)
    queue.finish(1, result(), np.array([1.0]), failed=False)
    assert queue.take(SECOND, 2) == 0
    queue.finish(0, result(b"theirs"), np.array([2.0, 4.0]), failed=False)
    queue.finish(0, result(b"late"), np.array([8.0, 8.0]), failed=False)
    assert queue.sums.tolist() == [3.0, 4.0]
    assert queue.results[0] is not None and queue.results[0].tobytes() == b"theirs"


def test_a_result_that_comes_after_all_from_a_worker_that_was_thought_lost_counts() -> None:
    queue = ClosureQueue()
    queue.take(FIRST, 1)
    queue.release(0)
    queue.finish(0, result(), NOTHING, failed=False)
    assert queue.is_complete(1) and queue.take(SECOND, 1) == -1


def test_another_incarnation_gives_back_what_the_one_before_had() -> None:
    queue = ClosureQueue()
    assert queue.take(FIRST, 5) == 0
    assert queue.take(Holder(0, 2), 5) == 0
    assert queue.taken == {0: Holder(0, 2)}


def test_a_join_is_the_same_for_all_whenever_they_come() -> None:
    queue = ClosureQueue()
    for number in range(3):
        queue.take(FIRST, 3)
        queue.finish(number, result(), np.array([1.0]), failed=number > 0)
    first = queue.join(0, 3, "abc")
    assert (first.sums.tolist(), first.failed) == ([1.0], 1)
    queue.take(FIRST, 4)
    queue.finish(3, result(), np.array([1.0]), failed=False)
    queue = restored(queue)
    again, second = queue.join(0, 3, "abc"), queue.join(1, 4, "d")
    assert (again.sums.tolist(), again.failed) == ([1.0], 1)
    assert (second.sums.tolist(), second.failed) == ([2.0], -1)
    with pytest.raises(InputError, match="Received: 5 functions, where another worker has scheduled 3"):
        queue.join(0, 5, "abc")
    with pytest.raises(InputError, match="3 functions, where another worker has scheduled 3 others"):
        queue.join(0, 3, "xyz")


def test_old_results_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closure_queue, "KEPT_RESULT_BYTES", 5)
    queue = ClosureQueue()
    for number in range(3):
        queue.take(FIRST, 3)
        queue.finish(number, result(b"abc"), NOTHING, failed=False)
    queue = restored(queue)
    assert [kept is None for kept in queue.results.values()] == [True, True, False]
    assert queue.kept_bytes == 3 and queue.is_complete(3)


def test_what_was_never_taken_cannot_end() -> None:
    with pytest.raises(InputError, match=r"Received: number 0\."):
        ClosureQueue().finish(0, result(), NOTHING, failed=False)
