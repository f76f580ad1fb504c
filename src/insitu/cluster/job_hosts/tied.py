"""Ends this process together with others that it is tied to, such as a scheduler's step or a node of Ray.

The system sends a signal when the parent ends. Others, and a parent whose own parent never asks how it ended,
are looked at every second.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable

from insitu.base.process.processes import ProcessIdentity, die_with_parent, has_ended, identify_process

POLL_SECONDS = 1.0
"""Seconds between two looks at those that this process is tied to."""


def tie_to(processes: Iterable[ProcessIdentity]) -> None:
    """Let SIGTERM come to this process when one of `processes` ends. Exits if one already has."""
    watched = list(processes)
    if not watched:
        return
    # A holder's own mask is handed down, so that the user couldn't end this process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    parent = os.getppid()
    if any(process.pid == parent for process in watched):
        die_with_parent(signal.SIGTERM, parent)
    if any(map(has_ended, watched)):
        raise SystemExit("a process that this one is tied to has ended")
    threading.Thread(target=_watch, args=(watched,), daemon=True).start()


def _watch(processes: list[ProcessIdentity]) -> None:
    while not any(map(has_ended, processes)):
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def identify_parent() -> ProcessIdentity | None:
    """Return the identity of the process that has started this one; None for the first one of a container.

    Exits if it has ended already.
    """
    parent = os.getppid()
    if not parent:
        return None
    found = identify_process(parent)
    if found is None or os.getppid() != parent:
        raise SystemExit("the process that started this one has ended")
    return found
