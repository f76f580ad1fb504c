"""Finds jobs and reads their state from their folders; asks no process."""

from __future__ import annotations

import os
from dataclasses import dataclass

from insitu.base.errors import ClusterError, InputError, UnknownJob
from insitu.base.paths import JobPaths, Paths
from insitu.base.progress import read_progress
from insitu.base.spec import JobSpec, is_simple_name
from insitu.cluster.decide import ENDED, ControllerLostEvent, EpochStep, JobState, advance
from insitu.cluster.job_files import Journal, find_last_sign, find_other_host, is_locked, read_spec
from insitu.grid import is_in_etcd


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job as it stands."""

    #: The request of the user.
    spec: JobSpec
    #: The newest state in its journal.
    state: JobState
    #: True until the last of its processes has ended.
    running: bool
    #: The furthest (epoch, step) that a task of the present attempt has reported, or None.
    steps: EpochStep | None
    #: When it ended, in seconds since 1970; None for a job that hasn't, or that is about to resume.
    ended: float | None


def list_job_ids(paths: Paths) -> list[str]:
    """Return the ids of all jobs, sorted. Folders whose name can't be that of a job are passed over, and
    those of a host whose home etcd has made a head's."""
    try:
        with os.scandir(paths.jobs) as found:
            names = sorted(e.name for e in found if is_simple_name(e.name) and e.is_dir())
    except FileNotFoundError:
        return []
    return [name for name in names if paths.job(name).spec.exists()] if is_in_etcd(paths) else names


def find_job(paths: Paths, text: str) -> JobPaths:
    """Return the job whose id is `text` or alone begins with it. Raises UnknownJob."""
    ids = list_job_ids(paths)
    matches = [i for i in ids if i == text] or [i for i in ids if text and i.startswith(text)]
    if len(matches) == 1:
        job = paths.job(matches[0])
        if not os.access(job.root, os.X_OK):
            raise InputError(
                f"A job can be used by the user who started it. Received: {matches[0]} of user "
                f"{job.root.stat().st_uid}. `insitu ps --all` lists those of all users of this home"
            )
        return job
    if matches:
        raise UnknownJob(
            f"{text!r} could be any of these jobs: {', '.join(matches)}. Give more of its id",
            matches=tuple(matches),
        )
    import difflib

    near = difflib.get_close_matches(text, ids, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise UnknownJob(f"No job's id is or begins with {text!r}. {hint}`insitu ps --all` lists them")


def is_running(job: JobPaths) -> bool:
    """Return whether a process of the job is left. A job of another host runs until its journal has its
    end. Raises PermissionError for one of another user."""
    if is_locked(job.controller):
        return True
    return bool(find_other_host(job.controller)) and Journal(job.journal).state().phase not in ENDED


def find_running_jobs(paths: Paths) -> tuple[list[str], list[str]]:
    """Return (the ids of the jobs that run, those of jobs of other users, which show nobody whether they
    run)."""
    running, others = [], []
    for job_id in list_job_ids(paths):
        try:
            if is_running(paths.job(job_id)):
                running.append(job_id)
        except PermissionError:
            others.append(job_id)
    return running, others


def read_status(job: JobPaths) -> JobStatus:
    """Return how the job stands. Raises ClusterError if its folder can't be read."""
    # The lock first: a job that ends between the two looks has then written its last state.
    running = is_running(job)
    at, state = Journal(job.journal).last()
    if not running and state.phase not in ENDED:
        at = find_last_sign(job)
        state, _ = advance(state, ControllerLostEvent(), at)
    records = [read_progress(job.progress(t.task)) for t in state.tasks]
    steps = max(((r.epoch, r.shown_step) for r in records if r is not None), default=None)
    return JobStatus(read_spec(job), state, running, steps, at if state.phase in ENDED else None)


def list_jobs(paths: Paths, *, all_jobs: bool = False) -> list[JobStatus | BrokenJob]:
    """Return the running jobs, or all, oldest first; one whose folder can't be read comes with the reason."""
    found: list[JobStatus | BrokenJob] = []
    for job_id in list_job_ids(paths):
        job = paths.job(job_id)
        try:
            if not all_jobs and not is_running(job):
                continue
            found.append(read_status(job))
        except PermissionError as error:
            # In a shared home, a job of another user: it shows nobody else whether it runs.
            if all_jobs:
                found.append(BrokenJob(job_id, f"a job of another user: {error}"))
        except (ClusterError, OSError) as error:
            found.append(BrokenJob(job_id, str(error)))
    return sorted(found, key=lambda s: s.spec.created if isinstance(s, JobStatus) else 0.0)


@dataclass(frozen=True, slots=True)
class BrokenJob:
    """A job whose folder can't be read."""

    #: Its folder's name.
    job_id: str
    #: The part that could not be read, for the user.
    reason: str


def read_exit_code(job: JobPaths) -> int:
    """Return the exit code of a job that has ended."""
    code = read_status(job).state.exit_code
    return 1 if code is None else code
