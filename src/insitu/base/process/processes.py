"""Controls processes by what Linux offers: parents, children, priority, memory."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from insitu.base.errors import ClusterError

END_TIMEOUT = 30.0
"""Seconds in which a process that was killed ends, on any machine, unless it waits in the kernel."""
_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


@functools.cache
def read_host() -> str:
    """Return a value that identifies this host: its name, and a digest of its machine id.

    It stays the same when the machine starts again. A container has its own, since it has a name of its own.
    """
    try:
        machine = Path("/etc/machine-id").read_bytes().strip()
    except OSError:
        machine = b""
    return f"{socket.gethostname()}-{hashlib.sha256(machine).hexdigest()[:12]}"


@functools.cache
def read_boot() -> str:
    """Return a value that identifies this start of the machine, and this container on it; "" if unknown.

    A host may get another name while it runs.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of this host. Its number alone is given to another process once it has ended."""

    #: The process id.
    pid: int
    #: When it was started, in clock ticks since the machine was.
    start: int


def identify_process(pid: int) -> ProcessIdentity | None:
    """Return the identity of the process that has this number now, or None if there is none."""
    try:
        return ProcessIdentity(pid, int(_read_stat(pid)[19]))
    except (OSError, IndexError, ValueError):
        return None


def open_process(identity: ProcessIdentity) -> int | None:
    """Return a descriptor by which exactly this process can be signalled, or None if it has ended."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except (OSError, ValueError):
        return None
    if identify_process(identity.pid) == identity:
        return descriptor
    os.close(descriptor)
    return None


def has_ended(identity: ProcessIdentity) -> bool:
    """Return whether the process has ended, even if its parent hasn't asked how yet."""
    try:
        fields = _read_stat(identity.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False  # this process can't look, such as without a free descriptor
    try:
        return fields[0] in "ZX" or int(fields[19]) != identity.start
    except (IndexError, ValueError):
        return False


def _read_stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on: state, parent, ... Raises OSError."""
    # The name, in brackets, may hold anything.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _prctl(option: int, value: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise ClusterError(
            f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}. Jobs need it: allow it where a "
            "sandbox "
            "forbids it"
        )


def die_with_parent(number: int, parent: int) -> None:
    """Let the system send signal `number` to this process when `parent` ends; exit if it already has."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def list_children() -> Iterator[int]:
    """Yield the process ids of this process's children."""
    me = os.getpid()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                if int(_read_stat(entry.name)[1]) == me:
                    yield int(entry.name)


def end_all_children(timeout: float = END_TIMEOUT) -> list[int]:
    """Kill every child, and every orphan that thereby becomes one, until none is left or `timeout` seconds
    have passed. Returns those that are left: they can't be ended while they wait in the kernel."""
    deadline = time.monotonic() + timeout
    while True:
        for child in list_children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        if time.monotonic() > deadline:
            return list(list_children())
        time.sleep(0.01)


def is_stopped(pid: int) -> bool:
    """Return whether the process is suspended, by SIGSTOP or a debugger."""
    try:
        return _read_stat(pid)[0] in "Tt"
    except (OSError, IndexError):
        return False


def raise_priority(pid: int) -> None:
    """Give every thread of the process this process's priority, if the system allows it."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), os.getpriority(os.PRIO_PROCESS, 0))


def read_resident_bytes(pid: int) -> int:
    """Return the bytes of physical memory that the process has; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def read_cpu_seconds(sessions: Iterable[int]) -> dict[int, float]:
    """Return the processor time that all living processes of each session have used, by its leader's id."""
    used = dict.fromkeys(sessions, 0.0)
    for entry in os.scandir("/proc") if used else ():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # Fields after the name, which may hold anything: state, parent, group, session, ...
                after_name = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
                session = int(after_name[3])
                if session in used and after_name[0] not in "ZX":
                    ticks = int(after_name[11]) + int(after_name[12])
                    used[session] += ticks / os.sysconf("SC_CLK_TCK")
    return used


def read_available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that processes may still get: free memory, or less if a cgroup limits this process.

    Files that the system keeps in memory count as free, since it gives them up when needed.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, IndexError, ValueError):
        return 0
    for group in _list_groups(proc, groups):
        with contextlib.suppress(OSError, ValueError):
            limit = int((group / "memory.max").read_text())  # "max": no limit
            used = int((group / "memory.current").read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            free = min(free, limit - used + int(counts.get("inactive_file", 0)))
    return max(0, free)


def _list_groups(proc: Path, groups: Path) -> list[Path]:
    """Return the folders of this process's cgroup and of those above it, the root first."""
    found = [groups]
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                for part in Path(line[4:]).parts:
                    found.append(found[-1] / part)
    return found


def memory_bytes() -> int:
    """Return the bytes of memory of this machine, or of the cgroup of this process if it has fewer."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def runs_raylet() -> bool:
    """Return whether this machine is a node of some Ray cluster."""
    import psutil

    return any(process.info["name"] == "raylet" for process in psutil.process_iter(["name"]))
