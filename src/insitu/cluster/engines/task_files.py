"""What tasks on this machine write about themselves, and the roster that they read: files of the job."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.base.progress import Progress, read_progress
from insitu.base.roster import Roster, write_roster
from insitu.base.spec import TaskId, TaskSpec
from insitu.cluster.decide import Failure
from insitu.cluster.task import read_failure

_ROOM_OF_RECORDS = 64 << 10
"""Bytes that must be free for a task to write down why it ended."""


class TaskFiles:
    """The parts of `TaskSetup` and `TaskObserver` that are files in the folder of one job."""

    def __init__(self, job: JobPaths) -> None:
        self._job = job

    def publish_roster(self, roster: Roster) -> None:
        try:
            write_roster(self._job.roster, roster)
        except OSError as error:
            raise ClusterError(str(error)) from error

    def clear_records(self, tasks: Sequence[TaskId]) -> None:
        try:
            for task in tasks:
                self._job.task(task).mkdir(parents=True, exist_ok=True)
                for path in (self._job.progress, self._job.failure, self._job.reads):
                    path(task).unlink(missing_ok=True)
        except OSError as error:
            raise ClusterError(str(error)) from error

    def prepare(self, tasks: Sequence[TaskSpec]) -> bool:
        """Return True: on one machine all is there."""
        return True

    def read_progress(self, tasks: Sequence[TaskId]) -> dict[TaskId, Progress]:
        found = {task: read_progress(self._job.progress(task)) for task in tasks}
        return {task: record for task, record in found.items() if record is not None}

    def read_failure(self, task: TaskId) -> Failure | None:
        """Return what a task wrote about its end; where it wrote nothing, whether the disk is full."""
        failure = read_failure(self._job.failure(task))
        if failure is not None or not self._is_full():
            return failure
        text = (
            f"no room is left for what the task wrote about its end in {self._job.root}. Free some space, "
            f"then `insitu resume {self._job.root.name}` has the job continue"
        )
        return Failure("", text, "")

    def _is_full(self) -> bool:
        try:
            return shutil.disk_usage(self._job.root).free < _ROOM_OF_RECORDS
        except OSError:
            return False
