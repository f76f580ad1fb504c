"""Holds a job's tasks, so that they outlive its controller. One detached process for each job.

`python -P -m insitu.cluster.control.supervisor JOB_FOLDER LOCK` is the parent of every task and of the
controller, which runs the job and sends it commands. It decides nothing: it starts processes, writes what
they print into the logs, and keeps each end until the controller has written it down. A controller that dies
is started again, at most `MAX_CONTROLLERS` times within `CONTROLLER_WINDOW` seconds, and takes over. One that
says nothing for `CONTROLLER_TIMEOUT` seconds, since it is suspended or hangs, is killed. Whatever a task
leaves behind becomes a child of this process; when the job is over nothing of it stays. When this process
dies the system kills its tasks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.base.process.processes import adopt_orphans, end_all_children, is_stopped
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.control.controller import control
from insitu.cluster.control.job_cleanup import finalize_job
from insitu.cluster.control.request_inbox import EarlyRequests
from insitu.cluster.engines import (
    Channel,
    ChannelClosed,
    Ended,
    Engine,
    Message,
    Output,
    Wakeup,
    decode_command,
    open_channel_pair,
    open_engine,
    reply_to_call,
)
from insitu.cluster.hosts_engine import StoppedEarly, open_hosts_engine
from insitu.cluster.job_files import (
    Heartbeat,
    JobLogs,
    Journal,
    MergedLog,
    bound_controller_log,
    listen_for_requests,
    read_spec,
    rotated_path,
)
from insitu.cluster.leases import JobLease, keep_lease
from insitu.cluster.wire import HOSTS_ENGINE

MAX_CONTROLLERS = 60
CONTROLLER_WINDOW = 60.0
CONTROLLER_TIMEOUT = 60.0
LOOK_INTERVAL = 5.0
"""Seconds after which the supervisor looks at its controller, if nothing else happens."""
GAVE_UP_CODE = 1
_TAIL_BYTES = 4096
"""Bytes at the end of the controllers' log in which the last one's error is looked for."""


class Supervisor:
    """Does what the controller at the other end of a channel says."""

    def __init__(self, job: JobPaths, engine: Engine) -> None:
        self._engine = engine
        self._logs = JobLogs(job)
        self._channel: Channel | None = None
        self._running: dict[TaskId, tuple[int, int]] = {}
        """(incarnation, process id) of each running task."""
        self._roster: Message | None = None
        """The newest roster, for the next controller."""
        self._exits: dict[tuple[TaskId, int], int] = {}
        self.code: int | None = None
        """The job's exit code once it is over."""
        self.reason = ""
        """Why the controller gave up, if the journal may not say it."""
        self.silence = 0.0
        """Seconds of waiting in which the controller has said nothing."""

    def connect(self, channel: Channel | None) -> None:
        """Serve a new controller, or none, from now on."""
        if self._channel is not None:
            self._channel.close()
        self._channel = channel
        self.silence = 0.0
        if channel is None:
            return
        self._send(
            {
                "roster": self._roster,
                "running": [(str(t), *running) for t, running in self._running.items()],
                "exits": [(str(t), incarnation, code) for (t, incarnation), code in self._exits.items()],
            }
        )

    def serve(self) -> None:
        """Wait for whatever comes next, and see to it."""
        now, began = time.time(), time.monotonic()
        happenings = self._engine.wait(LOOK_INTERVAL)
        # A wait that took much longer is one in which this process was suspended itself.
        self.silence += min(time.monotonic() - began, 2 * LOOK_INTERVAL)
        for happened in happenings:
            if isinstance(happened, Output):
                self._logs.write(happened.task, happened.data, now)
            else:
                self._handle_exit(happened)
        self._logs.release(now)
        self.handle_messages()

    def handle_messages(self) -> None:
        """Perform the calls that the controller has sent so far."""
        with contextlib.suppress(ChannelClosed):
            if self._channel is not None:
                self._channel.flush()
                for message in self._channel.receive():
                    self.silence = 0.0
                    self._handle(message)

    def _handle_exit(self, ended: Ended) -> None:
        self._logs.close(ended.task)
        incarnation, _ = self._running.pop(ended.task)
        self._exits[ended.task, incarnation] = ended.code
        self._send({"ended": str(ended.task), "incarnation": incarnation, "code": ended.code})

    def _send(self, message: Message) -> None:
        # If this fails, the controller is gone. `connect` sends the next one all that it needs.
        with contextlib.suppress(ChannelClosed):
            if self._channel is not None:
                self._channel.send(message)

    def _handle(self, message: Message) -> None:
        match message["do"]:
            case "beat":
                pass
            case "launch":
                self._send(self._launch(message))
            case "signal":
                self._engine.signal(TaskId.parse(message["task"]), message["name"])
            case "standby":
                self._engine.keep_standby(int(message["count"]), decode_command(message))
            case "acknowledge":
                self._exits.pop((TaskId.parse(message["task"]), int(message["incarnation"])), None)
            case "finish":
                self.code, self.reason = int(message["code"]), str(message["reason"])
            case call:
                reply = reply_to_call(self._engine, message)
                if call == "roster" and "error" not in reply:
                    self._roster = message["roster"]
                self._send(reply)

    def _launch(self, message: Message) -> Message:
        task, incarnation = TaskId.parse(message["task"]), int(message["incarnation"])
        if task in self._running:
            # A controller that died launched this process and recorded nothing. It is killed, so that a later
            # launch of the task can succeed.
            self._engine.signal(task, "kill")
            return {"error": f"an earlier process of {task} was still running and has been killed"}
        # An engine brings what these shards read to the node, before the task starts.
        spec = TaskSpec(task, NodeId(message["node"]), tuple(map(int, message["shards"])))
        try:
            self._logs.open(task, incarnation)
            pid = self._engine.launch(spec, decode_command(message))
        except (ClusterError, OSError) as error:
            self._logs.close(task)
            return {"error": str(error)}
        self._running[task] = incarnation, pid
        return {"pid": pid}

    def close(self) -> None:
        self.connect(None)
        self._engine.close()
        self._logs.finish()


def supervise(
    job: JobPaths, lock: int, listener: socket.socket, lease: JobLease | None = None
) -> tuple[int, str]:
    """Run the job to its end. Returns its exit code, and why no controller could continue, if none could.

    `listener` takes the requests of users. `lease` ends before hosts remove their copies of the job.
    """
    wakeup = Wakeup(signal.SIGCHLD)
    early = EarlyRequests(job, listener, wakeup)
    engine = open_engine_of(job, wakeup, early.is_stopped)
    early.end()
    supervisor, heartbeat = Supervisor(job, engine), Heartbeat(job)
    begun: deque[float] = deque(maxlen=MAX_CONTROLLERS)
    controller, looked_at = 0, time.monotonic()
    try:
        while supervisor.code is None:
            if controller == 0:
                if len(begun) == MAX_CONTROLLERS and time.monotonic() - begun[0] < CONTROLLER_WINDOW:
                    end_lease(lease)
                    return GAVE_UP_CODE, describe_controller_deaths(job)
                begun.append(time.monotonic())
                with contextlib.suppress(ClusterError):
                    engine.reserve([])  # a child would hold on to ports that are let go of later
                mine, its = open_channel_pair()
                controller = os.fork()
                if not controller:
                    mine.close()
                    os._exit(control(job, lock, its, listener))
                its.close()
                wakeup.watch(mine)
                supervisor.connect(mine)
            heartbeat.beat()
            supervisor.serve()
            if time.monotonic() - looked_at >= LOOK_INTERVAL:
                looked_at = time.monotonic()
                bound_controller_log(job)
            wakeup.take_signals()
            if supervisor.silence >= CONTROLLER_TIMEOUT:
                supervisor.silence = 0.0
                kill_silent_controller(job, controller)
            if _has_ended(controller):
                supervisor.handle_messages()
                # Closed before the next one is forked, which would inherit it.
                supervisor.connect(None)
                controller = 0
        end_lease(lease)
        return supervisor.code, supervisor.reason
    finally:
        supervisor.close()


def end_lease(lease: JobLease | None) -> None:
    """Have no other supervisor be started: the job is over."""
    if lease is not None:
        lease.end()


def open_engine_of(job: JobPaths, wakeup: Wakeup, is_stopped: Callable[[], bool]) -> Engine:
    """Return the engine that the job's specification names. Raises ClusterError, and StoppedEarly once
    `is_stopped` says so while places of its tasks are waited for."""
    name = read_spec(job).engine
    if name == HOSTS_ENGINE:
        return open_hosts_engine(job, wakeup.fileno(), is_stopped)
    return open_engine(name, job, wakeup.fileno())


def kill_silent_controller(job: JobPaths, controller: int) -> None:
    """Kill the controller, a child that hasn't been reaped, and log why."""
    how = "is suspended" if is_stopped(controller) else "hangs"
    os.kill(controller, signal.SIGKILL)
    MergedLog(job).log(
        f"the job's controller {how}: it said nothing for {CONTROLLER_TIMEOUT:g} s. It is killed, and "
        "another takes over"
    )


def describe_controller_deaths(job: JobPaths) -> str:
    """Return why the job ends because its controllers die, with the last line that one of them wrote."""
    lines: list[bytes] = []
    for path in (rotated_path(job.controller_log), job.controller_log):
        with contextlib.suppress(OSError), path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines += [line.strip() for line in log.read().splitlines() if line.strip()]
    last = lines[-1].decode(errors="replace") if lines else "none wrote why"
    return (
        f"the job's controller died {MAX_CONTROLLERS} times within {CONTROLLER_WINDOW:g} s: {last}. All that "
        f"controllers wrote is in {job.controller_log}; once the cause is gone, `insitu resume "
        f"{job.root.name}` has it continue"
    )


def _has_ended(child: int) -> bool:
    """Reap the child if it has ended."""
    return os.waitpid(child, os.WNOHANG)[0] == child


def open_request_socket(job: JobPaths) -> socket.socket:
    """Open the job's socket for requests. Raises ClusterError if it can't."""
    try:
        return listen_for_requests(job)
    except OSError as error:
        raise ClusterError(
            f"the job can't begin: its socket for requests can't be made in {job.root}: {error}. Set "
            "INSITU_HOME to a folder on a file system that has room and holds Unix sockets, such as a local "
            "disk"
        ) from error


def main(arguments: list[str]) -> int:
    job, lock = JobPaths(Path(arguments[0])), int(arguments[1])
    os.set_inheritable(lock, False)
    adopt_orphans()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not SIG_IGN, which tasks would inherit.
        signal.signal(number, lambda *_: None)
    lease = keep_lease(job)
    try:
        with open_request_socket(job) as listener:
            code, reason = supervise(job, lock, listener, lease)
    except StoppedEarly:
        end_lease(lease)
        code, reason = Journal(job.journal).state().exit_code or 0, ""
    except ClusterError as error:
        end_lease(lease)
        code, reason = GAVE_UP_CODE, str(error)
    if reason:
        sys.stderr.write(f"insitu: {reason}\n")
    job.requests.unlink(missing_ok=True)
    if left := end_all_children():
        MergedLog(job).log(
            f"processes {', '.join(map(str, left))} don't end, though they were killed: they wait for a "
            "device or a file system that doesn't answer"
        )
    finalize_job(job, reason, time.time())
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
