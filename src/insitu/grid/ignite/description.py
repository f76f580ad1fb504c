"""What `insitu describe ignite://...` says: the columns, the partitions and who holds them, the topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from insitu.base.errors import InputError, SourceError
from insitu.grid.ignite.address import format_server, parse_address, read_settings
from insitu.grid.ignite.cluster import Cluster
from insitu.grid.ignite.fields import FieldOptions
from insitu.grid.ignite.placing import ServerPlaces, count_moved, find_places
from insitu.grid.ignite.source import WHOLE_CACHE, IgniteSource, open_ignite
from insitu.grid.ignite.values import Leaf
from insitu.grid.ignite.wire import DATE, OPTIMIZED, name_of_code
from insitu.grid.sources import SourceOptions

_BLOCK_BYTES = 4 << 20


def describe_ignite(address: str, *, count_rows: bool) -> dict[str, Any]:
    """Return all about a cache of Ignite, as JSON. `count_rows` reads all rows, for those of each partition.

    Raises InputError and SourceError.
    """
    source = open_ignite([address], FieldOptions(), SourceOptions(), partly=True)
    layout, configuration = source.layout, source.configuration
    primaries = Counter(layout.primaries)
    servers = {
        node: [format_server((host, endpoint.port)) for host in endpoint.hosts]
        for node, endpoint in layout.endpoints.items()
    }
    found = {
        "kind": "ignite",
        "address": source.path,
        "mode": configuration.mode,
        "backups": configuration.backups,
        "rows": source.ignite_rows,
        "bytes": source.expected_bytes,
        "topology": list(layout.topology),
        "partitions": len(layout.primaries),
        "columns": [
            {"name": c.name, "dtype": c.dtype, "shape": list(c.shape), "type": _name_of_type(leaf)}
            for leaf in source.fields.leaves
            for c in leaf.columns
        ],
        "problems": list(source.fields.problems),
        "classes": sorted({kind.name for kind in source.fields.classes}),
        "nodes": [
            {"node": node, "servers": servers.get(node, []), "primaries": primaries[node]}
            for node in sorted({*servers, *primaries})
        ],
    }
    return found | (_count(source) if count_rows else {})


def describe_moves(origin: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Return what has changed in Ignite since a snapshot was read: the topology version of now, and how many
    of its partitions have another primary server; or why that can't be asked."""
    before = ServerPlaces(tuple(origin["servers"]), tuple(origin["primaries"]))
    try:
        with Cluster(parse_address(origin["address"]), replace(read_settings(), timeout=timeout)) as cluster:
            cluster.find_cache()
            layout = cluster.find_layout()
    except (InputError, SourceError) as error:
        return {"topology": None, "moved": None, "problem": str(error)}
    moved = count_moved(before, find_places(layout.primaries, layout.endpoints))
    return {"topology": list(layout.topology), "moved": moved, "problem": None}


def _name_of_type(leaf: Leaf) -> str:
    if leaf.arrow:
        return "Arrow data"
    return name_of_code(DATE if leaf.code == OPTIMIZED else leaf.code)


def _count(source: IgniteSource) -> dict[str, Any]:
    """Read all rows. Returns how many each partition has, with digests."""
    for _ in source.blocks(_BLOCK_BYTES):
        pass
    origin = source.origin or {}
    return {
        "digest": origin["digest"],
        "rows_read": origin["rows"],
        "partition_list": [
            {"partition": None if number == WHOLE_CACHE else number, "rows": rows, "digest": digest}
            for number, rows, digest in origin["partitions"]
        ],
    }
