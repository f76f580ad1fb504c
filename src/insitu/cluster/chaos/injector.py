"""Injects faults into a running job, drawn from a seed or given one by one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from insitu.base.context import JOB_ID_ENV
from insitu.base.errors import ClusterError, InputError, InsituError
from insitu.base.paths import JobPaths, Paths
from insitu.base.progress import read_progress
from insitu.base.spec import TaskId
from insitu.cluster.client import read_exit_code, scale_job, signal_task
from insitu.cluster.decide import ENDED, EpochStep, JobState, TaskState, find_furthest
from insitu.cluster.job_files import (
    Journal,
    is_locked,
    read_controller,
    read_placement,
    read_spec,
    signal_controller,
)
from insitu.cluster.wire import HOSTS_ENGINE

Kind = Literal[
    "kill", "stop", "delay", "drop", "half-open", "disk", "scale", "controller", "checkpoint", "node"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_KINDS: tuple[Kind, ...] = ("kill", "kill", "stop", "delay", "controller", "checkpoint")
"""The kinds that faults are drawn from by default; the others need rights or copies that a job may lack."""
WITHOUT_TASK: tuple[Kind, ...] = ("controller", "checkpoint", "disk", "scale")
_OF_THIS_MACHINE: tuple[Kind, ...] = ("drop", "half-open", "disk", "node")
"""The kinds that act on processes and files in their place."""
_SIGNALS = {"kill": signal.SIGKILL, "suspend": signal.SIGSTOP}
SUSPEND_SECONDS = 0.5
"""Seconds for which `delay` suspends a task and `disk` fills the disk."""
_POLL_INTERVAL = 0.01
_FAULT = re.compile(r"(?P<kind>[a-z-]+)(?:[ ](?P<task>[a-z]+:\d+))?(?:[ ](?P<epoch>\d+)\.(?P<step>\d+))?")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and when it is injected."""

    #: The fault's kind.
    kind: Kind
    #: The task that is hit; None for kinds that hit no single one.
    task: TaskId | None = None
    #: The (epoch, step) at which it is due; None if `steps` decide.
    at: EpochStep | None = None
    #: Steps after the last fault, once all tasks have recovered from that; 0 is at once.
    steps: int = 1
    #: Another task is hit if `task` doesn't train.
    any_task: bool = False

    def __str__(self) -> str:
        task = f" {self.task}" if self.task else ""
        return f"{self.kind}{task}{f' {self.at[0]}.{self.at[1]}' if self.at else ''}"


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """The outcome of one fault."""

    #: The fault.
    fault: Fault
    #: The progress of the job then.
    at: EpochStep | None
    #: It was injected.
    done: bool
    #: The process that was hit, or the reason why none was.
    note: str


def parse_fault(text: str) -> Fault:
    """Return the fault that `text` names: `kill worker:1 2.5` kills worker 1 in epoch 2 at step 5, both from
    0.

    Raises InputError.
    """
    found = _FAULT.fullmatch(text.strip())
    if found is None or found["kind"] not in KINDS:
        raise InputError(
            f"A fault is KIND [TASK] [EPOCH.STEP] with a KIND of {', '.join(KINDS)}, such as "
            f"'kill worker:1 2.5'. Received: {text!r}"
        )
    at = (int(found["epoch"]), int(found["step"])) if found["epoch"] else None
    kind: Kind = next(k for k in KINDS if k == found["kind"])
    return Fault(kind, TaskId.parse(found["task"]) if found["task"] else None, at)


def draw_faults(seed: int, count: int, workers: int, kinds: Sequence[Kind] = DEFAULT_KINDS) -> list[Fault]:
    """Return `count` faults that follow from `seed` alone."""
    chooser = random.Random(seed)
    faults = []
    for _ in range(count):
        kind = chooser.choice(list(kinds))
        worker = TaskId("worker", chooser.randrange(workers))
        task = None if kind in WITHOUT_TASK else worker
        faults.append(Fault(kind, task, steps=chooser.randint(0, 6), any_task=True))
    return faults


def plan_faults(given: Sequence[str], seed: int, count: int, workers: int, kinds: str | None) -> list[Fault]:
    """Return the faults that a command line asks for: those `given`, else `count` drawn ones.

    Raises InputError.
    """
    if given:
        return [parse_fault(text) for text in given]
    named = kinds.split(",") if kinds else list(DEFAULT_KINDS)
    unknown = sorted(set(named) - set(KINDS))
    if unknown or count < 0:
        raise InputError(
            f"--kinds are of {', '.join(KINDS)}, --faults at least 0. Received: {unknown}, {count}"
        )
    return draw_faults(seed, count, workers, [k for name in named for k in KINDS if k == name])


class FaultInjector:
    """Injects faults into one running job, one after the other."""

    def __init__(self, paths: Paths, job: JobPaths, timeout: float) -> None:
        self._paths = paths
        self._job = job
        self._timeout = timeout
        self._journal = Journal(job.journal)
        self._on_hosts = read_spec(job).engine == HOSTS_ENGINE
        self._last_position = (-1, -1)

    def run(self, faults: Sequence[Fault], report: Callable[[InjectedFault], None]) -> list[InjectedFault]:
        """Inject the faults in order, until the last one or the job's end. Returns their outcomes."""
        done: list[InjectedFault] = []
        for fault in faults:
            here = self._wait_for(fault)
            if here is None:
                break
            try:
                note, worked = self._inject(fault), True
            except (InsituError, OSError) as error:
                note, worked = str(error), False
            done.append(InjectedFault(fault, here, worked, note))
            report(done[-1])
            self._last_position = here
        return done

    def _state(self) -> JobState:
        return self._journal.state()

    def _wait_for(self, fault: Fault) -> EpochStep | None:
        """Wait until the fault is due.

        Returns the progress of the job then; None if it has ended or stands still.
        """
        deadline = time.monotonic() + self._timeout
        moves = 0
        before = self._last_position
        while time.monotonic() < deadline:
            state = self._state()
            if state.phase in ENDED or not is_locked(self._job.controller):
                return None
            records = {t.task: read_progress(self._job.progress(t.task)) for t in state.members}
            here = find_furthest(records)
            trained = [r for r in records.values() if r is not None and r.step >= 0]
            there = fault.task is None or self._choose_victim(fault, state) is not None
            whole = len(trained) == len(records) > 0 or fault.steps == 0
            if here is not None and here > before:
                moves, before = moves + 1, here
            if here is not None and there and whole and self._is_due(fault, here, moves):
                return here
            time.sleep(_POLL_INTERVAL)
        return None

    def _is_due(self, fault: Fault, here: EpochStep, moves: int) -> bool:
        if fault.at is not None:
            return here >= fault.at
        return moves >= fault.steps

    def _inject(self, fault: Fault) -> str:
        """Inject the fault. Returns what was hit. Raises InsituError, OSError."""
        if self._on_hosts and fault.kind in _OF_THIS_MACHINE:
            raise ClusterError(
                f"a fault of kind {fault.kind} is for tasks of this machine, not of other hosts"
            )
        match fault.kind:
            case "kill":
                return self._signal(fault, "kill")
            case "stop":
                return self._signal(fault, "suspend")
            case "delay" if self._on_hosts:
                victim = self._find_victim(fault)
                signal_task(self._job, victim.task, "suspend")
                time.sleep(SUSPEND_SECONDS)
                signal_task(self._job, victim.task, "continue")
                return _format_victim(victim)
            case "delay":
                victim = self._find_victim(fault)
                with _opened(self._job, victim) as process:
                    signal.pidfd_send_signal(process, signal.SIGSTOP)
                    time.sleep(SUSPEND_SECONDS)
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(process, signal.SIGCONT)
                return _format_victim(victim)
            case "controller":
                if not signal_controller(self._job.controller, signal.SIGKILL):
                    raise ClusterError(
                        "no controller runs: the job has ended, or a new one is about to begin"
                    )
                return "the controller"
            case "checkpoint":
                return self._corrupt_checkpoint()
            case "node":
                return self._lose_node(fault)
            case "drop":
                victim = self._find_victim(fault)
                with _opened(self._job, victim):
                    return f"{drop_connections(victim.pid)} connections of {_format_victim(victim)}"
            case "half-open":
                victim = self._find_victim(fault)
                with _opened(self._job, victim):
                    return f"{blackhole_connections(victim.pid)} connections of {_format_victim(victim)}"
            case "scale":
                return self._scale()
            case "disk":
                return self._fill_disk(fault)

    @staticmethod
    def _choose_victim(fault: Fault, state: JobState) -> TaskState | None:
        """Return the task that the fault hits, if it runs."""
        alive = [t for t in state.members if t.alive and t.pid]
        named = next((t for t in alive if t.task == fault.task), None)
        if named is None and fault.any_task and fault.task is not None and alive:
            return alive[fault.task.index % len(alive)]
        return named

    def _find_victim(self, fault: Fault) -> TaskState:
        victim = self._choose_victim(fault, self._state())
        if victim is None:
            raise ClusterError(f"{fault.task} doesn't run just now; give the fault a later EPOCH.STEP")
        return victim

    def _signal(self, fault: Fault, name: Literal["kill", "suspend"]) -> str:
        victim = self._find_victim(fault)
        if self._on_hosts:
            signal_task(self._job, victim.task, name)
        else:
            with _opened(self._job, victim) as process:
                signal.pidfd_send_signal(process, _SIGNALS[name])
        return _format_victim(victim)

    def _corrupt_checkpoint(self) -> str:
        """Flip one bit in the middle of the newest checkpoint's largest file."""
        files = [p for p in self._job.checkpoints.rglob("*") if p.is_file() and p.stat().st_size]
        if not files:
            raise ClusterError("there is no checkpoint yet; give the fault a later EPOCH.STEP")
        newest = max(files, key=lambda p: (p.stat().st_mtime_ns, p.stat().st_size))
        with newest.open("r+b") as file:
            file.seek(newest.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        return str(newest.relative_to(self._job.root))

    def _lose_node(self, fault: Fault) -> str:
        """Delete the store of the task's node and kill all of the job's tasks there."""
        state = self._state()
        node = self._find_victim(fault).node if fault.task else state.members[0].node
        _, cache = read_placement(self._job)
        alone = [p.index for p in cache.partitions if p.owners == (node,)]
        if node is None or alone:
            raise ClusterError(f"partitions {alone[:5]} have no backup elsewhere; import with --backups 1")
        shutil.rmtree(self._paths.node(node))
        victims = [t for t in state.alive if t.node == node]
        for task in victims:
            with contextlib.suppress(ClusterError, ProcessLookupError), _opened(self._job, task) as process:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        return f"{node} with {', '.join(str(t.task) for t in victims)}"

    def _scale(self) -> str:
        """Ask for one worker fewer; from one, for as many as shards.

        Raises InputError, JobEnded, ClusterError.
        """
        now = len(self._state().members)
        return scale_job(self._job, now - 1 if now > 1 else read_spec(self._job).shards)

    def _fill_disk(self, fault: Fault) -> str:
        """Fill the disk for the task, or for all tasks and the controller.

        Processes that they start meanwhile have room.
        """
        pids = [self._find_victim(fault).pid] if fault.task else [t.pid for t in self._state().alive if t.pid]
        if not fault.task and (controller := read_controller(self._job.controller)):
            pids.append(controller.pid)
        with simulate_full_disk(pids):
            time.sleep(SUSPEND_SECONDS)
        return f"{len(pids)} processes"


@contextlib.contextmanager
def _opened(job: JobPaths, victim: TaskState) -> Iterator[int]:
    """Yield a descriptor of the task's process, which by its environment is one of this job.

    The journal may name a process that has ended, and whose number another one has by now. Raises
    ClusterError.
    """
    mark = f"{JOB_ID_ENV}={job.root.name}".encode()
    try:
        process = os.pidfd_open(victim.pid)
    except OSError as error:
        raise ClusterError(
            f"{_format_victim(victim)} has ended; give the fault a later EPOCH.STEP"
        ) from error
    try:
        try:
            is_task = mark in Path(f"/proc/{victim.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            is_task = False
        if not is_task:
            raise ClusterError(
                f"{_format_victim(victim)} is none of this job; give the fault a later EPOCH.STEP"
            )
        yield process
    finally:
        os.close(process)


def _format_victim(victim: TaskState) -> str:
    return f"{victim.task}, process {victim.pid}"


def read_results(job: JobPaths) -> list[str]:
    """Return the lines of the job's tasks that begin with RESULT, each once."""
    lines = job.output.read_text(errors="replace").splitlines()
    return sorted(
        {line.partition("] ")[2] for line in lines if line.partition("] ")[2].startswith("RESULT ")}
    )


def find_leftovers(paths: Paths, job: JobPaths) -> list[str]:
    """Return what a job that has ended should not have left: processes, shared memory, half-written files."""
    found = []
    mark = f"INSITU_JOB_ID={job.root.name}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(f"process {entry.name}")
    with contextlib.suppress(OSError):
        found += [f"/dev/shm/{p.name}" for p in Path("/dev/shm").iterdir() if job.root.name in p.name]
    found += [str(p.relative_to(job.root)) for p in job.root.rglob(".*") if _is_staged(p)]
    return found


def _is_staged(path: Path) -> bool:
    """Return whether `path` may be a file that was left half-written.

    This takes more for one than `durable.is_staged_file` does, by which `finalize_job` cleans up: the check
    must not have the blind spots of what it checks.
    """
    return path.is_file() and bool(re.search(r"\.(json|progress)(\.\w+)+$", path.name))


def wait_until_ended(job: JobPaths, timeout: float) -> int:
    """Return the job's exit code once it has ended. Raises ClusterError if that takes too long."""
    deadline = time.monotonic() + timeout
    while is_locked(job.controller):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{job.root.name} has not ended in {timeout:g} s. Raise --patience, or see where it stands",
                logs=str(job.output),
            )
        time.sleep(0.05)
    return read_exit_code(job)


# Harms a process from outside: ends its connections, makes them black holes, fills its disk.
#
# A socket of another process is reached by pidfd_getfd(2), which needs Linux 5.6 and the right to trace the
# process (its own user if the system allows that, or root). A full disk is a limit on the size of files, so
# it needs neither a mount nor root


_PIDFD_GETFD = 438
"""The number of the system call, the same on every architecture."""
_ATTACH_FILTER = 26
_RETURN = 0x06
_ESTABLISHED = "01"


def find_connections(pid: int) -> list[int]:
    """Return the process's descriptors that are established TCP connections."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            inodes |= {f[9] for f in map(str.split, lines) if f[3] == _ESTABLISHED}
    found = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path).removeprefix("socket:[").rstrip("]") in inodes:
                found.append(int(entry.name))
    return sorted(found)


def _sockets(pid: int) -> Iterator[socket.socket]:
    """Yield this process's own descriptors of those connections. Raises ClusterError if there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    reached = False
    handle = os.pidfd_open(pid)
    try:
        for number in find_connections(pid):
            descriptor = libc.syscall(_PIDFD_GETFD, handle, number, 0)
            if descriptor < 0:
                why = os.strerror(ctypes.get_errno())
                raise ClusterError(
                    f"connections of process {pid} can't be reached: {why}. Run this as root, or allow "
                    "processes "
                    "to trace each other (kernel.yama.ptrace_scope=0)"
                )
            reached = True
            with socket.socket(fileno=descriptor) as connection:
                yield connection
    finally:
        os.close(handle)
    if not reached:
        raise ClusterError(
            f"process {pid} has no TCP connection: tasks of one host exchange by shared memory; ask for "
            "another fault"
        )


def drop_connections(pid: int) -> int:
    """End all of the process's TCP connections, both ways; return how many.

    Raises ClusterError, OSError.
    """
    count = 0
    for connection in _sockets(pid):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def blackhole_connections(pid: int) -> int:
    """Drop all that arrives for the process over its present connections, and notify neither side.

    So each connection is half open, as after a cable was pulled. Returns their number. Raises ClusterError,
    OSError.
    """
    count = 0
    # A packet filter of one instruction: keep 0 bytes.
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(instruction))
    for connection in _sockets(pid):
        connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
        count += 1
    return count


@contextlib.contextmanager
def simulate_full_disk(pids: Iterable[int]) -> Iterator[None]:
    """Let the processes write no byte to any file meanwhile: EFBIG, which is reported as a full disk."""
    before: dict[int, tuple[int, int]] = {}
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
                before[pid] = (soft, hard)
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
