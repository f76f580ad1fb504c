"""Sends the copy of a job to some of its hosts, while it runs; see `store.py`.

The supervisor does it beside its work: it sends as much as a host takes, and never waits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.base.spec import NodeId
from insitu.cluster.decide import choose_copy_holders
from insitu.cluster.engines import Message
from insitu.cluster.job_backup.folder_copies import Mark, list_changes, read_parts, scan_folder
from insitu.cluster.job_backup.job_code_copy import read_job_files
from insitu.cluster.job_files import Journal
from insitu.cluster.leases import encode_term, read_term

LOOK_SECONDS = 1.0
"""Seconds between two looks for what a copy lacks."""
_MAX_UNSENT_BYTES = 1 << 21
_RETRY_SECONDS = 5.0
_ROWS = 16
"""Entries of the journal in one look at it."""


class CopyLink(Protocol):
    """The connection to a host that may keep a copy."""

    node: NodeId
    shares_folder: bool
    #: True if it is this machine, with which a copy there would be lost.
    is_near: bool
    #: Why the host can't keep one, as it has said; "" if it can.
    copy_failed: str

    @property
    def is_lost(self) -> bool: ...

    @property
    def unsent_bytes(self) -> int:
        """Return how much of what was sent waits for the host to take it."""

    def tell(self, message: Message) -> None:
        """Send a message that isn't answered."""


class _Holder:
    """One host's part of the copy."""

    def __init__(self, job: JobPaths, link: CopyLink) -> None:
        self.link = link
        self._job = job
        self._known: dict[str, Mark] = {}
        self._sequence = 0
        #: The shard maps that were sent, by their names.
        self._shard_maps: set[str] = set()
        self._is_whole = False
        self._look_at = 0.0
        self._sending: Iterator[Message] = self._list_beginning()

    def advance(self, now: float) -> None:
        """Send what there is, if the host takes it. Raises ClusterError, OSError."""
        while not self.link.is_lost and self.link.unsent_bytes < _MAX_UNSENT_BYTES:
            message = next(self._sending, None)
            if message is not None:
                self.link.tell({"do": "copy", **message})
            elif now < self._look_at:
                return
            else:
                self._look_at = now + LOOK_SECONDS
                self._sending = self._list_changes()

    def _list_beginning(self) -> Iterator[Message]:
        yield {
            "of": "begin",
            "spec": self._job.spec.read_text(),
            "placement": self._job.placement.read_text(),
            "environment": self._job.environment.read_text(),
            "term": encode_term(read_term(self._job.term)),
        }
        for message in read_job_files(self._job):
            if message["do"] == "code":
                yield {"of": "code", "part": message["part"]}
            elif message["do"] == "signing_secret":
                yield {"of": "signing_secret", "data": message["data"]}

    def _list_changes(self) -> Iterator[Message]:
        """Yield what the copy lacks."""
        for file in sorted(self._job.shard_maps.glob("*.json")):
            if file.name not in self._shard_maps:
                self._shard_maps.add(file.name)
                text = file.read_text()
                yield {"of": "shards", "cache": json.loads(text)["cache"], "text": text}
        found = scan_folder(self._job.root, self._known)
        changed, removed = list_changes(found, self._known)
        self._known = found
        if removed:
            yield {"of": "removed", "paths": removed}
        for path, start in changed:
            for part in read_parts(self._job.root, path, start):
                yield {"of": "file", **part}
        journal = Journal(self._job.journal)
        while rows := journal.rows_after(self._sequence, _ROWS):
            for row in rows:
                self._sequence = int(row[0])
                yield {"of": "journal", "rows": [row]}
        if not self._is_whole:
            self._is_whole = True
            yield {"of": "whole"}


class JobCopying:
    """Keeps the copies of one job."""

    def __init__(self, job: JobPaths) -> None:
        self._job = job
        self._holders: dict[NodeId, _Holder] = {}
        #: When copies are tried again after a failure here, on the monotonic clock.
        self._retry_at = 0.0

    def advance(self, links: Iterable[CopyLink]) -> None:
        """Continue the copies on hosts with a connection. Unreadable files are tried again later."""
        now = time.monotonic()
        if now < self._retry_at:
            return
        live = {k.node: k for k in links if not (k.is_lost or k.shares_folder or k.copy_failed)}
        self._drop_lost(live)
        for node in choose_copy_holders(sorted(live, key=lambda n: live[n].is_near), self._holders):
            if node not in self._holders:
                self._holders[node] = _Holder(self._job, live[node])
        for node, holder in list(self._holders.items()):
            try:
                holder.advance(now)
            except (ClusterError, OSError, ValueError):
                self._retry_at = now + _RETRY_SECONDS
                self._holders[node] = _Holder(self._job, holder.link)  # it is begun again

    def _drop_lost(self, live: Mapping[NodeId, CopyLink]) -> None:
        for node in [n for n, holder in self._holders.items() if live.get(n) is not holder.link]:
            del self._holders[node]
