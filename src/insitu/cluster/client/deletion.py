"""Deletes a job that has ended: its copy of the code, logs, ledger and checkpoints."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil

from insitu.base.errors import ClusterError, JobRunning
from insitu.base.paths import JobPaths, Paths
from insitu.cluster.client.exports import measure_job
from insitu.cluster.client.job_requests import end_pause
from insitu.cluster.client.status import is_running
from insitu.cluster.control import finalize_job, staged_folder
from insitu.cluster.job_files import take_lock
from insitu.cluster.leases import forget_job


def delete_job(paths: Paths, job: JobPaths) -> int:
    """Delete the folder of a job that has ended. Returns the bytes of the folder.

    The folder is renamed first, so a job is there as a whole or not at all. Leftovers of a killed process are
    removed by the next `insitu start`. Raises JobRunning for a job that runs, ClusterError if one that died
    can't be ended.
    """
    name = job.root.name
    if is_running(job):
        raise JobRunning(
            f"A job that runs can't be deleted. Received: {name}. Stop it with `insitu stop {name}` first"
        )
    lock = take_lock(job.controller)  # so that nobody resumes it meanwhile
    try:
        forget_job(paths, name)
        end_pause(job)
        with contextlib.suppress(ClusterError):  # if the journal can't be read there is nothing to end
            finalize_job(job)
        hidden = staged_folder(paths, f"{name}-{secrets.token_hex(4)}")
        job.root.rename(hidden.root)
    finally:
        os.close(lock)
    size = measure_job(hidden)
    shutil.rmtree(hidden.root, ignore_errors=True)
    return size
