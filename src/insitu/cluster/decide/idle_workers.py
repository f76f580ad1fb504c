"""Finds workers that are stuck once the first worker has ended well. Pure: the time is passed in too.

Scripts that use only TensorFlow don't report progress, so nobody knows how far they are. Without a chief
task, worker 0 is their chief. Once it has ended with 0, a worker that neither prints nor uses the processor
waits for what won't come, such as a token of a synchronous optimizer: nobody is left to give it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from insitu.base.progress import Progress
from insitu.base.spec import TaskId
from insitu.cluster.decide.job_state import JobState

_FIRST_WORKER = TaskId("worker", 0)
_IDLE_SHARE = 0.02
"""Share of one processor that a process uses at most while it only waits: its libraries look around now and
then."""
_IDLE_SECONDS = 1.0
"""Seconds of processor time that are never taken for work."""


def find_left_alone(state: JobState, records: Mapping[TaskId, Progress | None]) -> tuple[TaskId, ...]:
    """Return the workers that run on, without ever having reported progress, after worker 0 has ended with 0.

    There are none in a job with a chief task, whose end stops the others.
    """
    tasks = {task.task: task for task in state.tasks}
    first = tasks.get(_FIRST_WORKER)
    if state.phase != "running" or first is None or first.alive or first.code != 0:
        return ()
    if any(name.role == "chief" for name in tasks):
        return ()
    return tuple(t.task for t in state.members if t.alive and records.get(t.task) is None)


@dataclass(frozen=True, slots=True)
class _Since:
    """The beginning of a time in which a task was quiet."""

    #: When it began, in seconds.
    at: float
    #: Processor time that the task had used by then.
    cpu_seconds: float
    #: Bytes that the job had printed by then.
    output_bytes: int


class IdleWatch:
    """Keeps how long each task has been quiet, by the clock of its caller, in seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._since: dict[TaskId, _Since] = {}

    def observe(
        self, cpu_seconds: Mapping[TaskId, float], output_bytes: int, now: float
    ) -> tuple[TaskId, ...]:
        """Return the tasks that have been quiet for the timeout, if all are; else none.

        `cpu_seconds`: processor time that each task watched has used so far, with all that it has started.
        `output_bytes`: what all tasks together have printed so far. A task that isn't named is forgotten.
        """
        for task in self._since.keys() - cpu_seconds.keys():
            del self._since[task]
        for task, used in cpu_seconds.items():
            since = self._since.get(task)
            if since is None or since.output_bytes != output_bytes or _works(since, used, now):
                self._since[task] = _Since(now, used, output_bytes)
        quiet = [task for task, since in self._since.items() if now - since.at >= self.timeout]
        return tuple(sorted(quiet)) if len(quiet) == len(self._since) else ()


def _works(since: _Since, used: float, now: float) -> bool:
    return abs(used - since.cpu_seconds) > max(_IDLE_SECONDS, _IDLE_SHARE * (now - since.at))
