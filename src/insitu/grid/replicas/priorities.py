"""Which of a machine's programs gets a processor first.

A thread's niceness counts among the threads of one *group* alone: if no service manager divides the
processors, Linux makes a group of each session (`sched(7)`, "the autogroup feature"). So a process that gives
way to other sessions lowers its group, too. That has a niceness of its own, which its user may set back to 0.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator

LOWEST = 19
"""The niceness of what only gets a processor that nothing else wants."""
_BACKGROUND_GROUP = 10
"""The niceness of a group in which something is done in the background, beside what others wait for: a tenth
of the share of one that isn't lowered, so that it keeps answering."""
_TRIES = 5
_PAUSE_SECONDS = 0.11
"""The system lets users set a group's niceness ten times a second, all together."""


def _set_group_niceness(niceness: int) -> None:
    """Set that of this process's session, if the system makes groups of sessions and nobody else has begun
    this one."""
    if os.getsid(0) != os.getpid():
        return
    for _ in range(_TRIES):
        try:
            with open("/proc/self/autogroup", "w") as file:
                file.write(str(niceness))
            return
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return
            time.sleep(_PAUSE_SECONDS)


def lower_thread() -> None:
    """Have this thread, until its end, give way to all others: raising it again takes a privilege."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)


class _Background:
    """How many threads of this process do something in the background."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self, number: int) -> None:
        with self._lock:
            before, self._count = self._count, self._count + number
            if not before or not self._count:
                _set_group_niceness(_BACKGROUND_GROUP if self._count else 0)


_BACKGROUND = _Background()


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Lower this thread until its end, and the process's own session while open: other programs of the
    machine come first."""
    lower_thread()
    _BACKGROUND.add(1)
    try:
        yield
    finally:
        _BACKGROUND.add(-1)
