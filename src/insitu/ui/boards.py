"""TensorBoards that the page has started: they listen on this machine alone, and end with the server."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Mapping, Sequence

from insitu.errors import ClusterError, InputError

AT_ONCE = 4
"""TensorBoards that run at a time; the oldest one ends for a further one."""
START_SECONDS = 60.0
"""Seconds that one may take to start."""
_READY = re.compile(rb"https?://127\.0\.0\.1:(\d+)/")
_MOST_SAID = 1 << 16


class Boards:
    """The TensorBoards of this server, by job. Safe for use by several threads."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._lock = threading.Lock()
        #: By job id, the oldest first: the process, and its address.
        self._running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}

    def find(self, job_id: str) -> str | None:
        """Return the address of a job's TensorBoard, None where none runs."""
        with self._lock:
            return self._find(job_id)

    def _find(self, job_id: str) -> str | None:
        process, url = self._running.get(job_id, (None, ""))
        if process is None or process.poll() is not None:
            self._running.pop(job_id, None)
            return None
        return url

    def start(self, job_id: str, command: Sequence[str]) -> str:
        """Start one, unless it runs. Returns its address. Raises ClusterError where it doesn't come up."""
        with self._lock:
            known = self._find(job_id)
            if known is not None:
                return known
            for old in [each for each in self._running if self._find(each) is not None][
                : 1 - AT_ONCE or None
            ]:
                _end(self._running.pop(old)[0])
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
            url = _read_address(process)
            self._running[job_id] = process, url
            return url

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            for process, _ in self._running.values():
                _end(process)
            self._running.clear()


def check_reach(url: str) -> None:
    """Raise InputError where who opens the page at `url` can't reach what listens on this machine alone."""
    from urllib.parse import urlsplit

    from insitu.unauthenticated import is_loopback

    host = urlsplit(url).hostname or ""
    if not is_loopback(host):
        raise InputError(
            f"TensorBoard asks nobody who they are, so the page starts it for this machine alone. Received: "
            f"a page that is reached as {host}. Run `insitu tensorboard JOB` on the machine of the page, and "
            f"reach its port through SSH: ssh -L 6006:127.0.0.1:6006 {host}"
        )


def _read_address(process: subprocess.Popen[bytes]) -> str:
    """Return the address that a TensorBoard prints; what it says later is read and dropped."""
    found = threading.Event()
    said = bytearray()

    def read() -> None:
        stream = process.stdout
        if stream is None:
            return
        with stream:
            for line in stream:
                if not found.is_set():
                    said.extend(line[:_MOST_SAID])
                    if _READY.search(said) or len(said) > _MOST_SAID:
                        found.set()
        found.set()

    threading.Thread(target=read, daemon=True).start()
    found.wait(START_SECONDS)
    match = _READY.search(bytes(said))
    if match is None:
        _end(process)
        text = bytes(said).decode(errors="replace").strip().splitlines()
        raise ClusterError(f"TensorBoard didn't start: {text[-1] if text else 'it said nothing'}")
    return f"http://127.0.0.1:{match[1].decode()}/"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
