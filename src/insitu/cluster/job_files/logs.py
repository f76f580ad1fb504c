"""Writes a job's logs: each task's raw output, and the merged output of all."""

from __future__ import annotations

import contextlib
from typing import BinaryIO

from insitu.cluster.job_files.output import LineAssembler, format_merged
from insitu.paths import JobPaths
from insitu.spec import TaskId

INSITU_SOURCE = "insitu"
"""Stands in the place of a task before insitu's own lines."""


class MergedLog:
    """Writes insitu's own lines into the merged output, to which `JobLogs` writes those of the tasks."""

    def __init__(self, job: JobPaths) -> None:
        self._path = job.output

    def log(self, text: str) -> None:
        """Write a line of insitu's own, for each line of `text`. A full disk costs the line."""
        with contextlib.suppress(OSError), self._path.open("ab", buffering=0) as file:
            file.write(format_merged(INSITU_SOURCE, text.encode().splitlines()))

    def size(self) -> int:
        """Return the bytes of the merged output so far; 0 where it can't be read."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


class JobLogs:
    """Writes a job's logs, in its supervisor.

    A full disk costs lines, never the job; the loss is logged later.
    """

    def __init__(self, job: JobPaths) -> None:
        self._job = job
        self._merged = job.output.open("ab", buffering=0)
        self._tasks: dict[TaskId, tuple[BinaryIO, LineAssembler]] = {}
        self._lost = 0

    def open(self, task: TaskId, incarnation: int) -> None:
        """Open the log of a new incarnation of `task`."""
        path = self._job.task_log(task, incarnation)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._tasks[task] = (path.open("ab", buffering=0), LineAssembler())

    def write(self, task: TaskId, data: bytes, now: float) -> None:
        raw, assembler = self._tasks[task]
        self._put(raw, data)
        if lines := assembler.feed(data, now):
            self._put_merged(format_merged(str(task), lines))

    def close(self, task: TaskId) -> None:
        """Close the log of a task that has ended: what it left unfinished becomes a line."""
        opened = self._tasks.pop(task, None)
        if opened is not None:
            raw, assembler = opened
            raw.close()
            self._put_merged(format_merged(str(task), assembler.flush()))

    def _put_merged(self, data: bytes) -> None:
        if self._lost:
            note = f"{self._lost} bytes of output could not be written: no room was left"
            lost, self._lost = self._lost, 0
            if not self._put(self._merged, format_merged(INSITU_SOURCE, [note.encode()])):
                self._lost = lost
        self._put(self._merged, data)

    def _put(self, file: BinaryIO, data: bytes) -> bool:
        view = memoryview(data)
        try:
            while view:
                view = view[file.write(view) :]
        except OSError:
            self._lost += len(view)
            return False
        return True

    def finish(self) -> None:
        for task in list(self._tasks):
            self.close(task)
        self._merged.close()
