"""Finds the nodes that hold files: by the head, by what an agent has kept, or as stores of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from insitu.cluster.agents import (
    CLUSTER_ENV,
    TOKEN_FILE_ENV,
    ask_for_nodes,
    make_file_view,
    read_head,
    read_kept_members,
    read_nodes,
    read_token,
    read_token_file,
)
from insitu.cluster.files import FileClient, FileService, LocalPeers, RemotePeers, View
from insitu.errors import ClusterError
from insitu.grid import list_local_nodes, list_nodes_with_stores
from insitu.grid.shared_files import FileStore, list_file_nodes
from insitu.paths import Paths
from insitu.spec import NodeId

_clients: dict[tuple[object, ...], FileClient] = {}
"""The clients of this process, by cluster: each keeps connections."""


def open_file_client(paths: Paths, cluster: str = "", token_file: str = "") -> FileClient:
    """Return the files of a cluster: that of the head at `cluster`, or at $INSITU_CLUSTER, else that of this
    home. A home that belongs to none has the stores of this machine.

    Raises InputError where the token can't be read.
    """
    address = cluster or os.environ.get(CLUSTER_ENV, "")
    if address:
        file = token_file or os.environ.get(TOKEN_FILE_ENV, "")
        token = read_token_file(Path(file)) if file else read_token(paths)

        def read_view() -> View:
            members = ask_for_nodes(address, token)
            return make_file_view({member.facts.node: member for member in members}, is_led=True)

        return _keep((address, token), lambda: FileClient(RemotePeers(token.encode()), read_view))
    if read_head(paths) is not None or any(paths.agent(n).exists() for n in list_nodes_with_stores(paths)):
        token = read_token(paths)
        return _keep(
            (paths, token), lambda: FileClient(RemotePeers(token.encode()), lambda: _read_view(paths))
        )
    return _keep((paths,), lambda: _open_local(paths))


def _keep(key: tuple[object, ...], make: Callable[[], FileClient]) -> FileClient:
    """Return the client of a cluster, which is made on first use."""
    if key not in _clients:
        _clients[key] = make()
    return _clients[key]


def _read_view(paths: Paths) -> View:
    """Ask the head of this home's cluster, or use what it has said last. Raises ClusterError."""
    try:
        members, _ = read_nodes(paths)
        return make_file_view({member.facts.node: member for member in members}, is_led=True)
    except ClusterError:
        kept = read_kept_members(paths)
        if not kept:
            raise
        return make_file_view({node: replace(m, state="alive") for node, m in kept.items()}, is_led=False)


def _open_local(paths: Paths) -> FileClient:
    def read_view() -> View:
        nodes = list(dict.fromkeys((*list_local_nodes(paths), *list_file_nodes(paths))))
        return View(dict.fromkeys(nodes), len(nodes), True)

    def make(node: NodeId) -> FileService:
        return FileService(FileStore(paths, node), peers, read_view, drop_seconds=0)

    peers = LocalPeers(make)
    return FileClient(peers, read_view)
