"""Resumes jobs whose supervisor is lost, for the head that leads if etcd holds the metadata.

`leases/job_upkeep.py` has it done.
"""

from __future__ import annotations

from insitu.base.errors import JobEnded
from insitu.base.paths import Paths
from insitu.cluster.client.job_requests import Notify, kill_supervisor, resume_job
from insitu.cluster.client.job_restoring import find_or_restore_job
from insitu.cluster.control import finalize_job
from insitu.cluster.decide import ENDED
from insitu.cluster.job_files import Journal, is_locked
from insitu.cluster.leases import check_lost, forget_job


def resume_lost_job(paths: Paths, job_id: str, revision: int, notify: Notify) -> None:
    """Start another supervisor of a job, none of which keeps its lease, unless its key in etcd has changed
    since `revision`. `notify` receives the messages. Raises JobEnded, JobRunning, InsituError."""
    check_lost(paths, job_id, revision)
    job = paths.job(job_id)
    if is_locked(job.controller):  # its supervisor here hangs
        kill_supervisor(job, notify)
    job = find_or_restore_job(paths, job_id, notify)
    try:
        resume_job(job, notify=notify, revision=revision)
    except JobEnded:
        if Journal(job.journal).state().phase not in ENDED:
            raise
        # Its supervisor died between the job's end and the removal of its key.
        forget_job(paths, job_id)
        finalize_job(job)
