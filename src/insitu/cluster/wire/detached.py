"""Starts a process that outlives this one, and waits until it says that it is ready."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from insitu.base.disk.access import make_folder
from insitu.base.errors import ClusterError
from insitu.base.paths import Paths

_MAX_ANSWER_BYTES = 1 << 20
_started: list[subprocess.Popen[bytes]] = []
"""Processes that this one has started and not reaped yet."""


def start_detached(
    paths: Paths, module: str, arguments: list[str], log: Path, seconds: float, given: str = ""
) -> dict[str, Any]:
    """Start `python -m MODULE ARGUMENTS... READY` in a session of its own, with `given` as its input.

    Returns what the process says at the descriptor READY. Raises ClusterError, with what it says, where it
    can't begin, or says nothing for `seconds`; it doesn't run any more then.
    """
    make_folder(paths.home, log.parent)
    environment = dict(os.environ)
    if "PYTHONPATH" in environment:
        parts = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts if part)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        with open_log(log) as output, open_input(given) as source:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments, str(writer)],
                stdin=source,
                stdout=output,
                stderr=output,
                cwd=paths.home,
                env=environment,
                pass_fds=(writer,),
                start_new_session=True,
            )
    except OSError as error:
        os.close(reader)
        raise ClusterError(f"A process can't be started: {error}. Check memory and ulimit -u") from error
    finally:
        os.close(writer)
    try:
        answer = _read_answer(reader, seconds)
    except OSError:
        answer = {}
    finally:
        os.close(reader)
    if not answer or "error" in answer:
        process.kill()
        process.wait()
        why = answer.get("error") or f"it said nothing within {seconds:g} s, or ended"
        raise ClusterError(str(why), logs=None if "error" in answer else str(log))
    _started[:] = [each for each in (*_started, process) if each.poll() is None]
    return answer


def open_log(log: Path) -> IO[bytes]:
    """Open a log of this user's for appending. Raises ClusterError if it can't be."""
    try:
        return open(log, "ab", opener=_open_private)
    except OSError as error:
        raise ClusterError(
            f"A log is a file of the user who runs insitu. Received: {log} ({error.strerror}). Remove it"
        ) from error


@contextlib.contextmanager
def open_input(given: str) -> Iterator[int]:
    """Yield a descriptor from which a process reads `given`: memory, never on a disk. A pipe whose reader
    ends early would end this process, too, where it has the action for SIGPIPE of a command."""
    file = os.memfd_create("insitu-input", os.MFD_CLOEXEC)
    try:
        os.write(file, given.encode())
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def _open_private(name: str, flags: int) -> int:
    """Open a log. In a shared home others may have put a link there, or a file of their own, to be written
    to."""
    file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(file)
        raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}", name)
    return file


def _read_answer(reader: int, seconds: float) -> dict[str, Any]:
    """Return the line that comes within `seconds`; {} where none does."""
    deadline, data = time.monotonic() + seconds, b""
    while not data.endswith(b"\n") and len(data) < _MAX_ANSWER_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return {}
        part = os.read(reader, 65536)
        if not part:
            return {}
        data += part
    found = json.loads(data)
    return found if isinstance(found, dict) else {}


def report_ready(descriptor: int, message: dict[str, Any]) -> None:
    """Tell the process that has started this one that it is ready, or by `error` why it isn't."""
    with open(descriptor, "wb") as pipe:
        pipe.write(json.dumps(message).encode() + b"\n")
