"""Finds tasks that are slow without being stuck: those that the others wait for, and by how long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insitu.base.progress import RESTING, Progress
from insitu.base.spec import TaskId
from insitu.cluster.decide.stall import WAITING_ACTIVITIES

MIN_SHARE = 0.6
"""A task that comes last in this share of the steps, or more, is a straggler."""
MIN_SECONDS = 0.001
_MIN_STEPS = 3


@dataclass(frozen=True, slots=True)
class Straggler:
    """A task that the others wait for."""

    #: The task.
    task: TaskId
    #: Share of the steps seen in which it came last, in [0, 1].
    share: float
    #: Median of the seconds by which it came last.
    seconds: float
    #: Steps that it is behind the furthest task.
    steps: int


def find_stragglers(samples: Sequence[Mapping[TaskId, Progress | None]]) -> list[Straggler]:
    """Return the tasks that are behind, the furthest first. Pure.

    A record that stands at the exchange holds the time at which its task came there, so what is between the
    first and the last to come is what the others waited. Tasks that don't wait for each other are found
    by the steps that they are behind.
    """
    arrived: dict[tuple[int, int], dict[TaskId, float]] = defaultdict(dict)
    for sample in samples:
        for task, record in sample.items():
            if record is not None and record.step >= 0 and record.place in WAITING_ACTIVITIES:
                arrived[record.epoch, record.step][task] = record.at
    everybody = {
        t for sample in samples for t, r in sample.items() if r and r.step >= 0 and r.place not in RESTING
    }
    steps = [times for times in arrived.values() if len(times) == len(everybody) > 1]
    waited: dict[TaskId, list[float]] = defaultdict(list)
    for times in steps:
        latest = max(times.values())
        waited[next(t for t in sorted(times) if times[t] == latest)].append(latest - min(times.values()))
    found = []
    behind = _count_steps_behind(samples[-1] if samples else {})
    for task in sorted(everybody):
        share = len(waited[task]) / len(steps) if len(steps) >= _MIN_STEPS else 0.0
        seconds = sorted(waited[task])[len(waited[task]) // 2] if waited[task] else 0.0
        slow = share >= MIN_SHARE and seconds >= MIN_SECONDS
        if slow or behind.get(task, 0) > 1:
            found.append(Straggler(task, share, seconds, behind.get(task, 0)))
    return sorted(found, key=lambda lag: (-lag.steps, -lag.seconds, lag.task))


def _count_steps_behind(sample: Mapping[TaskId, Progress | None]) -> dict[TaskId, int]:
    """Return how many steps each task is behind the furthest of its epoch, whose length isn't known here."""
    training = {t: r for t, r in sample.items() if r is not None and r.step >= 0 and r.place not in RESTING}
    newest = max((r.epoch for r in training.values()), default=0)
    most = max((r.step for r in training.values() if r.epoch == newest), default=0)
    return {t: most - r.step for t, r in training.items() if r.epoch == newest}
