"""Who meets others around callbacks, and who writes down what they remember."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.train.elastic import LoopPosition, SynchronousMembership
from insitu.train.fit.entry import NOTHING, key_of_batch_begin, key_of_epoch_end
from insitu.train.fit.epoch_lengths import EpochLengths
from insitu.train.fit.meetings import FitMeetings, open_record


class Loop:
    def __init__(self) -> None:
        self.started: tuple[int, int] | None = None
        self.taken: Any = None

    def start_at(self, epoch: int, step: int) -> None:
        self.started = epoch, step

    def take_record(self, *record: Any, is_newest: bool) -> None:
        self.taken = record

    def record_state(self) -> dict[str, Any]:
        return {"at": "some"}


def make(tmp_path: Path, *, synchronous: bool, workers: int, in_job: bool = True) -> tuple[FitMeetings, Any]:
    kind = SynchronousMembership if synchronous else SimpleNamespace
    membership: Any = kind.__new__(kind)
    units: list[LoopPosition] = []
    membership.lockstep = SimpleNamespace(run_unit_until_done=lambda position, work: units.append(position))
    job = Paths(tmp_path).job("a-job") if in_job else None
    context = SimpleNamespace(job=job, workers=("a:1",) * workers, task=TaskId("worker", 0))
    if synchronous:
        membership._rendezvous = SimpleNamespace(context=context)
    else:
        membership.context = context
    loop: Any = Loop()
    return FitMeetings(membership, None, loop, 0, lambda: None), SimpleNamespace(units=units, loop=loop)


@pytest.mark.parametrize(
    ("synchronous", "workers", "in_job", "meets"),
    [(True, 2, True, True), (True, 1, True, False), (True, 2, False, False), (False, 2, True, False)],
)
def test_those_meet_whom_another_may_replace(
    tmp_path: Path, synchronous: bool, workers: int, in_job: bool, meets: bool
) -> None:
    meetings, seen = make(tmp_path, synchronous=synchronous, workers=workers, in_job=in_job)
    position = LoopPosition(0, "train").at_begin()
    meetings.meet(position)
    assert meetings.can_be_replaced == meets
    assert seen.units == ([position] if meets else [])


def test_a_worker_on_servers_goes_on_by_its_record(tmp_path: Path) -> None:
    lengths = EpochLengths(5, 0)
    meetings, seen = make(tmp_path, synchronous=False, workers=2)
    meetings.start_at(0, 0, lengths)
    assert seen.loop.started is None and seen.loop.taken is None
    meetings.start_at(1, 2, lengths)
    assert seen.loop.started == (1, 2)
    meetings.record(key_of_batch_begin(1, 0))
    meetings.record(key_of_epoch_end(1))
    meetings, seen = make(tmp_path, synchronous=False, workers=2)
    meetings.start_at(2, 0, lengths)
    place, entry, state = seen.loop.taken
    assert (place, state) == ((1, 5), {"at": "some"})
    assert entry.heard == key_of_epoch_end(1) > NOTHING


def test_workers_that_share_steps_record_nothing(tmp_path: Path) -> None:
    meetings, _ = make(tmp_path, synchronous=True, workers=2)
    meetings.record(key_of_epoch_end(1))
    assert not list(tmp_path.rglob("fit-*"))


def test_an_event_is_a_repetition_in_the_next_process_of_the_task(tmp_path: Path) -> None:
    position, event = LoopPosition(0, "train", 1), key_of_epoch_end(1)
    for heard in (False, True):
        meetings, _ = make(tmp_path, synchronous=True, workers=2)
        assert meetings.hear(position, event) == heard
        assert meetings.hear(position, event) == heard, "in one process nothing is repeated"
        open_record.cache_clear()
    outside, _ = make(tmp_path, synchronous=True, workers=2, in_job=False)
    assert not outside.hear(position, event)
