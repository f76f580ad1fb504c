"""Finds that a job stands still, and which task it waits for. Pure: records and the time are passed in.

Only tasks that report how far they are (see `base/progress.py`) can be judged, from their first step until
they report that they are idle: what a script does beside training may take as long as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from insitu.base.progress import RESTING, Progress
from insitu.base.roster import CONNECTING, JOINING, RECOVERING
from insitu.base.spec import TaskId

WAITING_ACTIVITIES = frozenset({"exchange", CONNECTING, RECOVERING, JOINING})
"""Activities (`Progress.place`) in which a task can do nothing but wait for others."""
WAITING_FOR_ROSTER = frozenset({RECOVERING, JOINING})
"""Activities in which a task waits for others that may not have begun."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A job that stands still."""

    #: Names the tasks and the place of each, for the user.
    text: str
    #: The tasks that the others wait for; empty if unknown.
    culprits: tuple[TaskId, ...] = ()


class StallWatch:
    """Keeps when each task's record last changed, by the clock of its caller."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._seen: dict[TaskId, tuple[Progress, float]] = {}

    def begin(self, tasks: Collection[TaskId], stopped: Collection[TaskId] = ()) -> None:
        """Restart the clock of these tasks, which are launched, and of tasks that wait for a roster.

        The clock of a task that is `stopped` keeps running: the others may come and go because of it, and it
        would never be found.
        """
        for task, (record, _) in list(self._seen.items()):
            if task in tasks or (record.place in WAITING_FOR_ROSTER and task not in stopped):
                del self._seen[task]

    def observe(
        self,
        records: Mapping[TaskId, Progress | None],
        now: float,
        *,
        idle_too: bool = False,
        stopped: Callable[[], Collection[TaskId]] = tuple,
    ) -> Stall | None:
        """Compare the records of the tasks alive with those before. Returns a stall, or None.

        A stall is when no task moved for the timeout, or when one that all others wait for didn't.
        `idle_too`: training is over, so idle tasks are only waited for, and judged as well. `stopped` returns
        the tasks whose process is suspended.
        """
        for task in self._seen.keys() - records.keys():
            del self._seen[task]
        for task, record in records.items():
            before = self._seen.get(task)
            if record is not None and (before is None or before[0] != record):
                self._seen[task] = (record, now)
        training = {
            task: seen
            for task, seen in self._seen.items()
            if seen[0].step >= 0 and (idle_too or seen[0].place not in RESTING)
        }
        still = {task for task, (_, since) in training.items() if now - since >= self.timeout}
        busy = {task for task in training if training[task][0].place not in WAITING_ACTIVITIES}
        if not still or (still != training.keys() and not busy <= still):
            return None
        if still == training.keys():
            suspended = still & set(stopped())
            culprits = suspended or (busy if busy != training.keys() else set())
        else:
            culprits = busy or (still & set(stopped()))
            if not culprits:
                return None
        return Stall(self._describe(training, sorted(still), sorted(culprits)), tuple(sorted(culprits)))

    def _describe(
        self, training: Mapping[TaskId, tuple[Progress, float]], still: list[TaskId], culprits: list[TaskId]
    ) -> str:
        who = "no task" if len(still) == len(training) else "tasks that others wait for have not"
        places = "; ".join(_place(task, training[task][0]) for task in still)
        named = f"; waiting for {', '.join(map(str, culprits))}" if culprits else ""
        return f"{who} made progress for {self.timeout:g} s: {places}{named}"


def _place(task: TaskId, record: Progress) -> str:
    """Return the place of a task, for the user: counted from 1, as Keras prints it."""
    return (
        f"{task} at epoch {record.epoch + 1} step {record.shown_step + 1} ({record.place or 'place unknown'})"
    )
