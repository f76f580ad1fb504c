"""The part of an agent in the file system: who the other nodes are, and what is done now and then."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from insitu.access import owner_file_mode
from insitu.cluster.decide import Member
from insitu.cluster.files import FileService, OrphanWatch, RemotePeers, View, repair_volume
from insitu.durable import replace_file, seal
from insitu.errors import InsituError
from insitu.grid.shared_files import KEEP_DELETED_SECONDS, FileStore, remove_file_memory
from insitu.grid.transfer import RateLimit, ServerAddress
from insitu.paths import Paths
from insitu.spec import NodeId

logger = logging.getLogger("insitu")
COMPARE_SECONDS = 5.0
"""Seconds between two comparisons of names with other nodes."""
SETTLED_SECONDS = 10.0
"""Seconds for which the nodes must be the same before copies are made: one that starts again has its own."""
REPAIR_SECONDS = 300.0
"""Seconds between two repairs while the nodes stay the same."""
REPAIR_RATE = 64 << 20
"""Bytes a second that a repair reads."""
_TICK_SECONDS = 1.0


def make_file_view(members: Mapping[NodeId, Member], *, is_led: bool) -> View:
    """Return the nodes that hold files."""
    alive = {
        node: ServerAddress(m.facts.address, m.facts.port, m.facts.certificate)
        for node, m in members.items()
        if m.state in ("alive", "silent")
    }
    known = sum(member.state != "left" for member in members.values())
    return View(alive, known, is_led)


class AgentFiles:
    """The files in the store of one agent. `is_led` returns whether the agent is connected to a head."""

    def __init__(self, paths: Paths, node: NodeId, token: str, is_led: Callable[[], bool]) -> None:
        self._paths = paths
        self._node = node
        self._is_led = is_led
        self._peers = RemotePeers(token.encode())
        #: The agents, as the head has said last. Written by the agent's own thread.
        self._members: Mapping[NodeId, Member] = {}
        self._service = FileService(FileStore(paths, node), self._peers, self.read_view)
        self._stopping = threading.Event()
        #: The nodes that live, and since when, on the monotonic clock.
        self._settled: tuple[frozenset[NodeId], float] = (frozenset(), 0.0)
        #: The nodes and the time of the last repair.
        self._repaired: tuple[frozenset[NodeId], float] = (frozenset(), 0.0)
        #: What may be left of writers that were killed.
        self._orphans = OrphanWatch()
        self._saved: Mapping[NodeId, Member] = {}
        self._thread = threading.Thread(target=self._keep_up, name="insitu-files", daemon=True)
        self._thread.start()

    def answer(self, kind: str, fields: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Do what another process asks for. See `FileService`."""
        return self._service.answer(kind, fields, payload)

    def read_view(self) -> View:
        """Return the nodes that hold files, as the head has said last."""
        return make_file_view(self._members, is_led=self._is_led())

    def note_members(self, members: Mapping[NodeId, Member]) -> None:
        """Take the agents that the head knows."""
        self._members = members

    def close(self, *, delete: bool) -> None:
        """Move what is in memory to the disk, or delete it."""
        self._stopping.set()
        self._thread.join(COMPARE_SECONDS)
        if delete:
            remove_file_memory(self._paths.file_memory(self._node))
        elif left := self._service.store.blocks.spill_all():
            logger.warning("%d block(s) of files stay in memory: the disk has no room for them", left)

    def _keep_up(self) -> None:
        compare_at = 0.0
        while not self._stopping.wait(_TICK_SECONDS):
            try:
                now = time.monotonic()
                self._save_members()
                self._service.drop_replaced(now)
                if now >= compare_at:
                    compare_at = now + COMPARE_SECONDS
                    self._service.compare_names()
                    self._repair(now)
            except (InsituError, OSError) as error:
                logger.warning("files aren't kept up: %s", error)

    def _save_members(self) -> None:
        """Keep where the others are for processes of this home that begin while no head answers."""
        members = self._members
        if members == self._saved or self._paths.head.exists():
            return
        data = seal([asdict(member) for _, member in sorted(members.items())])
        replace_file(self._paths.members, data, mode=owner_file_mode(self._paths.home))
        self._saved = members

    def _repair(self, now: float) -> None:
        """Make copies that are missing of the volumes that this node leads, once the nodes stay the same."""
        view = self.read_view()
        nodes = frozenset(view.alive)
        if nodes != self._settled[0]:
            self._settled = nodes, now
        was, at = self._repaired
        due = nodes != was or now - at > REPAIR_SECONDS
        if not due or now - self._settled[1] < SETTLED_SECONDS or not view.is_led:
            return
        for volume in self._service.list_led():
            files = self._service.store.names.list_files(volume)
            limit = RateLimit(REPAIR_RATE)
            report = repair_volume(volume, files, self._peers, view, limit, self._orphans.find_old)
            if report.copied or report.removed:
                logger.info("%s: %d block(s) copied, %d removed", volume, report.copied, report.removed)
            for path in report.lost:
                logger.warning("%s/%s: no node has all of it", volume, path)
        self._service.store.blocks.sweep(time.time())
        self._service.store.names.forget_deleted(time.time() - KEEP_DELETED_SECONDS)
        self._repaired = nodes, now
