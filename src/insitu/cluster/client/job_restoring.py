"""Brings a job to this machine whose own machine is lost, from the newest copy that a host has kept.

The job gets another *term*: hosts that know of it refuse the previous supervisor. Its tasks prove another
secret to each other, so earlier tasks, that may still run on a host that is cut off, can't join them. The
job's signing secret stays the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping

from insitu.base.disk.access import PRIVATE_FILE, make_sticky_folder
from insitu.base.disk.durable import sync_folder, sync_tree
from insitu.base.errors import ClusterError, InsituError, UnknownJob
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import NodeId
from insitu.cluster.client.status import find_job
from insitu.cluster.control import staged_folder
from insitu.cluster.decide import CopyVersion, choose_newest_copy
from insitu.cluster.job_backup import open_copy_reader, unpack_code
from insitu.cluster.job_files import (
    Journal,
    MergedLog,
    is_locked,
    read_environment,
    read_placement,
    read_spec,
    take_lock,
)
from insitu.cluster.job_hosts import remove_host_copy
from insitu.cluster.leases import begin_term, draw_term, is_outdated
from insitu.cluster.wire import read_head

Notify = Callable[[str], None]


def find_or_restore_job(paths: Paths, text: str, notify: Notify = lambda text: None) -> JobPaths:
    """Return the job whose id is `text` or alone begins with it; one that isn't in this home of a head, or
    has resumed elsewhere since, is brought from a host that keeps a copy. `notify` receives a message about
    it. Raises UnknownJob, JobRunning if it runs elsewhere, ClusterError."""
    try:
        job = find_job(paths, text)
    except UnknownJob as error:
        if error.matches or read_head(paths) is None:
            raise
        found = restore_job(paths, text, notify)
        if found is None:
            raise
        return found
    if is_locked(job.controller) or not is_outdated(job):
        return job
    return restore_job(paths, job.root.name, notify) or job


def restore_job(paths: Paths, text: str, notify: Notify) -> JobPaths | None:
    """Bring the job whose id is `text`, or begins with it, from the newest copy. Returns None if no host has
    one. Raises UnknownJob if several begin so, ClusterError if it can't be brought."""
    with open_copy_reader(paths) as reader:
        copies = reader.list_copies()
        ids = [i for i in copies if i == text] or sorted(i for i in copies if text and i.startswith(text))
        if not ids:
            return None
        if len(ids) > 1:
            raise UnknownJob(
                f"{text!r} could be any of these jobs: {', '.join(ids)}. Give more of its id",
                matches=tuple(ids),
            )
        found = copies[ids[0]]
        node = choose_newest_copy(found)
        if node is None:
            return None
        is_outdated(paths.job(ids[0]))  # if it runs elsewhere nothing is brought
        job, staged = paths.job(ids[0]), _make_staged(paths, ids[0])
        lock = take_lock(staged.controller)
        try:
            reader.copy(node, ids[0], staged.root)
            _complete(staged, found)
            text = f"brought to this machine from the copy on {node}; what was logged before is lost"
            MergedLog(staged).log(text)
            sync_tree(staged.root)
            job.spec.unlink(missing_ok=True)
            remove_host_copy(paths, job)
            staged.root.rename(job.root)
            sync_folder(paths.jobs)
        except (OSError, ValueError) as error:
            raise ClusterError(f"{ids[0]} can't be brought from {node}: {error}. Try again") from error
        finally:
            shutil.rmtree(staged.root, ignore_errors=True)
            os.close(lock)
    notify(f"{job.root.name} was brought from the copy on {node}")
    return job


def _make_staged(paths: Paths, job_id: str) -> JobPaths:
    """Make the folder in which the job is put together. Raises ClusterError if another process does it."""
    make_sticky_folder(paths.home, paths.jobs)
    staged = staged_folder(paths, job_id)
    if is_locked(staged.controller):
        raise ClusterError(f"{job_id} is brought by another process now. Try again when that has ended")
    shutil.rmtree(staged.root, ignore_errors=True)
    staged.root.mkdir(mode=0o700)
    return staged


def _complete(job: JobPaths, found: Mapping[NodeId, CopyVersion]) -> None:
    """Add what a copy lacks, and read what it has. Raises InsituError, OSError."""
    with job.code_archive.open("rb") as packed:
        unpack_code(packed, job.code)
    job.code_archive.unlink()
    begin_term(job, draw_term(max(version.term for version in found.values()) + 1))
    for folder in (job.checkpoints, job.ledger, job.tasks):
        folder.mkdir(exist_ok=True)
    job.output.touch(PRIVATE_FILE)
    read_spec(job)
    read_environment(job)
    placement, _ = read_placement(job)
    for task in placement.tasks:
        job.task(task.task).mkdir(exist_ok=True)
    Journal(job.journal).state()


def list_copied_jobs(paths: Paths) -> list[str]:
    """Return the jobs of which hosts keep a copy, and which aren't in this home."""
    try:
        with open_copy_reader(paths) as reader:
            return sorted(each for each in reader.list_copies() if not paths.job(each).root.exists())
    except InsituError:
        return []
