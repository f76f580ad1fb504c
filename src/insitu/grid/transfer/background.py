"""What a server does in threads for callers that ask now and then how far it is.

No call waits for it, so a caller notices within the silence limit that the server is dead.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from insitu.base.errors import InsituError

AT_ONCE = 16
"""Tasks that a server does at the same time; further ones are refused."""
_KEPT_SECONDS = 600.0
"""Seconds after its end for which a task can be asked about."""


class Task:
    """Something that is done in a thread of its own."""

    def __init__(self, total: int) -> None:
        #: Bytes to do.
        self.total = total
        #: Bytes done. Written by the thread, under the lock.
        self.done = 0
        #: Bytes that have come from other nodes. Written by the thread, under the lock.
        self.moved = 0
        #: What it has found, as JSON. Written by the thread.
        self.results: list[Any] = []
        #: Why it has failed; empty unless it has. Written by the thread at its end.
        self.problem = ""
        #: When it has ended, on the monotonic clock; None: it hasn't.
        self.ended: float | None = None
        self._lock = threading.Lock()

    def add(self, done: int, moved: int = 0) -> None:
        """Count bytes."""
        with self._lock:
            self.done += done
            self.moved += moved

    def describe(self) -> dict[str, Any]:
        """Return how far it is, as JSON."""
        ended = self.ended is not None
        return {
            "ended": ended,
            "done": self.done,
            "total": self.total,
            "moved": self.moved,
            "problem": self.problem,
            "results": self.results if ended else [],
        }


class Tasks:
    """The tasks of one server, by a name that is drawn for each."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._lock = threading.Lock()

    def start(self, total: int, do: Callable[[Task], None]) -> str | None:
        """Do something in a thread. Return the task's name; None: there are too many."""
        task, name = Task(total), secrets.token_hex(8)
        with self._lock:
            now = time.monotonic()
            kept = {n: t for n, t in self._tasks.items() if t.ended is None or now - t.ended < _KEPT_SECONDS}
            self._tasks = kept
            if sum(t.ended is None for t in kept.values()) >= AT_ONCE:
                return None
            kept[name] = task
        threading.Thread(target=_run, args=(task, do), name="insitu-task", daemon=True).start()
        return name

    def describe(self, name: str) -> dict[str, Any] | None:
        """Return how far a task is; None: there is none of this name."""
        with self._lock:
            task = self._tasks.get(name)
        return None if task is None else task.describe()


def _run(task: Task, do: Callable[[Task], None]) -> None:
    try:
        do(task)
    except InsituError as error:
        task.problem = str(error)
    except OSError as error:
        task.problem = f"a file can't be used ({error.strerror})"
    except BaseException as error:
        task.problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        task.ended = time.monotonic()
