"""Locks a job: the lock is held from the moment its folder is made until the last of its processes has ended.

It is an flock(2) on `controller.json`, so the system drops it with its last holder, however that ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from insitu.errors import ClusterError

_PID_TIMEOUT = 10.0
_SHARED_LOCK_TIMEOUT = 1.0


def take_lock(path: Path) -> int:
    """Make `path` and lock it. Returns the descriptor; a process that inherits it holds the lock too."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _SHARED_LOCK_TIMEOUT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            # A process that only tests it (`is_locked`) holds it for a moment.
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ClusterError(
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


def write_controller_pid(descriptor: int) -> None:
    """Write this process's id into the lock's file, for `signal_controller`."""
    record = json.dumps({"pid": os.getpid(), "started": time.time()}).encode()
    os.pwrite(descriptor, record, 0)
    os.ftruncate(descriptor, len(record))


def read_controller_pid(path: Path) -> int | None:
    """Return the controller's process id, or None where none runs or has written it yet."""
    try:
        return int(json.loads(path.read_text())["pid"]) if is_locked(path) else None
    except (ValueError, KeyError, OSError):
        return None


def signal_controller(path: Path, number: int) -> bool:
    """Send a signal to the controller. Returns False where no controller is left.

    The process is opened before the lock is looked at, so a number that was given to another process
    meanwhile is never signalled. Raises ClusterError where the controller hasn't written its process id.
    """
    import signal

    deadline = time.monotonic() + _PID_TIMEOUT
    while time.monotonic() < deadline:
        try:
            descriptor = os.pidfd_open(int(json.loads(path.read_text())["pid"]))
        except (ValueError, KeyError, OSError):
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
        "The job's controller holds its lock but can't be reached: it may be suspended, or run on another "
        "machine. "
        "Try again, or end its processes",
        logs=str(path),
    )
