"""The nodes of this cluster: lists them, brings simulated ones up, takes them down.

A simulated node is a store of its own below `$INSITU_HOME/nodes` on this machine. If none were brought up
there is one, `node-0`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from insitu.base.disk.access import file_mode, make_folder
from insitu.base.errors import CacheBusy, GridError, InputError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId, Topology
from insitu.base.wording import format_count, inflect
from insitu.grid.catalog import (
    Catalog,
    cache_locks,
    full_disk_as_error,
    home_errors,
    is_home_of_agent,
    list_nodes_with_stores,
    list_resumable,
    publish_file,
    refuse_copy,
    sweep,
    update_stores,
)
from insitu.grid.stores import read_settings, set_quota

MAX_NODES = 1000


def load_topology(paths: Paths) -> Topology:
    """Return the nodes that were brought up, or the one that is always there. Raises GridError."""
    try:
        text = paths.topology.read_text()
    except FileNotFoundError:
        return Topology()
    try:
        return Topology(tuple(NodeId(str(node)) for node in json.loads(text)["nodes"]))
    except (ValueError, KeyError, TypeError, InputError) as error:
        raise GridError(
            f"The list of nodes at {paths.topology} can't be read ({error}). Write it again with "
            f"`insitu up --nodes N`, after removing that file"
        ) from error


def list_local_nodes(paths: Paths) -> tuple[NodeId, ...]:
    """Return the nodes whose stores are in this home: those of agents, or the nodes that were brought up."""
    agents = [node for node in list_nodes_with_stores(paths) if paths.agent(node).exists()]
    if is_home_of_agent(paths):
        return tuple(agents)
    return tuple(dict.fromkeys((*load_topology(paths).nodes, *agents)))


def bring_up(paths: Paths, nodes: int) -> Topology:
    """Make `nodes` simulated nodes, node-0 and so on, and return them.

    Caches that exist stay on the nodes that own them; a store whose folder has another node's name now takes
    its partitions along. Raises InputError if that is impossible, since a node that would go owns rows, and
    GridError if a store is the copy of another one.
    """
    if not 1 <= nodes <= MAX_NODES:
        raise InputError(f"--nodes must be in [1, {MAX_NODES}]. Received: {nodes}")
    refuse_copy(paths)
    topology = Topology(tuple(NodeId(f"node-{i}") for i in range(nodes)))
    update_stores(paths, ())
    owning = {
        owner: cache for cache in Catalog(paths).stored() for p in cache.partitions for owner in p.owners
    }
    missing = sorted(set(owning) - set(topology.nodes))
    if missing:
        raise InputError(
            f"{format_count(nodes, 'node')} would leave out {', '.join(missing)}, which "
            f"{inflect(len(missing), 'holds', 'hold')} partitions of "
            f"{', '.join(sorted({owning[node].name for node in missing}))}. Ask for more nodes, or drop all "
            f"stores with `insitu down --force` first"
        )
    with home_errors(paths.home):
        for node in topology.nodes:
            make_folder(paths.home, paths.node(node))
        update_stores(paths, topology.nodes)
        publish_file(paths.topology, json.dumps({"nodes": topology.nodes}).encode(), file_mode(paths.home))
    return topology


def take_down(paths: Paths, *, force: bool = False) -> Topology:
    """Drop the nodes and their stores, and what interrupted imports keep; return what the nodes were.

    Raises InputError if stores hold caches and `force` is not given, CacheBusy during an import.
    """
    from insitu.grid.shared_files import list_local_volumes, remove_file_memory, remove_local_names

    refuse_copy(paths)
    topology = load_topology(paths)
    catalog = Catalog(paths)
    caches = sorted({cache.name for cache in catalog.stored()})
    if caches and not force:
        jobs = sorted({job for cache in caches for job in catalog.pinned_by(cache)})
        raise InputError(
            f"The stores hold {format_count(len(caches), 'cache')}: {', '.join(caches)}"
            f"{', in use by ' + ', '.join(jobs) if jobs else ''}. `insitu down --force` deletes them"
        )
    if not force and (volumes := list_local_volumes(paths)):
        raise InputError(
            f"The stores hold files of insitu://: {', '.join(volumes)}. Copy them with `insitu fs cp`; "
            f"`insitu down --force` deletes them"
        )
    with cache_locks(paths, caches):
        second_paths = find_second_paths(paths)
        catalog.clear()
        remove_local_names(paths)
        for node in list_nodes_with_stores(paths):
            remove_file_memory(paths.file_memory(node))
        if paths.nodes.exists():
            dropped = paths.nodes.with_name(f".dropped-{os.getpid()}")
            paths.nodes.rename(dropped)
            shutil.rmtree(dropped)
        for folder in second_paths.values():
            shutil.rmtree(folder, ignore_errors=True)
        paths.topology.unlink(missing_ok=True)
    for cache in list_resumable(paths):
        with contextlib.suppress(CacheBusy), cache_locks(paths, [cache]):
            sweep(paths, [cache])
    return topology


def find_second_paths(paths: Paths) -> dict[NodeId, Path]:
    """Return the folders that stores have on second paths, as far as their settings can be read."""
    found = {}
    for node in list_nodes_with_stores(paths):
        with contextlib.suppress(GridError):
            if (root := read_settings(paths, node).second_path) is not None:
                found[node] = root
    return found


def set_quotas(paths: Paths, nodes: Sequence[NodeId], *, quota: int | None) -> None:
    """Set the quota of the stores of some nodes; None removes it. Raises InputError for a node that there
    isn't."""
    known = list_local_nodes(paths)
    unknown = sorted(set(nodes) - set(known))
    if unknown:
        raise InputError(
            f"A quota is that of a node that is up: {', '.join(known)}. Received: {', '.join(unknown)}"
        )
    with home_errors(paths.home), full_disk_as_error(paths.home):
        for node in nodes:
            set_quota(paths, node, quota)
