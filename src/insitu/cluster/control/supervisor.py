"""Holds a job's tasks, so that they outlive its controller. One detached process for each job.

`python -P -m insitu.cluster.control.supervisor JOB_FOLDER LOCK [resume]` is the parent of every task and of
the controller, which runs the job and tells it by messages what to do. It decides nothing: it starts
processes, writes what they print into the logs, and keeps each end until the controller has written it down.
A controller that dies is started again, at most `MAX_CONTROLLERS` times within `CONTROLLER_WINDOW` seconds,
and takes over. Whatever a task leaves behind becomes a child of this process; when the job is over nothing of
it stays. When this process dies the system kills its tasks.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections import deque
from pathlib import Path

from insitu.cluster.control.channel import Channel, ChannelClosed, Message, open_channel_pair
from insitu.cluster.control.controller import control
from insitu.cluster.control.job_cleanup import finalize_job
from insitu.cluster.engines import Command, Ended, LocalEngine, Output
from insitu.cluster.job_files import JobLogs
from insitu.cluster.task import PARENT_ENV
from insitu.errors import ClusterError
from insitu.paths import JobPaths
from insitu.processes import adopt_orphans, end_all_children
from insitu.spec import NodeId, TaskId, TaskSpec

MAX_CONTROLLERS = 60
CONTROLLER_WINDOW = 60.0
GAVE_UP_CODE = 1


class Supervisor:
    """Does what the controller at the other end of a channel says."""

    def __init__(self, job: JobPaths, engine: LocalEngine) -> None:
        self._engine = engine
        self._logs = JobLogs(job)
        self._channel: Channel | None = None
        self._incarnations: dict[TaskId, int] = {}
        self._exits: dict[tuple[TaskId, int], int] = {}
        self.code: int | None = None
        """The job's exit code once it is over."""

    def connect(self, channel: Channel | None) -> None:
        """A new controller is there, or none."""
        if self._channel is not None:
            self._channel.close()
        self._channel = channel
        if channel is None:
            return
        pids = self._engine.processes
        self._send(
            {
                "running": [
                    (str(t), incarnation, pids.get(t, 0)) for t, incarnation in self._incarnations.items()
                ],
                "exits": [(str(t), incarnation, code) for (t, incarnation), code in self._exits.items()],
            }
        )

    def serve(self) -> None:
        """Waits for whatever comes next, and sees to it."""
        now = time.time()
        for happened in self._engine.wait(None):
            if isinstance(happened, Output):
                self._logs.write(happened.task, happened.data, now)
            else:
                self._handle_exit(happened)
        self.handle_messages()

    def handle_messages(self) -> None:
        """Does what the controller has said so far."""
        with contextlib.suppress(ChannelClosed):
            for message in self._channel.receive() if self._channel else []:
                self._handle(message)

    def _handle_exit(self, ended: Ended) -> None:
        self._logs.close(ended.task)
        incarnation = self._incarnations.pop(ended.task)
        self._exits[ended.task, incarnation] = ended.code
        self._send({"ended": str(ended.task), "incarnation": incarnation, "code": ended.code})

    def _send(self, message: Message) -> None:
        # What can't be sent is told to the next controller.
        with contextlib.suppress(ChannelClosed):
            if self._channel is not None:
                self._channel.send(message)

    def _handle(self, message: Message) -> None:
        match message["do"]:
            case "launch":
                self._send(self._launch(message))
            case "reserve":
                self._send(self._reserve(message))
            case "signal":
                self._engine.signal(TaskId.parse(message["task"]), message["name"])
            case "standby":
                self._engine.keep_standby(int(message["count"]), _decode_command(message))
            case "acknowledge":
                self._exits.pop((TaskId.parse(message["task"]), int(message["incarnation"])), None)
            case "finish":
                self.code = int(message["code"])

    def _reserve(self, message: Message) -> Message:
        tasks = [TaskSpec(TaskId.parse(t), NodeId("")) for t in message["tasks"]]
        try:
            return {"addresses": {str(t): a for t, a in self._engine.reserve(tasks).items()}}
        except ClusterError as error:
            return {"error": str(error)}

    def _launch(self, message: Message) -> Message:
        task, incarnation = TaskId.parse(message["task"]), int(message["incarnation"])
        if task in self._incarnations:
            # Of a controller that nothing is known of: the next try finds room.
            self._engine.signal(task, "kill")
            return {"error": f"{task} lives already"}
        try:
            self._logs.open(task, incarnation)
            self._engine.launch(TaskSpec(task, NodeId(message["node"])), _decode_command(message))
        except (ClusterError, OSError) as error:
            self._logs.close(task)
            return {"error": str(error)}
        self._incarnations[task] = incarnation
        return {"pid": self._engine.processes[task]}

    def close(self) -> None:
        self._engine.close()
        self._logs.finish()


def _decode_command(message: Message) -> Command:
    environment = {**message["environment"], PARENT_ENV: str(os.getpid())}
    return Command(tuple(message["arguments"]), environment, Path(message["folder"]))


class _WakeupPoller:
    """One descriptor that becomes readable when a child has ended or the controller says something."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll.register(self._reader, select.EPOLLIN)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    def watch(self, channel: Channel) -> None:
        self._epoll.register(channel, select.EPOLLIN)


def supervise(job: JobPaths, lock: int, *, resume: bool) -> int:
    """Runs the job to its end. Returns its exit code."""
    poller = _WakeupPoller()
    engine = LocalEngine(poller.fileno())
    supervisor = Supervisor(job, engine)
    begun: deque[float] = deque(maxlen=MAX_CONTROLLERS)
    controller = 0
    try:
        while supervisor.code is None:
            if controller == 0:
                if len(begun) == MAX_CONTROLLERS and time.monotonic() - begun[0] < CONTROLLER_WINDOW:
                    sys.stderr.write(f"{MAX_CONTROLLERS} controllers died within {CONTROLLER_WINDOW:g} s\n")
                    return GAVE_UP_CODE
                begun.append(time.monotonic())
                engine.reserve([])  # lets go of ports that a child would hold on to
                mine, its = open_channel_pair()
                controller = os.fork()
                if not controller:
                    mine.close()
                    os._exit(control(job, lock, its, resume=resume))
                its.close()
                resume = False
                poller.watch(mine)
                supervisor.connect(mine)
            supervisor.serve()
            poller.clear()
            if _reap(engine.pids, controller):
                supervisor.handle_messages()
                # Closed before the next one is forked, which would inherit it.
                supervisor.connect(None)
                controller = 0
    finally:
        supervisor.close()
    return supervisor.code


def _reap(tasks: set[int], controller: int) -> bool:
    """Reaps orphans; tasks are left to their engine. True where the controller has ended."""
    ended = False
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return ended
        if found is None or found.si_pid in tasks:
            return ended
        os.waitpid(found.si_pid, 0)
        ended = ended or found.si_pid == controller


def main(arguments: list[str]) -> int:
    job, lock = JobPaths(Path(arguments[0])), int(arguments[1])
    os.set_inheritable(lock, False)
    adopt_orphans()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not SIG_IGN, which tasks would inherit.
        signal.signal(number, lambda *_: None)
    code = supervise(job, lock, resume="resume" in arguments[2:])
    end_all_children()
    finalize_job(job)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
