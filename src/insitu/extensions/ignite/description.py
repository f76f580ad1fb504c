"""What `insitu describe ignite://...` says: the columns, the partitions and who holds them, the topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from insitu.base.wording import format_count
from insitu.extensions.ignite.address import format_server, parse_address, read_settings
from insitu.extensions.ignite.source import WHOLE_CACHE, IgniteSource
from insitu.extensions.ignite.values import Leaf
from insitu.extensions.ignite.wire import DATE, OPTIMIZED, name_of_code
from insitu.grid.sources import ColumnOptions, Description, Part, SourceOptions
from insitu.service import format_size

_BLOCK_BYTES = 4 << 20


def describe_ignite(address: str, *, count_rows: bool) -> dict[str, Any]:
    """Return all about a cache of Ignite, as JSON. `count_rows` reads all rows, for those of each partition.

    Raises InputError and SourceError.
    """
    where, settings = parse_address(address), read_settings()
    source = IgniteSource(where, settings, ColumnOptions(), SourceOptions(), partly=True)
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


def format_description(found: Mapping[str, Any]) -> Description:
    """Return what `describe_ignite` has found, with what people read of it."""
    facts = [
        ("cache", f"{found['address']}, {_format_copies(found)}"),
        ("rows", f"{found['rows']:,}"),
        ("size", f"about {format_size(found['bytes'])} on the way"),
        (
            "topology",
            f"version {'.'.join(map(str, found['topology']))}, "
            f"{format_count(found['partitions'], 'partition')}",
        ),
        *_label("columns", map(_format_column, found["columns"])),
        *_label("problems", found["problems"]),
        *_label("classes", found["classes"]),
    ]
    nodes = [(n["node"], str(n["primaries"]), ", ".join(n["servers"])) for n in found["nodes"]]
    parts = [Part(facts, ("NODE", "PRIMARIES", "SERVERS"), nodes)]
    if "rows_read" in found:
        read = ("read", f"{found['rows_read']:,} rows, digest {found['digest']}")
        rows = [
            ("all" if p["partition"] is None else str(p["partition"]), f"{p['rows']:,}", p["digest"])
            for p in found["partition_list"]
        ]
        parts.append(Part([read], ("PARTITION", "ROWS", "DIGEST"), rows))
    return Description(found, parts)


def _label(label: str, lines: Iterable[str]) -> list[tuple[str, str]]:
    return [(label if index == 0 else "", line) for index, line in enumerate(lines)]


def _format_column(column: Mapping[str, Any]) -> str:
    shape = "[" + ",".join(map(str, column["shape"])) + "]" if column["shape"] else ""
    dtype = "text" if column["dtype"] == "str" else column["dtype"]
    return f"{column['name']}: {dtype}{shape} ({column['type']})"


def _format_copies(found: Mapping[str, Any]) -> str:
    if found["mode"] == "REPLICATED":
        return "replicated: each node has all rows"
    return f"{found['mode'].lower()}, {format_count(found['backups'], 'backup')}"


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
