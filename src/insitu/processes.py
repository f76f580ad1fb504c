"""Controls processes by what Linux offers: parents, children, priority, memory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from insitu.errors import ClusterError

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


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
                # The name, in brackets, may hold anything; what follows it is: state, parent.
                after_name = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(after_name[1]) == me:
                    yield int(entry.name)


def end_all_children() -> None:
    """Kill every child, and every orphan that thereby becomes one, until none is left."""
    while True:
        for child in list_children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def is_stopped(pid: int) -> bool:
    """Return whether the process is suspended, by SIGSTOP or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def raise_priority(pid: int) -> None:
    """Give every thread of the process this process's priority, where the system allows it."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), os.getpriority(os.PRIO_PROCESS, 0))


def read_resident_bytes(pid: int) -> int:
    """Return the bytes of physical memory that the process has; 0 where it has ended."""
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
                # What follows the name, which may hold anything: state, parent, group, session, ...
                after_name = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
                session = int(after_name[3])
                if session in used:
                    ticks = int(after_name[11]) + int(after_name[12])
                    used[session] += ticks / os.sysconf("SC_CLK_TCK")
    return used


def read_available_bytes() -> int:
    """Return the bytes that processes may still get: free memory, or less where a cgroup limits it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, IndexError, ValueError):
        return 0
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return free
