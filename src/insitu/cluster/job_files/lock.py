"""Locks a job: the lock is held from the moment its folder is made until the last of its processes has ended.

It is an flock(2) on `controller.json`, so the system drops it with its last holder, however that ends. The
file says which host holds it: on some file systems that hosts share, such a lock is one of each host, and a
process number never means anything elsewhere.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from insitu.base.errors import ClusterError, JobRunning
from insitu.base.process.processes import (
    ProcessIdentity,
    identify_process,
    open_process,
    read_boot,
    read_host,
)

_PID_TIMEOUT = 10.0
_SHARED_LOCK_TIMEOUT = 1.0


def take_lock(path: Path) -> int:
    """Make `path` and lock it. Returns the descriptor; a process that inherits it holds the lock too.

    Raises JobRunning if another process holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _SHARED_LOCK_TIMEOUT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_record(descriptor, {"host": read_host(), "boot": read_boot()})
            return descriptor
        except BlockingIOError as error:
            # A process that only tests it (`is_locked`) holds it for a moment.
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise JobRunning(
                    f"{path} is locked by another process: the job runs. Stop it with `insitu stop`, or wait "
                    "for "
                    "its end"
                ) from error
            time.sleep(0.01)


def is_locked(path: Path) -> bool:
    """Return whether some process holds the lock at `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def find_other_host(path: Path) -> str:
    """Return the host that holds the lock at `path`, or last held it, if that isn't this one; else "".

    Whether such a lock is held can't be found out on every file system that hosts share: it counts as held by
    a job until the job's journal has its end.
    """
    record = _read_record(path)
    return "" if _is_own(record) else str(record["host"])


def _is_own(record: dict[str, Any]) -> bool:
    """Return whether a process of this host wrote the record, or nobody is named."""
    if not record.get("host") or record["host"] == read_host():
        return True
    return bool(read_boot()) and record.get("boot") == read_boot()


def write_controller_pid(descriptor: int) -> None:
    """Write this process's identity into the lock's file, for `signal_controller`."""
    me, parent = (identify_process(pid) for pid in (os.getpid(), os.getppid()))
    record = {
        "pid": os.getpid(),
        "started": time.time(),
        "start": 0 if me is None else me.start,
        "supervisor": None if parent is None else [parent.pid, parent.start],
        "host": read_host(),
        "boot": read_boot(),
    }
    _write_record(descriptor, record)


def _write_record(descriptor: int, record: dict[str, Any]) -> None:
    data = json.dumps(record).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def _read_record(path: Path) -> dict[str, Any]:
    """Return the content of the lock's file; nothing if it can't be read."""
    try:
        record = json.loads(path.read_text())
    except (ValueError, OSError):
        return {}
    return record if isinstance(record, dict) else {}


def read_controller(path: Path) -> ProcessIdentity | None:
    """Return the controller's process; None if none runs on this host or has written its identity yet."""
    record = _read_record(path)
    try:
        found = ProcessIdentity(int(record["pid"]), int(record["start"]))
    except (ValueError, KeyError, TypeError):
        return None
    return found if _is_own(record) and is_locked(path) else None


def read_supervisor(path: Path) -> ProcessIdentity | None:
    """Return the parent of the controller that last began; None if none runs on this host."""
    record = _read_record(path)
    try:
        pid, start = record["supervisor"]
        found = ProcessIdentity(int(pid), int(start))
    except (ValueError, KeyError, TypeError):
        return None
    return found if _is_own(record) and is_locked(path) else None


def signal_controller(path: Path, number: int) -> bool:
    """Send a signal to the controller. Returns False if no controller is left.

    The process is opened before the lock is looked at, so a number that was given to another process
    meanwhile is never signalled. Raises ClusterError if the controller is on another host, or hasn't written
    its identity.
    """
    import signal

    if host := find_other_host(path):
        raise ClusterError(f"The job's controller runs on {host}: signal it there", logs=str(path))
    deadline = time.monotonic() + _PID_TIMEOUT
    while time.monotonic() < deadline:
        identity = read_controller(path)
        descriptor = open_process(identity) if identity is not None else None
        if descriptor is None:
            # It has the lock but hasn't begun, or it has just ended.
            if not is_locked(path):
                return False
            time.sleep(0.02)
            continue
        try:
            if not is_locked(path):
                return False
            signal.pidfd_send_signal(descriptor, number)
            return True
        except ProcessLookupError:
            time.sleep(0.02)
        finally:
            os.close(descriptor)
    raise ClusterError(
        "The job's controller holds its lock but can't be reached: another one may be about to begin. Try "
        "again, or end its processes",
        logs=str(path),
    )
