"""Looks at other systems, which may be silent: a page waits a moment, and then shows what is known."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from insitu.base.errors import InsituError

WAIT_SECONDS = 1.5
"""Seconds for which a page waits for a look."""
FRESH = 2.0
"""Seconds for which what was found is shown before somebody looks again."""
_AT_ONCE = 8
"""Looks at a time: each may hang in a thread of its own."""
_MOST = 256
"""Subjects that are remembered."""


@dataclass
class Look:
    """What is known of a subject."""

    #: What was found last; None: nothing yet.
    found: Any = None
    #: When it was found, in seconds since 1970; 0: never.
    at: float = 0.0
    #: Why the last look has found nothing; empty if it has.
    problem: str = ""
    #: When that ended, by the monotonic clock.
    ended: float = -FRESH
    #: Set when the look that runs ends; None: none runs.
    running: Future[None] | None = None


class Looks:
    """What was found of each subject."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looks: dict[Hashable, Look] = {}

    async def get(self, subject: Hashable, read: Callable[[], Any], silence: str) -> Look:
        """Return what `read` has found of a subject, which runs in a thread. `silence` is said if it doesn't
        return in time. Its errors are kept."""
        look, running = self._begin(subject, read)
        if running is not None:
            done, _ = await asyncio.wait([asyncio.wrap_future(running)], timeout=WAIT_SECONDS)
            if not done and not look.problem:
                return Look(look.found, look.at, silence)
        elif not look.at and not look.problem:  # too many hang already
            return Look(problem=silence)
        return look

    def _begin(self, subject: Hashable, read: Callable[[], Any]) -> tuple[Look, Future[None] | None]:
        with self._lock:
            look = self._looks.setdefault(subject, Look())
            hanging = sum(each.running is not None for each in self._looks.values())
            is_due = time.monotonic() - look.ended >= FRESH and hanging < _AT_ONCE
            if look.running is None and is_due:
                look.running = Future()
                threading.Thread(target=self._look, args=(look, look.running, read), daemon=True).start()
            idle = [key for key, each in self._looks.items() if each is not look and each.running is None]
            for key in idle[: max(0, len(self._looks) - _MOST)]:
                del self._looks[key]
            return look, look.running

    def _look(self, look: Look, running: Future[None], read: Callable[[], Any]) -> None:
        found, problem = None, ""
        try:
            found = read()
        except InsituError as error:
            problem = error.message
        except Exception as error:  # a plug-in's own code runs
            problem = f"{type(error).__name__}: {error}"
        with self._lock:
            if not problem:
                look.found, look.at = found, time.time()
            look.problem, look.ended, look.running = problem, time.monotonic(), None
        running.set_result(None)
