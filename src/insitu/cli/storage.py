"""`insitu quota`, and what `insitu up` and `insitu nodes` say about the room of stores."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.cli.completion import complete_node
from insitu.cli.console import JsonOption, format_size, print_json, print_notice, print_table

if TYPE_CHECKING:
    from insitu.base.spec import NodeId

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_size(text: str) -> int:
    """Return `200GB`, `1.5TiB` or `1000` as bytes. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgtp]?)(i?)b)?", text.strip().lower())
    if match is None or (match[3] and not match[2]):
        raise InputError(
            f"A size is a number of bytes, or one with a unit, such as 200GB (10**9 bytes each) or 200GiB "
            f"(2**30). Received: {text!r}"
        )
    return int(Decimal(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2] or ""])


def parse_quota(text: str) -> int | None:
    """Return a quota as bytes; None for `none`. Raises InputError."""
    return None if text == "none" else parse_size(text)


def report_quotas(paths: Paths, nodes: Sequence[NodeId]) -> None:
    """Print what nodes hold of their quotas, and what follows where that is too much."""
    from insitu.grid import measure_store

    for node in nodes:
        room = measure_store(paths, node)
        if room.quota is None or room.free is None:
            print_notice(f"{node} has no quota, and holds {format_size(room.used)}.")
        elif room.free >= 0:
            print_notice(f"{node} holds {format_size(room.used)} of {format_size(room.quota)}.")
        else:
            print_notice(
                f"{node} holds {format_size(room.used)}, {format_size(-room.free)} more than its quota of "
                f"{format_size(room.quota)}. Nothing is removed, and what is there can be read. Nothing more "
                f"comes in until `insitu delete CACHE` has made room."
            )


def report_second_paths(paths: Paths) -> None:
    """Print where an earlier version may have put partitions."""
    from insitu.grid import find_second_paths

    for node, folder in find_second_paths(paths).items():
        print_notice(
            f"{node} has a second path, {folder}, to which this version moves no partitions any more. What "
            f"is there can be read. `insitu repair` brings it back into the store."
        )


def quota(
    node: Annotated[
        str | None,
        typer.Argument(metavar="[NODE]", help="The node.", show_default="all", autocompletion=complete_node),
    ] = None,
    size: Annotated[
        str | None,
        typer.Argument(metavar="[SIZE]", help="Quota of its store, such as 200GB; or none."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how much the stores of nodes hold and may hold, or set it for one.

    An import, a copy from another node, and `insitu scrub --repair` are refused where a store would hold
    more. Files that versions of a cache share count once. A quota below what is there removes nothing.
    `insitu up --quota SIZE` sets that of all nodes.

    Examples:

    ```
    insitu quota
    insitu quota node-0 200GB
    insitu quota node-0 none
    ```
    """
    from insitu.base.spec import NodeId
    from insitu.grid import list_local_nodes, measure_store, set_quotas

    paths = Paths.default()
    nodes = list_local_nodes(paths)
    if node is not None and node not in nodes:
        raise InputError(f"NODE is one of {', '.join(nodes)}. Received: {node}")
    chosen = nodes if node is None else (NodeId(node),)
    if size is not None:
        set_quotas(paths, chosen, quota=parse_quota(size))
    rooms = {name: measure_store(paths, name) for name in chosen}
    if as_json:
        print_json(
            [
                {"node": name, "quota": room.quota, "used": room.used, "free": room.free}
                for name, room in rooms.items()
            ]
        )
    elif size is None:
        print_table(
            ("NODE", "USED", "QUOTA", "FREE"),
            [
                (
                    name,
                    format_size(room.used),
                    "-" if room.quota is None else format_size(room.quota),
                    "-" if room.free is None else format_size(max(0, room.free)),
                )
                for name, room in rooms.items()
            ],
        )
    if size is not None:
        report_quotas(paths, chosen)


def print_nodes(listed: Sequence[Mapping[str, Any]]) -> None:
    """Print what `insitu nodes --json` lists as a table."""
    header = ["NODE", "PRIMARIES", "BACKUPS", "ROWS", "SIZE", "STORE"]
    rows = [
        [
            n["node"],
            str(n["primaries"]),
            str(n["backups"]),
            f"{n['rows']:,}",
            format_size(n["bytes"]),
            n["store"],
        ]
        for n in listed
    ]
    if any(n["quota"] is not None for n in listed):
        header += ["USED", "QUOTA"]
        for row, n in zip(rows, listed, strict=True):
            row += [format_size(n["used"]), "-" if n["quota"] is None else format_size(n["quota"])]
    print_table(header, rows)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("quota")(quota)
