"""Threads that read. Nothing waits for their end: a disk that hangs keeps no process from exiting."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Calls = queue.SimpleQueue[tuple[Future[None], Callable[..., None], tuple[Any, ...]] | None]


class ReadingThreads:
    """Daemon threads that run calls in the order in which they were submitted.

    They begin with the first call, in a forked process again, and end when this object is gone.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        #: The process whose threads take from `_calls`; 0: none has begun.
        self._process = 0
        #: Calls that no thread has taken yet. Replaced in a forked process.
        self._calls: _Calls = queue.SimpleQueue()
        self._beginning = threading.Lock()

    def submit(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        """Run `call(*arguments)` in a thread. What it raises is raised by `result` of the future."""
        if self._process != os.getpid():
            self._begin()
        future: Future[None] = Future()
        self._calls.put((future, call, arguments))
        return future

    def _begin(self) -> None:
        with self._beginning:
            if self._process == os.getpid():
                return
            self._calls = queue.SimpleQueue()
            for number in range(self._count):
                thread = threading.Thread(
                    target=_run, args=(self._calls,), name=f"insitu-read-ahead-{number}", daemon=True
                )
                thread.start()
            ending: Any = weakref.finalize(self, _end, self._calls, self._count)
            ending.atexit = False
            self._process = os.getpid()


def _end(calls: _Calls, count: int) -> None:
    for _ in range(count):
        calls.put(None)


def _run(calls: _Calls) -> None:
    while (taken := calls.get()) is not None:
        future, call, arguments = taken
        if future.set_running_or_notify_cancel():
            try:
                call(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        # Not kept until the next call: they hold the memory of a window.
        del taken, future, call, arguments
