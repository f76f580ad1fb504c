"""Notices a job that stands still. Pure: records and the time are passed in.

Only tasks that say how far they are (see `insitu.progress`) can be judged, from their first step until they
say that they are idle: what a script does beside training may take as long as it likes.
"""

from __future__ import annotations

from collections.abc import Mapping

from insitu.progress import IDLE, Progress
from insitu.spec import TaskId


class StallWatch:
    """Remembers when each task's record last changed, in the time of whoever observes."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._seen: dict[TaskId, tuple[Progress, float]] = {}

    def reset(self) -> None:
        """A new attempt begins."""
        self._seen.clear()

    def observe(
        self, records: Mapping[TaskId, Progress | None], now: float, *, idle_too: bool = False
    ) -> str | None:
        """Looks at the living tasks' records. Returns what to say when none moved for the timeout.

        `idle_too`: training is over, so idle tasks are only waited for, and judged as well.
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
        if not training or any(now - since < self.timeout for _, since in self._seen.values()):
            return None
        places = "; ".join(
            f"{task} at epoch {record.epoch} step {record.step} ({record.place or 'place unknown'})"
            for task, (record, _) in sorted(training.items())
        )
        return f"no task made progress for {self.timeout:g} s: {places}"
