"""Commands about the room of stores: quota and tier, and what `insitu up` says about both."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.cli.completion import complete_cache, complete_node
from insitu.cli.console import JsonOption, format_size, open_byte_bar, print_json, print_notice, print_table
from insitu.errors import InputError
from insitu.paths import Paths

if TYPE_CHECKING:
    from insitu.grid import Tier
    from insitu.spec import NodeId

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_NONE = "none"


def parse_size(text: str) -> int:
    """Return `200GB`, `1.5TiB` or `1000` as bytes. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgtp]?)(i?)b)?", text.strip().lower())
    if match is None or (match[3] and not match[2]):
        raise InputError(
            f"A size is a number of bytes, or one with a unit, such as 200GB (10**9 bytes each) or 200GiB "
            f"(2**30). Received: {text!r}"
        )
    return int(Decimal(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2] or ""])


def parse_store_settings(quota: str | None, tier: str | None) -> dict[str, Any]:
    """Return the arguments of `set_up_stores` for the options of `insitu up`. Raises InputError."""
    settings: dict[str, Any] = {}
    if quota is not None:
        settings["quota"] = None if quota == _NONE else parse_size(quota)
    if tier is not None:
        settings["tier"] = None if tier == _NONE else Path(tier).expanduser()
    return settings


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
            command = "tier CACHE --to slow" if room.tier else "delete CACHE"
            print_notice(
                f"{node} holds {format_size(room.used)}, {format_size(-room.free)} more than its quota of "
                f"{format_size(room.quota)}. Nothing is removed, and what is there can be read. Nothing more "
                f"comes in until `insitu {command}` has made room."
            )


def report_tiers(paths: Paths, nodes: Sequence[NodeId], *, given: bool) -> None:
    """Print where the second paths of nodes are, if they were `given` now."""
    from insitu.grid import measure_store

    for node in nodes if given else ():
        tier = measure_store(paths, node).tier
        if tier is None:
            print_notice(f"{node} has no second path.")
            continue
        print_notice(f"{node} has a second path: {tier}")
        if os.stat(tier).st_dev == os.stat(paths.node(node)).st_dev:
            print_notice(
                f"{tier} is on the same device as the store of {node}: moving partitions there frees nothing."
            )


def quota(
    node: Annotated[
        str | None,
        typer.Argument(metavar="[NODE]", help="The node.", show_default="all", autocompletion=complete_node),
    ] = None,
    size: Annotated[
        str | None,
        typer.Argument(metavar="[SIZE]", help="What its store may hold, such as 200GB; or none."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how much the stores of nodes hold and may hold, or set it for one.

    An import, a copy from another node, and `insitu scrub --repair` are refused where a store would hold
    more. Where the store has a second path, caches that were used longest ago and that no job uses are moved
    there first. Files that versions of a cache share count once, and what lies on a second path doesn't
    count. A quota below what is there removes nothing. `insitu up --quota SIZE` sets that of all nodes.

    Examples:

    ```
    insitu quota
    insitu quota node-0 200GB
    insitu quota node-0 none
    ```
    """
    from insitu.grid import list_local_nodes, measure_store, set_up_stores
    from insitu.spec import NodeId

    paths = Paths.default()
    nodes = list_local_nodes(paths)
    if node is not None and node not in nodes:
        raise InputError(f"NODE is one of {', '.join(nodes)}. Received: {node}")
    chosen = nodes if node is None else (NodeId(node),)
    if size is not None:
        set_up_stores(paths, chosen, **parse_store_settings(size, None))
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


def tier(
    name: Annotated[str, typer.Argument(metavar="CACHE", help="Its name.", autocompletion=complete_cache)],
    to: Annotated[str, typer.Option("--to", metavar="slow|fast", help="Where to.")],
    node: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE",
            help="Only what lies on this node.",
            show_default="all",
            autocompletion=complete_node,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Move the partitions of a cache to the second paths of their stores, or back.

    Rows, their order and all bits stay the same. Jobs that run read on; room becomes free when they end. A
    move that is interrupted leaves each partition whole in one place; the same command moves the rest.
    `insitu up --tier PATH` sets the second path. A job that trains on a cache there reads at the speed of
    that disk.

    Examples:

    ```
    insitu tier photos --to slow
    insitu tier photos --to fast --node node-1
    ```
    """
    from insitu.grid import measure_move, move_cache
    from insitu.spec import NodeId

    if to not in ("slow", "fast"):
        raise InputError(f"--to is slow or fast. Received: {to}")
    paths = Paths.default()
    nodes = [NodeId(one) for one in node or ()]
    place: Tier = "slow" if to == "slow" else "fast"
    with _shown_progress(name, lambda: measure_move(paths, name, place, nodes)) as on_read:
        moves = move_cache(paths, name, place, nodes=nodes, on_read=on_read)
    if as_json:
        print_json(
            [
                {"node": m.node, "version": m.version, "partitions": m.partitions, "bytes": m.bytes, "to": to}
                for m in moves
            ]
        )
        return
    moved = [move for move in moves if move.partitions]
    for move in moved:
        typer.echo(
            f"{name} version {move.version}: {move.partitions} partition(s) of {move.node}, "
            f"{format_size(move.bytes)}, moved to the {to} path"
        )
    if not moved:
        print_notice(f"All partitions of {name} lay there already.")


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
    if any(n["slow"] is not None for n in listed):
        header += ["ON SLOW PATH", "SLOW PATH"]
        for row, n in zip(rows, listed, strict=True):
            row += [format_size(n["slow_bytes"]), n["slow"] or "-"]
    print_table(header, rows)


@contextlib.contextmanager
def _shown_progress(name: str, measure: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr where that is a terminal. It is called with bytes that were copied."""
    if not sys.stderr.isatty():
        yield lambda size: None
        return
    with open_byte_bar() as bar:
        task = bar.add_task(f"move {name}", total=measure())
        yield lambda size: bar.advance(task, size)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("quota")(quota)
    app.command("tier")(tier)
