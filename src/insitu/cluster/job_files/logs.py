"""Writes a job's logs: each task's raw output, and the merged output of all.

A log that has become `MAX_LOG_BYTES` long is put aside, in the place of the part before it, and a new one is
begun: so much at least is kept of each, and twice that at most.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Protocol

from insitu.access import PRIVATE_FILE
from insitu.cluster.job_files.output import LineAssembler, format_merged
from insitu.cluster.job_files.tail import rotated_path
from insitu.paths import JobPaths
from insitu.spec import TaskId

MAX_LOG_BYTES = 128 << 20
MAX_CONTROLLER_LOG_BYTES = 8 << 20
INSITU_SOURCE = "insitu"
"""Stands in the place of a task before insitu's own lines."""


class WritableLog(Protocol):
    """What bytes are appended to."""

    def write(self, data: memoryview, /) -> int:
        """Return how many bytes were written. Raises OSError."""

    def close(self) -> None: ...


class MergedLog:
    """Writes insitu's own lines into the merged output, to which `JobLogs` writes those of the tasks."""

    def __init__(self, job: JobPaths) -> None:
        self._path = job.output

    def log(self, text: str) -> None:
        """Write a line of insitu's own, for each line of `text`. A full disk costs the line."""
        with contextlib.suppress(OSError), self._path.open("ab", buffering=0) as file:
            file.write(format_merged(INSITU_SOURCE, text.encode(errors="backslashreplace").splitlines()))

    def size(self) -> int:
        """Return the bytes of the merged output so far; 0 where it can't be read."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


class RotatedLog:
    """One log. Others may append to it by its path."""

    def __init__(self, path: Path) -> None:
        """Open the log, or make it. Raises OSError."""
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes | memoryview) -> int:
        """Append as much of `data` as goes. Returns how much that is. Raises OSError."""
        if os.fstat(self._file.fileno()).st_size >= MAX_LOG_BYTES:
            self._rotate()
        return self._file.write(data)

    def _rotate(self) -> None:
        older = rotated_path(self._path)
        drops = older.exists()
        self._path.replace(older)
        try:
            fresh = self._path.open("ab", buffering=0)
        except OSError:
            older.replace(self._path)  # what is open is written on
            raise
        self.close()
        self._file = fresh
        if drops:
            kept = f"the log before this is in {older.name}; what came before that was dropped"
            self._file.write(f"[{INSITU_SOURCE}] {kept}\n".encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # some disks say only now that they have failed
            self._file.close()


def bound_controller_log(job: JobPaths) -> None:
    """Put aside what the controllers' log has, in the place of what was put aside before, once it is long.

    The supervisor and its controllers append to one open file, so it is copied and emptied, not renamed. What
    can't be done now, as on a full disk, is done later.
    """
    path = job.controller_log
    with contextlib.suppress(OSError):
        if path.stat().st_size < MAX_CONTROLLER_LOG_BYTES:
            return
        older = rotated_path(path)
        staged = older.with_name(f".{older.name}")
        with path.open("r+b") as log:
            with staged.open("wb") as copy:
                os.fchmod(copy.fileno(), PRIVATE_FILE)
                log.seek(-MAX_CONTROLLER_LOG_BYTES, os.SEEK_END)
                shutil.copyfileobj(log, copy)
            staged.replace(older)
            log.truncate(0)


class JobLogs:
    """Writes a job's logs, in its supervisor.

    A full disk costs lines, never the job; the loss is logged later.
    """

    def __init__(self, job: JobPaths) -> None:
        self._job = job
        self._merged: WritableLog = RotatedLog(job.output)
        self._tasks: dict[TaskId, tuple[WritableLog, LineAssembler]] = {}
        self._lost = 0

    def open(self, task: TaskId, incarnation: int) -> None:
        """Open the log of a new incarnation of `task`."""
        path = self._job.task_log(task, incarnation)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._tasks[task] = (RotatedLog(path), LineAssembler())

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

    def _put(self, file: WritableLog, data: bytes) -> bool:
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
