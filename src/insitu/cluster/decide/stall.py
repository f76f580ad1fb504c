"""Notices a job that stands still, and whom it waits for. Pure: records and the time are passed in.

Only tasks that say how far they are (see `insitu.progress`) can be judged, from their first step until they
say that they are idle: what a script does beside training may take as long as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from insitu.progress import IDLE, Progress
from insitu.roster import JOINING, RECOVERING
from insitu.spec import TaskId

WAITING_ACTIVITIES = frozenset({"exchange", "join", RECOVERING, JOINING})
"""Places at which a task can do nothing but wait for others."""
WAITING_FOR_ROSTER = frozenset({RECOVERING, JOINING})
"""Places at which a task waits for others that may not have begun."""


@dataclass(frozen=True, slots=True)
class Stall:
    """`text` says what stands where; `culprits` are those that the others wait for, empty if unknown."""

    text: str
    culprits: tuple[TaskId, ...] = ()


class StallWatch:
    """Remembers when each task's record last changed, in the time of whoever observes."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._seen: dict[TaskId, tuple[Progress, float]] = {}

    def begin(self, tasks: Collection[TaskId], stopped: Collection[TaskId] = ()) -> None:
        """These tasks begin anew. They get the whole time again, and so does who waits for them; but not one
        that is `stopped`: the others may come and go because of it, and it would never be found."""
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
        """Looks at the living tasks' records.

        A stall is when nobody moved for the timeout, or when somebody that all others wait for didn't.
        `idle_too`: training is over, so idle tasks are only waited for, and judged as well. `stopped` tells
        whose process is suspended.
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
            if seen[0].step >= 0 and (idle_too or seen[0].place != IDLE)
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
    """Return where a task stands, for the user: counted from 1, as Keras prints it."""
    return f"{task} at epoch {record.epoch + 1} step {record.step + 1} ({record.place or 'place unknown'})"
