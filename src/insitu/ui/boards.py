"""TensorBoards that the page has started: they listen on this machine alone, and end with the server."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Mapping, Sequence

from insitu.base.errors import ClusterError, InputError

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
        #: Held for moments, never while one starts: pages ask which of them run.
        self._lock = threading.Lock()
        #: By job id, the oldest first: the process, and its address. Written under the lock.
        self._running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
        #: Those that start now, by job id. Written under the lock.
        self._starting: dict[str, subprocess.Popen[bytes]] = {}
        self._is_closed = False

    def find(self, job_id: str) -> str | None:
        """Return the address of a job's TensorBoard, None if none runs."""
        with self._lock:
            return self._find(job_id)

    def _find(self, job_id: str) -> str | None:
        process, url = self._running.get(job_id, (None, ""))
        if process is None or process.poll() is not None:
            self._running.pop(job_id, None)
            return None
        return url

    def start(self, job_id: str, command: Sequence[str]) -> str:
        """Start one, unless it runs. Returns its address. Raises ClusterError if it doesn't come up, if it is
        already starting, and if too many run."""
        with self._lock:
            known = self._find(job_id)
            if known is not None:
                return known
            process = self._begin(job_id, command)
            old = self._take_oldest()
        try:
            for each in old:
                _end(each)
            url = _read_address(process)
            with self._lock:
                if self._is_closed:
                    raise ClusterError("TensorBoard doesn't start while the page ends")
                self._running[job_id] = process, url
            return url
        except BaseException:
            _end(process)
            raise
        finally:
            with self._lock:
                self._starting.pop(job_id, None)

    def _begin(self, job_id: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        if job_id in self._starting or len(self._starting) >= AT_ONCE or self._is_closed:
            raise ClusterError(
                f"A job's TensorBoard is started once, and {AT_ONCE} start at a time. Received: another "
                f"start of {job_id} meanwhile. Wait until they are up"
            )
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
        )
        self._starting[job_id] = process
        return process

    def _take_oldest(self) -> list[subprocess.Popen[bytes]]:
        """Take out those that end for the ones that start."""
        running = [each for each in list(self._running) if self._find(each) is not None]
        most = max(0, AT_ONCE - len(self._starting))
        return [self._running.pop(each)[0] for each in running[: max(0, len(running) - most)]]

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            self._is_closed = True
            ending = [*self._starting.values(), *(process for process, _ in self._running.values())]
            self._running.clear()
        for process in ending:
            _end(process)


def check_reach(url: str) -> None:
    """Raise InputError if users of the page at `url` can't reach servers on this machine's loopback."""
    from urllib.parse import urlsplit

    from insitu.base.net.unauthenticated import is_loopback

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
