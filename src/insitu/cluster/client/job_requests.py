"""Requests to a job that is there already: to stop, to have other workers, to resume after it has ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from insitu.base.errors import ClusterError, InputError, JobEnded, JobRunning, JobSpecError, MetadataError
from insitu.base.paths import JobPaths, Paths
from insitu.base.plugins import ENGINES, load_plugin
from insitu.base.process.processes import is_stopped, open_process, read_host
from insitu.base.spec import NO_CACHE, TaskId
from insitu.cluster.client.kept_environment import (
    change_variables,
    compose_environment,
    name_differences,
)
from insitu.cluster.client.start_conditions import check_file_size_limit, find_changes
from insitu.cluster.client.status import read_status
from insitu.cluster.client.submission import resolve_paths, start_supervisor
from insitu.cluster.control import finalize_job
from insitu.cluster.decide import ENDED, ControllerLostEvent, ResumedEvent, advance
from insitu.cluster.engines import Channel, ChannelClosed, Message, SignalName
from insitu.cluster.job_files import (
    JobEnvironment,
    Journal,
    MergedLog,
    connect_for_requests,
    find_last_sign,
    find_other_host,
    is_locked,
    read_controller,
    read_environment,
    read_placement,
    read_spec,
    read_supervisor,
    signal_controller,
    take_lock,
    write_environment,
)
from insitu.cluster.leases import claim_job, forget_job
from insitu.grid import Catalog

REPLY_TIMEOUT = 60.0
"""Seconds within which a controller replies, on any machine."""
STOP_TIMEOUT = 20.0
"""Seconds for which a controller is asked to stop before it is killed."""
END_TIMEOUT = 60.0
"""Seconds within which a job that stops has ended: its tasks get SIGKILL long before."""
Notify = Callable[[str], None]


class NoReply(ClusterError):
    """Raised if no controller replied in time."""


_RETRY_INTERVAL = 0.05


@dataclass(frozen=True, slots=True)
class Shell:
    """The variables for a job that resumes: of a user's shell, or a server that is asked from elsewhere."""

    #: The variables of this process, or what stands for them.
    variables: Mapping[str, str]
    #: Names of variables that the job takes from here, set or not, though it has its own.
    names: tuple[str, ...] = ()
    #: Whether the user's own shell is another one, of which no more is known.
    is_server: bool = False

    @classmethod
    def of_server(cls, given: Mapping[str, str | None]) -> Shell:
        """Return what a server knows of a caller elsewhere: some variables, None for one that isn't set."""
        here = {name: value for name, value in os.environ.items() if name not in given}
        there = {name: value for name, value in given.items() if value is not None}
        return cls(here | there, tuple(given), is_server=True)


def resume_job(
    job: JobPaths,
    shell: Shell | None = None,
    notify: Notify = lambda text: None,
    revision: int | None = None,
    *,
    only_paused: bool = False,
) -> int:
    """Resume a job that has ended from its last checkpoint, with the same shards, seed and variables.

    `shell` is by default this process's. `notify` receives the differences from the job's start; they are
    logged, too. Returns how many bytes the merged output held before. Raises JobEnded for a job that has
    finished, JobRunning for one that runs, JobSpecError if secrets lack or `shell` gives what a job can't
    take, UnknownCache if its version of the cache is gone, ClusterError, MetadataError.

    `revision`: that of the job's key if no user asks for it, but its supervisor is lost. JobEnded is then
    raised for one that has ended in any way, or whose key has changed. `only_paused`: likewise for one that
    isn't paused any more.
    """
    name = job.root.name
    if is_locked(job.controller):
        raise JobRunning(f"{name} is running; `insitu attach {name}` follows it")
    host = find_other_host(job.controller)
    if host and Journal(job.journal).state().phase not in ENDED:
        raise JobRunning(_describe_other_host(job, host))
    check_file_size_limit()
    spec = read_spec(job)
    placement, _ = read_placement(job)
    lock = take_lock(job.controller)
    try:
        journal = Journal(job.journal)
        now = time.time()
        ended = find_last_sign(job)
        before_loss = journal.state()
        state, actions = advance(before_loss, ControllerLostEvent(), ended)
        is_over = revision is not None and before_loss.phase in ENDED
        if state.phase == "finished" or is_over or (only_paused and not job.paused.exists()):
            raise JobEnded(f"{name} has {state.phase}: there is nothing to continue with")
        shell = shell or Shell(os.environ)
        kept, lines = _change_environment(job, shell)
        if spec.cache != NO_CACHE:
            Catalog(Paths(job.root.parent.parent)).pin(spec.cache, placement.shard_map.version, spec.job_id)
        claim_job(job, revision)
        write_environment(job, kept)
        before = job.output.stat().st_size
        for line in lines:
            MergedLog(job).log(line)
            notify(line)
        if actions:
            journal.record(ended, ControllerLostEvent(), actions, state)
        resumed, _ = advance(state, ResumedEvent(), now)
        journal.record(now, ResumedEvent(), [], resumed)
        try:
            start_supervisor(job, lock, shell.variables)
        except ClusterError as error:
            forget_job(Paths(job.root.parent.parent), name)
            finalize_job(job, error.message, time.time())
            raise
        job.paused.unlink(missing_ok=True)
        return before
    finally:
        os.close(lock)


def _change_environment(job: JobPaths, shell: Shell) -> tuple[JobEnvironment, list[str]]:
    """Return what a job keeps from now on, and what the user should know. Raises InsituError."""
    kept = read_environment(job)
    if shell.is_server and (unknown := sorted(set(shell.names) - set(kept.secrets))):
        raise JobSpecError(
            f"From elsewhere --env gives secrets that the job was started with: "
            f"{', '.join(kept.secrets) or 'none'}. Received: {', '.join(unknown)}. Resume it on its machine"
        )
    variables = resolve_paths(shell.variables)
    changed = change_variables(kept, variables, shell.names, os.path.isfile)
    environment = compose_environment(changed, variables, read_host())
    shown = {} if shell.is_server else variables
    lines = [*find_changes(job, kept, environment), *name_differences(changed, shown, environment)]
    return changed, lines


def scale_job(job: JobPaths, workers: int) -> str:
    """Ask for another number of workers. Returns what the controller replied.

    Raises InputError for a number that the job can't have or if its tasks can't come and go, JobEnded,
    ClusterError if no reply came.
    """
    spec = read_spec(job)
    if not 1 <= workers <= spec.shards:
        raise InputError(
            f"{spec.job_id} has {spec.shards} shards, so it takes 1 to {spec.shards} workers. "
            f"Received: {workers}"
        )
    return _request(job, {"do": "scale", "workers": workers})


def signal_task(job: JobPaths, task: TaskId, name: SignalName) -> None:
    """Have a signal sent to a task of the job, on whichever host it runs. Raises JobEnded, ClusterError."""
    _request(job, {"do": "signal", "task": str(task), "name": name})


def stop_job(job: JobPaths, notify: Notify = lambda text: None, *, pauses: bool = False) -> None:
    """Ask the controller to end the job; asked a second time, its tasks are killed at once.

    A controller that doesn't answer is killed, and the next one is asked. If that doesn't help, all of the
    job's processes are killed. No head starts another supervisor from then on, and unless it `pauses` it
    doesn't resume by itself. `notify` receives a message about it. Raises JobEnded if the job has ended
    already, ClusterError if its processes can't be ended.
    """
    was_paused = not pauses and end_pause(job)
    was_to_run = False
    try:
        was_to_run = forget_job(Paths(job.root.parent.parent), job.root.name)
    except MetadataError as error:
        notify(f"Another supervisor may be started when etcd answers. Stop the job again then: {error}")
    try:
        _request(job, {"do": "stop"}, STOP_TIMEOUT)
        return
    except JobEnded:
        if was_paused:
            return
        if not was_to_run or Journal(job.journal).state().phase in ENDED:
            raise
        finalize_job(job, "it was stopped before another supervisor was started", time.time())
        return
    except NoReply:
        controller = read_controller(job.controller)
        how = "is suspended" if controller and is_stopped(controller.pid) else "doesn't answer"
        notify(f"The controller of {job.root.name} {how}: killing it, so that another takes over")
    with contextlib.suppress(ClusterError):
        signal_controller(job.controller, signal.SIGKILL)
    try:
        _request(job, {"do": "stop"}, STOP_TIMEOUT)
    except NoReply:
        kill_job(job, notify)


def end_pause(job: JobPaths) -> bool:
    """Return whether a job is paused. Its places are removed then, and it stays stopped. Raises
    InsituError."""
    if not job.paused.exists():
        return False
    load_plugin(ENGINES, read_spec(job).starter)(job).remove_places()
    job.paused.unlink(missing_ok=True)
    return True


def end_job(job: JobPaths, notify: Notify = lambda text: None, *, pauses: bool = False) -> None:
    """Stop a job, and return once nothing of it runs. Raises JobEnded, ClusterError; see `stop_job`."""
    stop_job(job, notify, pauses=pauses)
    if not _wait_for_end(job, END_TIMEOUT):
        kill_job(job, notify)


def kill_job(job: JobPaths, notify: Notify = lambda text: None) -> None:
    """Kill the job's supervisor, with which its tasks end. Raises ClusterError if that can't be done."""
    kill_supervisor(job, notify)
    finalize_job(job, "its processes didn't answer to `insitu stop` and were killed", time.time())


def kill_supervisor(job: JobPaths, notify: Notify = lambda text: None) -> None:
    """Kill the job's supervisor, and return once nothing of the job runs here. Raises ClusterError if that
    can't be done."""
    supervisor = read_supervisor(job.controller)
    descriptor = open_process(supervisor) if supervisor is not None else None
    if supervisor is not None and descriptor is not None:
        how = "is suspended" if is_stopped(supervisor.pid) else "doesn't answer"
        notify(f"The supervisor of {job.root.name} {how}: killing it and everything that it runs")
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)
    if not _wait_for_end(job, END_TIMEOUT):
        name = "unknown" if supervisor is None else supervisor.pid
        raise ClusterError(
            f"{job.root.name} must have ended within {END_TIMEOUT:g} s of being killed. Received: its lock "
            f"is still held; its supervisor was process {name}. `fuser {job.controller}` names who holds it",
            logs=str(job.controller_log),
        )


def _wait_for_end(job: JobPaths, timeout: float) -> bool:
    """Return whether nothing of the job runs, or runs any more within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while is_locked(job.controller):
        if time.monotonic() > deadline:
            return False
        time.sleep(_RETRY_INTERVAL)
    return True


def _request(job: JobPaths, message: Message, timeout: float | None = None) -> str:
    """Send a request until the controller replies. Returns the text of the reply.

    A controller may die and another take its place at any time. Each recognizes a repeated request by
    its id. Raises InputError if it is refused, JobEnded, NoReply after `timeout` seconds, ClusterError.
    """
    timeout = REPLY_TIMEOUT if timeout is None else timeout
    if (host := find_other_host(job.controller)) and read_status(job).running:
        raise InputError(_describe_other_host(job, host))
    message = {"id": secrets.token_hex(8), **message}
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        reply = _exchange(job, message, deadline)
        if reply is not None:
            return _read_reply(job, reply)
        if not is_locked(job.controller):
            raise JobEnded(f"{job.root.name} has ended already: {read_status(job).state.phase}")
        time.sleep(_RETRY_INTERVAL)
    raise NoReply(
        f"The controller of {job.root.name} did not reply within {timeout:g} s; it may still do what was "
        "asked. If its process is suspended, send it SIGCONT; if it hangs, SIGKILL: another takes over",
        logs=str(job.controller_log),
    )


def _describe_other_host(job: JobPaths, host: str) -> str:
    return (
        f"{job.root.name} runs on another host, {host}: give this command there. Where that host won't come "
        f"back, delete {job.controller}; the job then counts as ended"
    )


def _exchange(job: JobPaths, message: Message, deadline: float) -> Message | None:
    """Return the reply to `message`, or None if the connection can't be made or is lost."""
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
