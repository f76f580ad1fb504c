"""The schedules of the algorithms: members agree on the bytes between them, and sums need what they sum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.exchange.algorithms import ALGORITHMS, _count_until, _interleave
from insitu.exchange.plan.schedule import Schedule, Transfer
from insitu.exchange.plan.transport import Members, Reduction

FLOAT = np.dtype(np.float32)


def _make_schedules(name: str, shards: list[list[int]], length: int, op: str) -> list[Schedule]:
    """The schedule of each member; without connections, since nothing is run."""
    count, schedules = sum(map(len, shards)), []
    hosted = tuple(map(tuple, shards))
    for rank, own in enumerate(shards):
        weights = [np.zeros(len(s)) for s in shards]
        session: Any = SimpleNamespace(
            members=Members(rank, hosted, count),
            peers=[r for r in range(len(shards)) if r != rank],
            kernels=None,
            get_weights=weights.__getitem__,
            weights_table=np.zeros(count),
        )
        rows = np.zeros((max(1, len(own)), length), FLOAT)
        reduction = Reduction(op, FLOAT, length, tuple(rows[: len(own)]), rows[0])  # type: ignore[arg-type]
        schedules.append(ALGORITHMS[name](session, reduction, np.zeros(length, FLOAT))._schedule)  # type: ignore[attr-defined]
    return schedules


@st.composite
def shards_of_members(draw: st.DrawFn) -> list[list[int]]:
    size, count = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    owner = draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count))
    return [[s for s in range(count) if owner[s] == rank] for rank in range(size)]


@pytest.mark.parametrize("name", ["gather", "star", "direct"])
@settings(deadline=None, max_examples=40)
@given(
    shards_of_members(),
    st.sampled_from([0, 1, 1000, 70_000, 300_000]),
    st.sampled_from(["sum", "weighted_mean"]),
)
def test_members_agree_on_the_bytes_between_them(
    name: str, shards: list[list[int]], length: int, op: str
) -> None:
    schedules = _make_schedules(name, shards, length, op)
    for here, schedule in enumerate(schedules):
        for peer in schedule.peers:
            sent = [transfer.data.nbytes for transfer in schedule.sends[peer]]
            received = [transfer.data.nbytes for transfer in schedules[peer].receives[here]]
            assert sent == received
            assert all(sent), "transfers aren't empty"


@pytest.mark.parametrize("name", ["gather", "star", "direct"])
@settings(deadline=None, max_examples=40)
@given(shards_of_members(), st.sampled_from([1, 1000, 70_000, 300_000]))
def test_steps_sum_every_element_once(name: str, shards: list[list[int]], length: int) -> None:
    schedules = _make_schedules(name, shards, length, "sum")
    summed = sum(step.out.size for schedule in schedules for step in schedule.steps)
    assert summed == length * (len(shards) if name == "gather" else 1)
    for schedule in schedules:
        for step in schedule.steps:
            assert len(step.rows) == sum(map(len, shards))
            assert all(len(row) == len(step.out) for row in step.rows)


@pytest.mark.parametrize("name", ["gather", "star", "direct"])
@settings(deadline=None, max_examples=40)
@given(shards_of_members(), st.sampled_from([1, 1000, 300_000]))
def test_received_rows_are_kept_until_they_are_summed(
    name: str, shards: list[list[int]], length: int
) -> None:
    """A step needs the transfer of each peer's row, and a later one to the same memory waits for the step."""
    for schedule in _make_schedules(name, shards, length, "sum"):
        for number, step in enumerate(schedule.steps):
            for peer, count in step.needs.items():
                before, after = schedule.receives[peer][: count - 1], schedule.receives[peer][count - 1 :]
                for row in step.rows:
                    later = [t for t in after if np.may_share_memory(row, t.data)]
                    assert all(transfer.gate > number for transfer in later)
                    assert not later or any(np.may_share_memory(row, t.data) for t in before)


def test_sums_follow_the_rows_of_two_chunks() -> None:
    rows, sums = ([[Transfer(np.full(1, value))] for value in values] for values in ("abc", "xyz"))
    order = _interleave(rows, sums)
    assert ["".join(str(t.data[0]) for t in group) for group in order] == list("abcxyz")
    assert _count_until(order, rows, 1) == [2, 3, 4]
    assert _interleave([], []) == []
