"""Releases what ended jobs still hold, also those whose controller could not."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from insitu.cluster.decide import ControllerLostEvent, Log, advance
from insitu.cluster.job_files import Journal, MergedLog, find_other_host, is_locked
from insitu.durable import is_staged_file
from insitu.errors import ClusterError
from insitu.grid import Catalog
from insitu.paths import JobPaths, Paths

STAGED_PREFIX = "."
"""What the name of a folder begins with in which a job is being made."""
_STAGING_GRACE = 60.0
"""Seconds within which a folder may not have its lock yet."""


def finalize_job(job: JobPaths, reason: str = "") -> None:
    """Release what a job holds of which nothing runs any more: its pin of the cache, its checkpoints in
    memory.

    Where the journal has no end of the job, the loss of its controller is recorded, with the `reason` if it
    is known; otherwise the `reason` is logged only.
    """
    journal = Journal(job.journal)
    now = time.time()
    lost = ControllerLostEvent(reason)
    state, actions = advance(journal.state(), lost, now)
    if actions:
        journal.record(now, lost, actions, state)
        for action in actions:
            if isinstance(action, Log):
                MergedLog(job).log(action.text)
    elif reason:
        MergedLog(job).log(reason)
    shutil.rmtree(job.memory, ignore_errors=True)
    _remove_staged_files(job)
    Catalog(Paths(job.root.parent.parent)).unpin(job.root.name)


def _remove_staged_files(job: JobPaths) -> None:
    """Remove what tasks that were killed left half-written. The script's own folder is left as it is."""
    for folder, names, files in os.walk(job.root):
        if Path(folder) == job.root:
            names[:] = [name for name in names if name != job.code.name]
        for path in (Path(folder, name) for name in files):
            if is_staged_file(path):
                with contextlib.suppress(OSError):
                    path.unlink()


def staged_folder(paths: Paths, job_id: str) -> JobPaths:
    """Return the folder in which a job is made before it is visible."""
    return JobPaths(paths.jobs / f"{STAGED_PREFIX}{job_id}")


def clean_up(paths: Paths, cache: str) -> None:
    """Remove half-made jobs whose maker was killed; finalize jobs on `cache` that died with their machine.

    Jobs of other hosts and users are left alone.
    """
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(paths.jobs):
            staged = staged_folder(paths, entry.name.removeprefix(STAGED_PREFIX))
            if entry.name.startswith(STAGED_PREFIX) and _is_left(staged):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime > _STAGING_GRACE:
                        shutil.rmtree(staged.root, ignore_errors=True)
    catalog = Catalog(paths)
    for job_id in catalog.pinned_by(cache):
        job = paths.job(job_id)
        # The staged folder first: it becomes the other, so a job in the making is seen as one or the other.
        if staged_folder(paths, job_id).root.exists() or not _is_left(job):
            continue
        if not job.root.exists():
            catalog.unpin(job_id)
            continue
        # What can't be read can't be finalized either; `describe` shows why.
        with contextlib.suppress(ClusterError):
            finalize_job(job)


def _is_left(job: JobPaths) -> bool:
    """Return whether nothing runs of a job that is this user's and this host's to clean up."""
    try:
        return not is_locked(job.controller) and not find_other_host(job.controller)
    except PermissionError:
        return False
