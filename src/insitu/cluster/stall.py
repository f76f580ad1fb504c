"""Notices a job that stands still. Pure: records and the time are passed in.

Only tasks that say how far they are (see `insitu.progress`) can be judged, and only between the first step
and the moment they report that they no longer train.
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

    def observe(self, records: Mapping[TaskId, Progress | None], now: float) -> str | None:
        """Looks at the living tasks' records. Returns what to say when none moved for the timeout."""
        for task in self._seen.keys() - records.keys():
            del self._seen[task]
        for task, record in records.items():
            before = self._seen.get(task)
            if record is not None and (before is None or before[0] != record):
                self._seen[task] = (record, now)
        training = {t: seen for t, seen in self._seen.items() if seen[0].step >= 0 and seen[0].place != IDLE}
        if not training or any(now - since < self.timeout for _, since in self._seen.values()):
            return None
        places = "; ".join(
            f"{task} at epoch {record.epoch} step {record.step} ({record.place or 'place unknown'})"
            for task, (record, _) in sorted(training.items())
        )
        return f"no task made progress for {self.timeout:g} s: {places}"
