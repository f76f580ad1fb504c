"""Nodes as `insitu nodes --json` has them (docs/reference/json.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from insitu.base.net.ports import format_address
from insitu.base.paths import partition_file_name

if TYPE_CHECKING:
    from insitu.base.paths import Paths
    from insitu.base.spec import CacheSpec

_AGENT_FIELDS = (
    "host",
    "address",
    "state",
    "since",
    "leave_by",
    "cores",
    "gpus",
    "memory",
    "memory_available",
    "disk",
    "disk_free",
    "unknown_versions",
    "versions",
    "processor",
    "clock_skew",
    "refused",
)


def list_nodes(
    paths: Paths,
    notify: Callable[[str], None] = lambda text: None,
    copies_of: Callable[[str], dict[str, int]] | None = None,
) -> list[dict[str, Any]]:
    """Return the nodes: agents on hosts first, then the stores of this machine that hold something.

    `notify` receives why the list may be old. `copies_of` returns what `count_copies` has returned of a
    node a while ago; None: it is counted now.
    """
    from insitu.grid import Catalog, load_topology, measure_store, read_store_id

    agents = _list_agents(paths, notify)
    served = {each["node"] for each in agents}
    if copies_of is None:
        copies_of = partial(count_copies, paths, Catalog(paths).stored())
    listed = [{**each, **copies_of(each["node"])} for each in agents]
    for node in load_topology(paths).nodes:
        copies = copies_of(node)
        if node in served or (agents and not copies["primaries"] + copies["backups"]):
            continue
        room = measure_store(paths, node)
        found = {"node": node, **copies, "store": str(paths.node(node))}
        found |= {"store_id": read_store_id(paths, node)}
        found |= {"quota": room.quota, "used": room.used}
        listed.append({**found, **dict.fromkeys(_AGENT_FIELDS)})
    return [_in_order(each) for each in listed]


def _list_agents(paths: Paths, notify: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the agents of the cluster that this home belongs to, as `--json` prints them."""
    from insitu.grid import list_nodes_with_stores

    stores = list_nodes_with_stores(paths)
    if not paths.head.exists() and not any(paths.agent(node).exists() for node in stores):
        return []
    from insitu.cluster import describe_state, read_nodes, read_replacement

    members, notice = read_nodes(paths)
    if said := notice or read_replacement(paths):
        notify(said)
    listed = []
    for member in sorted(members, key=lambda each: each.facts.node):
        facts, load = member.facts, member.load
        listed.append(
            {
                "node": facts.node,
                "store": facts.folder,
                "store_id": facts.store,
                "host": facts.host,
                "address": format_address(facts.address, facts.port),
                "state": "unknown" if notice and member.state != "left" else describe_state(member),
                "since": member.since,
                "leave_by": member.leave_by,
                "cores": facts.cores,
                "gpus": list(facts.gpus),
                "memory": facts.memory,
                "memory_available": load.memory_available,
                "disk": facts.disk,
                "disk_free": load.disk_free,
                "unknown_versions": load.unknown_versions,
                "versions": dict(facts.versions),
                "processor": facts.processor,
                "clock_skew": round(member.clock_skew, 3),
                "refused": member.refused or None,
            }
        )
    return listed


def _in_order(entry: dict[str, Any]) -> dict[str, Any]:
    first = ("node", "primaries", "backups", "rows", "bytes", "store", "store_id")
    return {name: entry.get(name) for name in (*first, "quota", "used", *_AGENT_FIELDS)}


def count_copies(paths: Paths, stored: Sequence[CacheSpec], node: str) -> dict[str, int]:
    """Return how many partitions of the versions a node has as primary owner and as a backup, the rows of the
    first, and the bytes of all."""
    owned = [p for cache in stored for p in cache.partitions if node in p.owners]
    return {
        "primaries": sum(p.owners[0] == node for p in owned),
        "backups": sum(p.owners[0] != node for p in owned),
        "rows": sum(p.rows for p in owned if p.owners[0] == node),
        "bytes": _measure_copies(paths, stored, node),
    }


def _measure_copies(paths: Paths, stored: Sequence[CacheSpec], node: str) -> int:
    """Return the bytes of all partitions on a node. Those that versions share count once."""
    sizes: dict[Any, int] = {}
    for cache in stored:
        folder = os.fspath(paths.version(node, cache.name, cache.version))
        for info in cache.partitions:
            if node in info.owners:
                path = f"{folder}/{partition_file_name(info.index)}"
                try:
                    found = os.stat(path)
                    sizes[found.st_dev, found.st_ino] = info.bytes
                except OSError:  # a damaged store; `describe --verify` names what is missing
                    sizes[path] = info.bytes
    return sum(sizes.values())
