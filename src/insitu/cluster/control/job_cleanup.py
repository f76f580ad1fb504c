"""Releases what ended jobs still hold, also those whose controller could not."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from insitu.base.disk.durable import is_staged_file
from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths, Paths
from insitu.cluster.decide import ENDED, ControllerLostEvent, Log, advance
from insitu.cluster.job_files import Journal, MergedLog, find_last_sign, find_other_host, is_locked
from insitu.cluster.wire import release_pins
from insitu.grid import Catalog, is_in_etcd

STAGED_PREFIX = "."
"""Prefix of the name of a folder in which a job is being made."""
_STAGING_GRACE = 60.0
"""Seconds within which a folder may not have its lock yet."""


def finalize_job(job: JobPaths, reason: str = "", ended: float | None = None) -> None:
    """Release what a job holds of which nothing runs any more: its pin of the cache, its checkpoints in
    memory.

    If the journal has no end of the job, the loss of its controller is recorded, with the `reason` if it is
    known; otherwise the `reason` is logged only. The job `ended` at this time, in seconds since 1970, or if
    that is None with its last sign of life.
    """
    journal = Journal(job.journal)
    recorded, before = journal.last()
    at = find_last_sign(job) if ended is None else max(recorded, ended)
    lost = ControllerLostEvent(reason)
    state, actions = advance(before, lost, at)
    if actions:
        try:
            journal.record(at, lost, actions, state)
        except ClusterError as error:  # what the job holds is released all the same
            MergedLog(job).log(str(error))
        for action in actions:
            if isinstance(action, Log):
                MergedLog(job).log(action.text)
    elif reason:
        MergedLog(job).log(reason)
    shutil.rmtree(job.memory, ignore_errors=True)
    _remove_staged_files(job)
    try:
        release_pins(Paths(job.root.parent.parent), job.root.name)
    except ClusterError as error:
        said = (
            f"What the job has read is kept: {error}. `insitu delete {job.root.name}` on the head's machine"
        )
        MergedLog(job).log(f"{said} lets it go")


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
        if is_in_etcd(paths) and not job.spec.exists():
            continue  # it may run in the home of another head
        if is_in_etcd(paths) and _may_go_on(job):
            continue
        if not job.root.exists():
            catalog.unpin(job_id)
            continue
        # A job that can't be read can't be finalized either; `describe` shows why.
        with contextlib.suppress(ClusterError):
            finalize_job(job)


def _may_go_on(job: JobPaths) -> bool:
    """Return whether the head starts another supervisor of a job by itself, or has done so elsewhere."""
    try:
        return job.lease.exists() and Journal(job.journal).state().phase not in ENDED
    except ClusterError:
        return False


def _is_left(job: JobPaths) -> bool:
    """Return whether nothing runs of a job that is this user's and this host's to clean up."""
    try:
        return not is_locked(job.controller) and not find_other_host(job.controller)
    except PermissionError:
        return False
