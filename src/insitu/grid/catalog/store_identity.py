"""The identity of a store: a file on its disk, since a node's name or address may change.

It is made once. A disk that comes back on another node is recognized by it, and so is a copy of a disk.
"""

from __future__ import annotations

import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping

from insitu.base.disk.access import file_mode, make_folder
from insitu.base.disk.durable import sync_folder
from insitu.base.disk.guarded_paths import list_folders
from insitu.base.errors import GridError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId, is_simple_name
from insitu.grid.catalog.catalog import Catalog
from insitu.grid.catalog.files import publish_first

_STORE_ID = re.compile(r"[0-9a-f]{32}")


def is_store_id(text: str) -> bool:
    """Return whether `text` has the form of a store's id: 32 hex digits."""
    return bool(_STORE_ID.fullmatch(text))


def read_store_id(paths: Paths, node: NodeId) -> str | None:
    """Return the id of a node's store; None if it has none yet. Raises GridError if it is damaged."""
    path = paths.store_id(node)
    try:
        text = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    if not is_store_id(text):
        raise GridError(
            f"{path} must hold the id of the store, 32 hex digits. Received: {text[:40]!r}. `insitu repair` "
            f"writes it again"
        )
    return text


def make_store_id(paths: Paths, node: NodeId, store: str | None = None) -> str:
    """Return the id of a node's store, made on the first call; `store` is what it becomes then.

    If several processes make it at the same time, one succeeds. It survives a power cut. Raises GridError.
    """
    found = read_store_id(paths, node)
    if found is None:
        path = paths.store_id(node)
        make_folder(paths.home, path.parent)
        publish_first(path, f"{store or secrets.token_hex(16)}\n".encode(), file_mode(paths.home))
        sync_folder(path.parent)
        found = read_store_id(paths, node)
    if found is None:
        raise GridError(f"{paths.store_id(node)} was removed while it was made. Try again")
    return found


def list_nodes_with_stores(paths: Paths) -> list[NodeId]:
    """Return the nodes that have a folder on this machine, by name.

    A link to a folder counts if this user, root or the home's owner has made it.
    """
    names = [folder.name for folder in list_folders(paths.home, paths.nodes)]
    return [NodeId(name) for name in sorted(names) if is_simple_name(name)]


def is_home_of_agent(paths: Paths) -> bool:
    """Return whether the stores of this home belong to agents whose head has another home."""
    if paths.head.exists():
        return False
    return any(paths.agent(node).exists() for node in list_nodes_with_stores(paths))


def read_stores(paths: Paths) -> dict[NodeId, str]:
    """Return the id of each store on this machine. Raises GridError if two have the same."""
    stores = {node: read_store_id(paths, node) for node in list_nodes_with_stores(paths)}
    found = {node: store for node, store in stores.items() if store is not None}
    check_distinct(paths, found)
    return found


def check_distinct(paths: Paths, stores: Mapping[NodeId, str]) -> None:
    """Raise GridError if two nodes have a store with the same id: one disk is a copy of the other."""
    nodes = defaultdict(list)
    for node, store in stores.items():
        nodes[store].append(node)
    for store, same in nodes.items():
        if len(same) > 1:
            raise GridError(
                f"Each store has an id of its own. Received: {store} on {' and '.join(sorted(same))}, so one "
                f"is a copy of the other. Remove the copy, or its file {paths.store_id(max(same)).name} if "
                f"it is to be a store of its own"
            )


def find_moved(known: Mapping[str, NodeId], found: Mapping[NodeId, str]) -> dict[NodeId, NodeId]:
    """Return {node that a store was on: node that it is on now} for the stores that have moved."""
    return {known[store]: node for node, store in found.items() if known.get(store, node) != node}


def update_stores(
    paths: Paths, nodes: Iterable[NodeId], *, make_catalog: bool = False
) -> dict[NodeId, NodeId]:
    """Give each node's store an id, and let the catalogue follow stores that are on other nodes now.

    Without `make_catalog` nothing is noted if there is no catalogue yet. Returns {former node: present node}
    of what has moved. Raises GridError if two stores have the same id.
    """
    catalog = Catalog(paths)
    for node in nodes:
        make_store_id(paths, node)
    found = read_stores(paths)
    known = catalog.stores()
    by_store = {store: node for node, store in found.items()}
    moved = find_moved(known, found)
    if not make_catalog and not paths.catalog.exists():
        return {}
    if {store: known.get(store) for store in by_store} != by_store:
        catalog.record_stores(by_store, moved)
    return moved
