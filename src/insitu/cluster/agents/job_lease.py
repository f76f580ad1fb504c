"""Ends a job in time before its copy may go on elsewhere without a person.

A supervisor that is cut off from hosts can't know whether another head has taken over there. So it goes on
only while one of these holds: it reaches all hosts that keep a copy, or most agents of the cluster have
spoken to the head of this machine within half of the time after which another node may take over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from insitu.cluster.agents.majority import ask_for_majority
from insitu.cluster.agents.records import read_head
from insitu.cluster.job_files import read_spec
from insitu.errors import ClusterError, InsituError
from insitu.paths import JobPaths, Paths
from insitu.spec import NodeId

_PAUSE_SECONDS = 2.0
"""Seconds between two questions to the head, while a host with a copy is away."""


class JobLease:
    """How long the supervisor of one job may go on."""

    def __init__(
        self, paths: Paths, job: JobPaths, ask: Callable[[Paths], float | None] | None = None
    ) -> None:
        """`ask`: see `ask_for_majority`."""
        self._paths = paths
        self._job = job.root.name
        self._goes_on = read_spec(job).on_take_over == "resume"
        self._ask = ask or ask_for_majority
        #: The shortest time of `--take-over-after` since then: agents may not have heard of a longer one.
        self._after: float | None = None
        #: When it was certain last that no other node may have taken over, on the monotonic clock.
        self._certain_at = time.monotonic()
        self._asking: threading.Thread | None = None

    def check(self, strays: Collection[NodeId]) -> None:
        """Raise ClusterError where the job must end. `strays`: hosts with a copy that can't be reached."""
        if not self._goes_on:
            return
        now = time.monotonic()
        if not strays:
            self._certain_at, self._after = now, None
            return
        record = read_head(self._paths)
        if record is not None and record.take_over_after is not None:
            self._after = min(self._after or record.take_over_after, record.take_over_after)
        if self._after is None:
            return
        after = self._after
        if now - self._certain_at > after / 2:
            raise ClusterError(
                f"A job whose copy may go on elsewhere ends where most agents don't reach the head of its "
                f"machine. Received: {', '.join(sorted(strays))} away, and too few agents for {after / 2:g} "
                f"s. If no other node has taken over, `insitu resume {self._job}` goes on here"
            )
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._look, daemon=True)
            self._asking.start()

    def _look(self) -> None:
        try:
            found = self._ask(self._paths)
        except (InsituError, OSError):
            found = None
        if found is not None:
            self._certain_at = max(self._certain_at, found)
        time.sleep(_PAUSE_SECONDS)
