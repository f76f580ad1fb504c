"""Stores of "other hosts", each in a home of its own with a server, all in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partition_servers import SECRET, certificate

from insitu.base.disk.access import make_folder
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.grid import Catalog, CatalogWatch, install_catalog_copy
from insitu.grid.serving import PartitionServer
from insitu.grid.transfer import RemoteStores, ServerAddress


class StoreHosts:
    """The homes of agents, and their servers."""

    def __init__(self, folder: Path, *names: str) -> None:
        #: The home of each node.
        self.paths = {NodeId(name): Paths(folder / f"host-{name}") for name in names}
        self.servers: dict[NodeId, PartitionServer] = {}
        #: How often the head of the cluster was replaced, as each node knows.
        self.numbers = dict.fromkeys(self.paths, 0)
        for node, paths in self.paths.items():
            make_folder(paths.home, paths.node(node))
            paths.agent(node).write_text("{}")
            self.start(node)

    def start(self, name: str) -> None:
        node = NodeId(name)
        self.servers[node] = PartitionServer(
            self.paths[node], node, SECRET, certificate(), find_number=lambda: self.numbers[node]
        )

    def stop(self, name: str) -> ServerAddress:
        """End the server of a node; return where it was."""
        server = self.servers.pop(NodeId(name))
        server.stop()
        return server.address

    def remote(
        self, *, number: int | None = None, here: Sequence[NodeId] = (), **others: ServerAddress
    ) -> RemoteStores:
        """The stores whose servers run; `others` are further addresses."""
        addresses = {node: server.address for node, server in self.servers.items()}
        addresses |= {NodeId(name): address for name, address in others.items()}
        return RemoteStores(addresses, SECRET, silence=2.0, number=number, here=here)

    def copy_catalog(self, head: Paths) -> None:
        """Give each host the catalogue of the head, as its agents get it."""
        watch = CatalogWatch(head)
        watch.poll()
        assert watch.data is not None
        for paths in self.paths.values():
            install_catalog_copy(paths, watch.data)

    def files(self, name: str) -> dict[str, bytes]:
        """The partitions in the store of a node, and everything in its staging, by path."""
        paths = self.paths[NodeId(name)]
        found = [*paths.node(name).rglob("part-*.arrow"), *paths.staging.rglob("*")]
        return {str(file.relative_to(paths.home)): file.read_bytes() for file in found if file.is_file()}

    def close(self) -> None:
        for node in list(self.servers):
            self.stop(node)


def latest(paths: Paths, name: str) -> int:
    found = Catalog(paths).find(name)
    return 0 if found is None else found.version
