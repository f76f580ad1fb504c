"""Futures of requests."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.base.errors import ParameterError
from insitu.parameters.futures import Future, chain_future, gather


def drive(future: Future[Any], timeout: float | None) -> None:
    raise AssertionError("nothing must be waited for")


def test_a_result_is_kept_and_the_first_outcome_stays():
    future: Future[int] = Future(drive)
    assert not future.done()
    future.set_result(1)
    future.set_result(2)
    future.set_exception(ParameterError("too late"))
    assert (future.result(), future.error) == (1, None)


def test_waiting_drives_the_client():
    def complete(future: Future[Any], timeout: float | None) -> None:
        future.set_result(timeout)

    assert Future[float](complete).result(3.0) == 3.0


def test_callbacks_run_once_the_future_is_done():
    future: Future[int] = Future(drive)
    calls: list[Any] = []
    future.add_done_callback(lambda done: calls.append(done.value))
    assert calls == []
    future.set_result(5)
    future.add_done_callback(lambda done: calls.append(done.value + 1))
    assert calls == [5, 6]


def test_gather_combines_in_order_whatever_order_they_complete_in():
    futures: list[Future[Any]] = [Future(drive) for _ in range(3)]
    combined = gather(futures, drive, list)
    for number in (2, 0, 1):
        assert not combined.done()
        futures[number].set_result(number)
    assert combined.result() == [0, 1, 2]


def test_gather_of_nothing_is_done():
    assert gather([], drive, list).result() == []


def test_gather_fails_with_the_first_error_and_with_that_of_combining():
    futures: list[Future[Any]] = [Future(drive) for _ in range(3)]
    combined = gather(futures, drive, list)
    futures[2].set_exception(ParameterError("second"))
    futures[1].set_exception(ParameterError("first"))
    futures[0].set_result(0)
    with pytest.raises(ParameterError, match="first"):
        combined.result()
    done: Future[Any] = Future(drive)
    done.set_result(0)
    with pytest.raises(ZeroDivisionError):
        gather([done], drive, lambda values: 1 / values[0]).result()


@pytest.mark.parametrize("fails", [False, True])
def test_a_chained_future_has_the_same_outcome(fails: bool):
    source: Future[Any] = Future(drive)
    target: Future[Any] = Future(drive)
    chain_future(source, target)
    if fails:
        source.set_exception(ParameterError("lost"))
        with pytest.raises(ParameterError, match="lost"):
            target.result()
    else:
        source.set_result(7)
        assert target.result() == 7
