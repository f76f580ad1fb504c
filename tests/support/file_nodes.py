"""Nodes of files in this process, each with a home of its own, that can be killed, silent and cut off."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from memory_metadata import LosingMetadata

from insitu.base.errors import InsituError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.client.file_cluster import FileCluster
from insitu.cluster.files import (
    NAME_KINDS,
    FileClient,
    NameService,
    Peer,
    RemoteNames,
    Repairer,
    RepairReport,
    Suspects,
    TaskFileClient,
    View,
    ViewCache,
    WaitingFolder,
    describe_error,
)
from insitu.cluster.files.peers import Unreachable, raise_described
from insitu.grid.shared_files import FileStore, GarbageList, NameTree


class FileNodes:
    """Some nodes, a head with a metadata store, and what they know of each other."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self.nodes = [NodeId(name) for name in names]
        self.alive = set(self.nodes)
        """The nodes of which the head says that they live."""
        self.down: set[NodeId] = set()
        """Those that refuse connections."""
        self.silent: set[NodeId] = set()
        """Those that give no answer, until `end` is set."""
        self.headless: set[NodeId] = set()
        #: Whether they wait for another head.
        self.waits = True
        """Those that have no head."""
        self.busy: dict[NodeId, int] = {}
        """How often nodes say that they have too much to do."""
        self.losing: set[str] = set()
        """Kinds of calls that are done, and whose answers are lost."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called after an answer was lost."""
        self.calls: list[tuple[str, str]] = []
        """(node, action) of all calls."""
        self.end = threading.Event()
        self.stores = {node: FileStore(self.paths(node), node) for node in self.nodes}
        self.peers = _Peers(self)
        self.replace_metadata(LosingMetadata())

    def replace_metadata(self, metadata: LosingMetadata) -> None:
        """Have a head with another metadata store."""
        self.metadata = metadata
        self.tree = NameTree(metadata)
        self.service = NameService(metadata)
        self.client = self.connect()

    def paths(self, node: str) -> Paths:
        return Paths(self.folder / node)

    def connect(self, *own: NodeId) -> FileClient:
        suspects, views = Suspects(), ViewCache(lambda fresh, known: self.view())
        names = RemoteNames(self.peers, views.find, suspects, own)
        return FileClient(names, self.peers, views.find, suspects)

    def connect_task(self, *, in_thread: bool = False) -> TaskFileClient:
        """Connect a task of a job, which keeps what can't be published in a folder of its own."""
        suspects, views = Suspects(), ViewCache(lambda fresh, known: self.view())
        names = RemoteNames(self.peers, views.find, suspects, ())
        folder = WaitingFolder(self.folder / "task", self.folder)
        return TaskFileClient(names, self.peers, views.find, suspects, folder, in_thread=in_thread)

    def open_cluster(self) -> FileCluster:
        return FileCluster(self.client, self.peers, lambda fresh=False: self.view(), self.tree)

    def view(self) -> View:
        return View(
            {node: None for node in self.nodes if node in self.alive},
            {node: None for node in self.nodes if node not in self.alive},
        )

    def repairer(self, read_on: float = 0.0) -> Repairer:
        return Repairer(self.client, self.peers, read_on)

    def repair(self, volume: str, repairer: Repairer | None = None) -> RepairReport:
        doing = repairer or self.repairer()
        return doing.repair(volume, lambda: self.tree.list_files(volume), self.view())

    def collect_garbage(self, repairer: Repairer | None = None) -> None:
        (repairer or self.repairer()).collect_garbage(GarbageList(self.metadata), self.view())

    def held(self, volume: str) -> dict[str, set[str]]:
        """The blocks of each node."""
        return {node: set(store.blocks.list_held(volume)) for node, store in self.stores.items()}

    def close(self) -> None:
        self.end.set()
        for node in self.nodes:
            shutil.rmtree(self.paths(node).file_memory(node), ignore_errors=True)


class _Peers:
    def __init__(self, nodes: FileNodes) -> None:
        self._nodes = nodes

    def find(self, node: NodeId, view: View) -> Peer:
        return _Peer(self._nodes, node)


class _Peer:
    def __init__(self, nodes: FileNodes, node: NodeId) -> None:
        self._nodes, self._node = nodes, node

    def act(
        self, kind: str, fields: dict[str, Any], payload: bytes = b"", seconds: float | None = None
    ) -> tuple[dict[str, Any], bytes]:
        lab = self._nodes
        lab.calls.append((self._node, kind))
        if self._node in lab.silent:
            deadline = time.monotonic() + (5.0 if seconds is None else seconds)
            while self._node in lab.silent and time.monotonic() < deadline and not lab.end.wait(0.005):
                pass
            raise Unreachable(f"{self._node} said nothing")
        if self._node in lab.down:
            raise Unreachable(f"{self._node} gives no answer")
        answer, data = self._answer(kind, fields, payload)
        if kind in lab.losing:
            lab.on_loss()
            raise Unreachable(f"{self._node} gave no answer")
        raise_described(answer)
        return answer, data

    def _answer(self, kind: str, fields: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        lab = self._nodes
        if lab.busy.get(self._node, 0):
            lab.busy[self._node] -= 1
            return {"busy": True}, b""
        if kind not in NAME_KINDS:
            try:
                return lab.stores[self._node].act(kind, fields, payload)
            except (InsituError, OSError) as error:
                return describe_error(error), b""
        if self._node in lab.headless:
            return {"away": "the head was last heard 9 s ago", "waits": lab.waits}, b""
        return lab.service.answer(kind, fields), b""
