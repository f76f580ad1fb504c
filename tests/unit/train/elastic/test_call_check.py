"""Tasks compare which call they make."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from insitu.base.errors import CollectiveMismatch
from insitu.exchange.plan import mismatch_error
from insitu.train.elastic.lockstep import (
    CallRecord,
    check_same_call,
    find_place,
    refuse_different,
    refuse_without,
)


def rows(*records: CallRecord) -> np.ndarray:
    return np.stack([record.to_row() for record in records])


def test_the_same_call_from_different_lines_is_one() -> None:
    records = [CallRecord(f"worker:{i}", "fit", 2, 1, f"train.py:{i}") for i in range(3)]
    check_same_call(rows(*records))
    assert [CallRecord.from_row(row) for row in rows(*records)] == records


@pytest.mark.parametrize(
    "other", [("evaluate", 2, 1), ("fit", 3, 1), ("fit", 2, 2)], ids=["name", "number", "depth"]
)
def test_different_calls_are_refused(other: tuple[str, int, int]) -> None:
    both = rows(CallRecord("worker:0", "fit", 2, 1, "a.py:7"), CallRecord("worker:1", *other, "b.py:8"))
    with pytest.raises(CollectiveMismatch) as told:
        check_same_call(both)
    assert "worker:0 makes fit() as call 3 at a.py:7; worker:1 makes " in str(told.value)
    assert "at b.py:8" in str(told.value) and told.value.is_final


def test_a_long_place_is_cut_to_the_size_of_a_record() -> None:
    record = CallRecord("worker:12345", "evaluate", 10**9, 2, "\u00e9" * 400 + ".py:7")
    assert len(record.to_row()) == len(CallRecord("worker:0", "fit").to_row())
    assert CallRecord.from_row(record.to_row()).place.endswith(".py:7")


def test_the_place_is_the_users() -> None:
    assert find_place().startswith("test_call_check.py:")
    with contextlib.ExitStack() as stack:
        places: list[str] = []
        stack.callback(lambda: places.append(find_place()))
    assert places[0].startswith("test_call_check.py:")


def test_who_does_something_else_is_named_by_its_operation() -> None:
    error = refuse_different(CallRecord("worker:0", "run"), mismatch_error(0, "a barrier", 1, "a gather"))
    assert "else (rank 0 called a barrier, rank 1 called a gather). Make the call" in str(error)


def test_who_has_ended_is_named() -> None:
    error = refuse_without(("worker:1", "worker:2"), CallRecord("worker:0", "fit", 0, place="a.py:1"))
    assert "worker:0 makes fit() as call 1 at a.py:1, and the script of worker:1, worker:2" in str(error)
