"""Lists many jobs quickly, in a process that lists them again and again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from insitu.service.jobs import summarize_job

if TYPE_CHECKING:
    from insitu.paths import JobPaths, Paths

_Mark = tuple[int, int, int]
"""(time of the last change, size, inode) of a journal."""


class JobIndex:
    """The jobs of a home. What has ended is read again when its journal changes. Safe for several threads."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        #: By job id, of jobs that have ended: their journal as it was then, and how they stand.
        self._ended: dict[str, tuple[_Mark, dict[str, Any]]] = {}

    def list(self) -> list[dict[str, Any]]:
        """Return all jobs as `insitu ps --all --json` lists them, the newest first."""
        from insitu.cluster import list_job_ids

        with self._lock:
            ids = list_job_ids(self._paths)
            found = [self._summarize(self._paths.job(job_id)) for job_id in ids]
            self._ended = {job_id: self._ended[job_id] for job_id in ids if job_id in self._ended}
        return sorted(found, key=lambda job: job.get("created") or 0.0, reverse=True)

    def _summarize(self, job: JobPaths) -> dict[str, Any]:
        from insitu.cluster import BrokenJob, read_status
        from insitu.errors import ClusterError

        name = job.root.name
        try:
            changed = job.journal.stat()
            mark = (changed.st_mtime_ns, changed.st_size, changed.st_ino)
            if (known := self._ended.get(name)) is not None and known[0] == mark:
                return known[1]
            status = read_status(job)
        except PermissionError as error:
            return summarize_job(BrokenJob(name, f"a job of another user: {error}"))
        except (ClusterError, OSError) as error:
            return summarize_job(BrokenJob(name, str(error)))
        summary = summarize_job(status)
        if not status.running:
            self._ended[name] = (mark, summary)
        return summary
