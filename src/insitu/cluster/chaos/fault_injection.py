"""Harms a process from outside: ends its connections, makes them black holes, fills its disk.

A socket of another process is reached by pidfd_getfd(2), which needs Linux 5.6 and the right to trace the
process (its own user where the system allows that, or root). A full disk is a limit on the size of files,
so it needs neither a mount nor root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from insitu.errors import ClusterError

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
    """Yield this process's own descriptors of those connections. Raises ClusterError where there is none."""
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
    """Drop all that arrives for the process over its present connections, without telling either side.

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
