"""What may be asked of a job that is there already: to go on after it has ended, to have other workers."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time

from insitu.cluster.client.submission import start_supervisor
from insitu.cluster.decide import ENDED, ControllerLostEvent, advance
from insitu.cluster.job_files import (
    Journal,
    is_locked,
    read_placement,
    read_spec,
    signal_controller,
    take_lock,
)
from insitu.errors import ClusterError, InputError, JobEnded
from insitu.grid import Catalog
from insitu.paths import JobPaths, Paths

_REPLY_TIMEOUT = 60.0
"""Seconds within which a controller answers, on any machine."""


def resume_job(job: JobPaths) -> int:
    """Lets a job that has ended go on from its last checkpoint, with the same shards and seed.

    Returns how many bytes its merged output held before. Raises JobEnded for a job that has finished,
    InputError for one that runs, UnknownCache where its version of the cache is gone, ClusterError.
    """
    name = job.root.name
    if is_locked(job.controller):
        raise InputError(f"{name} is running; `insitu attach {name}` follows it")
    spec = read_spec(job)
    placement, _ = read_placement(job)
    lock = take_lock(job.controller)
    try:
        journal = Journal(job.journal)
        now = time.time()
        state, actions = advance(journal.state(), ControllerLostEvent(), now)
        if actions:
            journal.record(now, ControllerLostEvent(), actions, state)
        if state.phase == "finished":
            raise JobEnded(f"{name} has finished: there is nothing to go on with")
        Catalog(Paths(job.root.parent.parent)).pin(spec.cache, placement.shard_map.version, spec.job_id)
        before = job.output.stat().st_size
        start_supervisor(job, lock, resume=True)
        return before
    finally:
        os.close(lock)


def scale_job(job: JobPaths, workers: int) -> str:
    """Asks for another number of workers; what the controller answered.

    Raises InputError for a number that the job can't have or where its tasks can't come and go, JobEnded,
    ClusterError where no answer came.
    """
    spec = read_spec(job)
    if not 1 <= workers <= spec.shards:
        raise InputError(
            f"{spec.job_id} has {spec.shards} shards, so it takes 1 to {spec.shards} workers. "
            f"Received: {workers}"
        )
    token = secrets.token_hex(8)
    staged = job.wish.with_name(f".{job.wish.name}.{token}")
    staged.write_text(json.dumps({"workers": workers, "token": token}))
    staged.replace(job.wish)
    if not signal_controller(job.controller, signal.SIGUSR1):
        job.wish.unlink(missing_ok=True)
        raise JobEnded(f"{spec.job_id} has ended already: {Journal(job.journal).state().phase}")
    deadline = time.monotonic() + _REPLY_TIMEOUT
    while time.monotonic() < deadline:
        for entry in reversed(Journal(job.journal).entries()):
            if entry.event.get("token") == token:
                return _answer(entry.actions)
        if Journal(job.journal).state().phase in ENDED:
            raise JobEnded(f"{spec.job_id} has ended meanwhile")
        time.sleep(0.05)
    raise ClusterError(f"{spec.job_id} did not answer", logs=str(job.controller_log))


def _answer(actions: list[dict[str, object]]) -> str:
    said = "; ".join(str(a["text"]) for a in actions if a["action"] == "Say")
    if said.startswith("not scaled"):
        raise InputError(said)
    return said
