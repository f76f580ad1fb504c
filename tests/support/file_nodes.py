"""Nodes of files in this process, each with a home of its own, that can be killed and cut off."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from insitu.cluster.files import FileClient, FileService, Peer, View
from insitu.cluster.files.peers import Unreachable, raise_described
from insitu.grid.shared_files import FileStore
from insitu.paths import Paths
from insitu.spec import NodeId


class FileNodes:
    """Some nodes, and what they know of each other."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self.nodes = [NodeId(name) for name in names]
        self.alive = set(self.nodes)
        """The nodes of which the head says that they live."""
        self.down: set[NodeId] = set()
        """Those that give no answer."""
        self.cut: set[frozenset[str]] = set()
        """Pairs that can't talk; "" is the client."""
        self.is_led = True
        self.calls: list[tuple[str, str]] = []
        """(node, action) of all calls that were answered."""
        self.services: dict[NodeId, FileService] = {}
        for node in self.nodes:
            self.start(node)
        self.client = self.connect()

    def paths(self, node: str) -> Paths:
        return Paths(self.folder / node)

    def start(self, node: NodeId) -> None:
        """Start a node, with what its store holds."""
        store = FileStore(self.paths(node), node)
        self.services[node] = FileService(store, _Peers(self, node), self.view)
        self.down.discard(node)

    def connect(self) -> FileClient:
        return FileClient(_Peers(self, ""), self.view)

    def view(self) -> View:
        return View({node: None for node in self.nodes if node in self.alive}, len(self.nodes), self.is_led)

    def held(self, volume: str) -> dict[str, set[str]]:
        """The blocks of each node."""
        return {n: set(s.store.blocks.list_held(volume)) for n, s in self.services.items()}

    def close(self) -> None:
        for node in self.nodes:
            self.services[node].store.names.close()
            shutil.rmtree(self.paths(node).file_memory(node), ignore_errors=True)


class _Peers:
    def __init__(self, nodes: FileNodes, own: str) -> None:
        self._nodes = nodes
        self._own = own

    def find(self, node: NodeId, view: View) -> Peer:
        return _Peer(self._nodes, self._own, node)

    def close(self) -> None:
        pass


class _Peer:
    def __init__(self, nodes: FileNodes, own: str, node: NodeId) -> None:
        self._nodes, self._own, self._node = nodes, own, node

    def act(self, kind: str, fields: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        lab = self._nodes
        if self._node in lab.down or frozenset((self._own, self._node)) in lab.cut:
            raise Unreachable(f"{self._node} gives no answer")
        answer, data = lab.services[self._node].answer(kind, fields, payload)
        lab.calls.append((self._node, kind))
        raise_described(answer, str(fields.get("path", "")))
        return answer, data
