"""When a job is last known to have lived, for jobs whose processes all died before one could write it down.

The supervisor writes the time into `heartbeat` while it lives. Times of change of files don't say it: copying
the folder changes them.
"""

from __future__ import annotations

import contextlib
import math
import os
import time

from insitu.base.disk.access import PRIVATE_FILE
from insitu.base.measure.task_samples import read_last_samples
from insitu.base.paths import JobPaths
from insitu.cluster.job_files.journal import Journal
from insitu.cluster.job_files.records import read_spec

INTERVAL = 1.0
"""Seconds between two heartbeats."""
_MOST_BYTES = 32
"""Bytes of a time, with spaces at its end: another one needs no other room on the disk."""


class Heartbeat:
    """Writes the heartbeats of one job. If there is no room, they are missing."""

    def __init__(self, job: JobPaths) -> None:
        self._path = job.heartbeat
        #: When the next one is due, by the monotonic clock.
        self._due = 0.0

    def beat(self) -> None:
        """Write that the job lives, if that is due."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + INTERVAL
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
            try:
                os.pwrite(descriptor, f"{time.time():.3f}".ljust(_MOST_BYTES).encode(), 0)
            finally:
                os.close(descriptor)


def find_last_sign(job: JobPaths) -> float:
    """Return the last time at which a process of the job is known to have lived, in seconds since 1970.

    It is that of a heartbeat, a task's sample, the journal, or the job's creation. No clock of another host
    makes it later than now. Raises ClusterError.
    """
    recorded, state = Journal(job.journal).last()
    signs = [read_spec(job).created, _read_heartbeat(job)]
    for each in state.tasks:
        signs += [sample.at for sample in read_last_samples(job.samples(each.task))[-1:]]
    return max(recorded, min(max(signs), time.time()))


def _read_heartbeat(job: JobPaths) -> float:
    try:
        found = float(job.heartbeat.read_bytes()[:_MOST_BYTES])
    except (OSError, ValueError):
        return 0.0
    return found if math.isfinite(found) else 0.0
