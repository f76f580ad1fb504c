"""Requests to a job that is there already: to stop, to have other workers, to go on after it has ended."""

from __future__ import annotations

import os
import secrets
import select
import time

from insitu.cluster.client.status import read_status
from insitu.cluster.client.submission import start_supervisor
from insitu.cluster.decide import ControllerLostEvent, advance
from insitu.cluster.engines import Channel, ChannelClosed, Message
from insitu.cluster.job_files import (
    Journal,
    connect_for_requests,
    is_locked,
    read_placement,
    read_spec,
    take_lock,
)
from insitu.errors import ClusterError, InputError, JobEnded
from insitu.grid import Catalog
from insitu.paths import JobPaths, Paths
from insitu.spec import NO_CACHE

_REPLY_TIMEOUT = 60.0
"""Seconds within which a controller replies, on any machine."""
_RETRY_INTERVAL = 0.05


def resume_job(job: JobPaths) -> int:
    """Let a job that has ended go on from its last checkpoint, with the same shards and seed.

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
        if spec.cache != NO_CACHE:
            Catalog(Paths(job.root.parent.parent)).pin(spec.cache, placement.shard_map.version, spec.job_id)
        before = job.output.stat().st_size
        start_supervisor(job, lock, resume=True)
        return before
    finally:
        os.close(lock)


def scale_job(job: JobPaths, workers: int) -> str:
    """Ask for another number of workers. Returns what the controller replied.

    Raises InputError for a number that the job can't have or where its tasks can't come and go, JobEnded,
    ClusterError where no reply came.
    """
    spec = read_spec(job)
    if not 1 <= workers <= spec.shards:
        raise InputError(
            f"{spec.job_id} has {spec.shards} shards, so it takes 1 to {spec.shards} workers. "
            f"Received: {workers}"
        )
    return _request(job, {"do": "scale", "workers": workers})


def stop_job(job: JobPaths) -> None:
    """Ask the controller to end the job; asked a second time, its tasks are killed at once.

    Raises JobEnded where the job has ended already, ClusterError where no reply came.
    """
    _request(job, {"do": "stop"})


def _request(job: JobPaths, message: Message) -> str:
    """Send a request until the controller replies. Returns the text of the reply.

    A controller may die and another take its place at any time. The request's id tells that one sent again is
    the same. Raises InputError where it is refused, JobEnded, ClusterError.
    """
    message = {"id": secrets.token_hex(8), **message}
    deadline = time.monotonic() + _REPLY_TIMEOUT
    while time.monotonic() < deadline:
        reply = _exchange(job, message, deadline)
        if reply is not None:
            return _read_reply(job, reply)
        if not is_locked(job.controller):
            raise JobEnded(f"{job.root.name} has ended already: {read_status(job).state.phase}")
        time.sleep(_RETRY_INTERVAL)
    raise ClusterError(
        f"The controller of {job.root.name} did not reply within {_REPLY_TIMEOUT:g} s; it may still do what "
        "was asked. If its process is suspended, send it SIGCONT; if it hangs, SIGKILL: another takes over",
        logs=str(job.controller_log),
    )


def _exchange(job: JobPaths, message: Message, deadline: float) -> Message | None:
    """Return the reply to `message`, or None where the connection can't be made or is lost."""
    try:
        connection = connect_for_requests(job, max(0.001, deadline - time.monotonic()))
    except OSError:
        return None
    channel = Channel(connection)
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    try:
        channel.send(message)
        while (left := deadline - time.monotonic()) > 0:
            poll.poll(left * 1000)
            for reply in channel.receive():
                return reply
    except ChannelClosed:
        pass
    finally:
        channel.close()
    return None


def _read_reply(job: JobPaths, reply: Message) -> str:
    match reply.get("error"):
        case None:
            return str(reply["text"])
        case "ended":
            raise JobEnded(f"{job.root.name} has ended already: {reply['text']}")
        case "refused":
            raise InputError(str(reply["text"]))
    raise ClusterError(f"{job.root.name} did not take the request: {reply.get('text')}")
