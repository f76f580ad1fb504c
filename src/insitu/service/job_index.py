"""Lists many jobs quickly, in a process that lists them again and again."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from insitu.service.jobs import summarize_job

if TYPE_CHECKING:
    from insitu.paths import JobPaths, Paths

_Mark = tuple[int, int, int]
"""(time of the last change, size, inode) of a journal."""


@dataclass(frozen=True, slots=True)
class _Ended:
    #: The path of its journal.
    journal: str
    #: The journal as it was when it was read.
    mark: _Mark
    #: How the job stands.
    summary: dict[str, Any]


class JobIndex:
    """The jobs of a home. What has ended is read again when its journal changes. Safe for several threads."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        #: By job id, jobs that have ended.
        self._ended: dict[str, _Ended] = {}

    def list(self) -> list[dict[str, Any]]:
        """Return all jobs as `insitu ps --all --json` lists them, the newest first."""
        from insitu.cluster import list_job_ids

        with self._lock:
            ids = list_job_ids(self._paths)
            found = [self._find_ended(job_id) or self._summarize(self._paths.job(job_id)) for job_id in ids]
            self._ended = {job_id: self._ended[job_id] for job_id in ids if job_id in self._ended}
        return sorted(found, key=lambda job: job.get("created") or 0.0, reverse=True)

    def _find_ended(self, job_id: str) -> dict[str, Any] | None:
        """Return a job that had ended when it was read, and whose journal is as it was then."""
        known = self._ended.get(job_id)
        return known.summary if known is not None and known.mark == _read_mark(known.journal) else None

    def _summarize(self, job: JobPaths) -> dict[str, Any]:
        from insitu.cluster import BrokenJob, read_status
        from insitu.errors import ClusterError

        name, journal = job.root.name, str(job.journal)
        mark = _read_mark(journal)
        try:
            status = read_status(job)
        except PermissionError as error:
            return summarize_job(BrokenJob(name, f"a job of another user: {error}"))
        except (ClusterError, OSError) as error:
            return summarize_job(BrokenJob(name, str(error)))
        summary = summarize_job(status)
        if mark is not None and not status.running:
            self._ended[name] = _Ended(journal, mark, summary)
        return summary


def _read_mark(journal: str) -> _Mark | None:
    try:
        found = os.stat(journal)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
