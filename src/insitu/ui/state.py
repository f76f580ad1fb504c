"""State of one server of the page, shared by the REST interface and the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio.to_thread
from starlette.requests import Request

from insitu.base.paths import JobPaths, Paths
from insitu.service import CatalogIndex, JobIndex, Versions, build_job_report, count_copies, list_nodes
from insitu.ui.access import Access, Session
from insitu.ui.boards import Boards
from insitu.ui.looks import Looks
from insitu.ui.started_commands import StartedCommands
from insitu.ui.uploads import Uploads

T = TypeVar("T")
_MOST = 512
"""Values that are kept at a time."""
_MOST_CHARACTERS = 64 << 20
"""Characters of texts in them."""
FRESH = 0.5
"""Seconds for which what was read is shown to others, too."""
_NODES_KEPT = 5.0
"""Seconds for which a list of the nodes is shown before they are listed again."""
_COUNTS_KEPT = 60.0
"""Seconds for which the copies on a node are shown before they are counted again, file by file."""
MAX_STREAMS = 256
"""Streams at a time; each is a viewer who follows a page."""


class Snapshots:
    """Reads each subject once for all who look at it at the same time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By subject that is read now: who reads it, and how many do or wait for that.
        self._locks: dict[Any, tuple[asyncio.Lock, int]] = {}
        #: By subject: when it was read, what was found, and its characters.
        self._values: dict[Any, tuple[float, Any, int]] = {}
        #: The characters of all of them.
        self._characters = 0

    async def get(self, subject: Any, read: Callable[[], T], fresh: float = FRESH) -> T:
        """Return what `read` returns, or what it has returned for the subject `fresh` seconds ago or less.

        `read` runs in a thread. Its errors are raised, and not kept.
        """
        known = self._values.get(subject)
        if known is not None and self._clock() - known[0] <= fresh:
            return known[1]
        lock, count = self._locks.get(subject, (asyncio.Lock(), 0))
        self._locks[subject] = lock, count + 1
        try:
            async with lock:
                known = self._values.get(subject)
                if known is not None and self._clock() - known[0] <= fresh:
                    return known[1]
                value, characters = await anyio.to_thread.run_sync(lambda: _measure(read()))
                self._keep(subject, value, characters)
                return value
        finally:
            lock, count = self._locks.pop(subject)
            if count > 1:
                self._locks[subject] = lock, count - 1

    def _keep(self, subject: Any, value: Any, characters: int) -> None:
        """Keep what was read, and drop the oldest of too much."""
        self._drop(subject)
        self._values[subject] = self._clock(), value, characters
        self._characters += characters
        while len(self._values) > 1 and (len(self._values) > _MOST or self._characters > _MOST_CHARACTERS):
            self._drop(next(iter(self._values)))

    def _drop(self, subject: Any) -> None:
        _, _, characters = self._values.pop(subject, (0.0, None, 0))
        self._characters -= characters


def _measure(value: T) -> tuple[T, int]:
    """Return a value, and how many characters its texts have."""
    found, waiting = 0, [value]
    while waiting:
        match waiting.pop():
            case str() | bytes() as text:
                found += len(text)
            case Mapping() as mapping:
                waiting += mapping.values()
            case list() | tuple() as values:
                waiting += values
    return value, found


@dataclass
class UIState:
    """One server."""

    #: Names below $INSITU_HOME.
    paths: Paths
    #: Who may.
    access: Access
    #: The name of the cookie that holds a session.
    cookie: str
    #: Whether cookies are for TLS alone.
    secure: bool
    #: The address under which users reach the page, such as `http://127.0.0.1:8780`.
    url: str
    #: Job folders and data that were sent.
    uploads: Uploads
    #: Imports, and commands of plug-in pages, that were started here.
    commands: StartedCommands
    #: TensorBoards that were started here.
    boards: Boards
    #: Shared reads.
    snapshots: Snapshots = field(default_factory=Snapshots)
    #: What pages of plug-ins have read.
    looks: Looks = field(default_factory=Looks)
    #: Set when the server ends, so that streams end, too.
    ends: Callable[[], bool] = lambda: False
    #: Streams that are open.
    streams: int = 0
    #: All jobs.
    index: JobIndex = field(init=False)
    #: All caches.
    catalog: CatalogIndex = field(init=False)

    #: By node: when its copies were counted, of which versions, and what was found.
    _copies: dict[str, tuple[float, Versions, dict[str, int]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.index = JobIndex(self.paths)
        self.catalog = CatalogIndex(self.paths)

    async def list_jobs(self) -> list[dict[str, Any]]:
        """Return all jobs, the newest first."""
        return await self.snapshots.get("jobs", self.index.list)

    async def list_nodes(self) -> list[dict[str, Any]]:
        """Return all nodes."""
        return await self.snapshots.get(
            "nodes", lambda: list_nodes(self.paths, copies_of=self._count_copies), _NODES_KEPT
        )

    def _count_copies(self, node: str) -> dict[str, int]:
        """Return what a node holds, which is counted again when the catalogue has changed, and now and then:
        files may be lost."""
        versions, now = self.catalog.read(), time.monotonic()
        known = self._copies.get(node)
        if known is None or known[1] is not versions or now - known[0] > _COUNTS_KEPT:
            known = self._copies[node] = now, versions, count_copies(self.paths, versions.stored, node)
        return known[2]

    async def describe_job(self, job: JobPaths, **options: bool) -> dict[str, Any]:
        """Return the report of a job."""
        subject = ("job", str(job.root), *sorted(options.items()))
        return await self.snapshots.get(subject, lambda: build_job_report(job, quick=True, **options))


def get_state(request: Request) -> UIState:
    """Return the state of the server that a request came to."""
    state: UIState = request.app.state.ui
    return state


def get_session(request: Request) -> Session:
    """Return who asks, which the guard has found."""
    session: Session = request.state.session
    return session


def record_for_audit(request: Request, **facts: Any) -> None:
    """Add facts to the line of the audit log that this request makes."""
    request.scope["state"].setdefault("audit", {}).update(facts)
