"""What the commands have for caches of Apache Ignite: options of `import`, and their part of `describe`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from insitu.cli.console import format_size, format_time, print_json, print_table

TensorOption = Annotated[
    list[str] | None,
    typer.Option(metavar="COLUMN=DTYPE[SHAPE]", help="Of Ignite: a byte[] as image=uint8[28,28]."),
]
FillOption = Annotated[
    list[str] | None, typer.Option(metavar="COLUMN=VALUE", help="Of Ignite: what takes the place of null.")
]
ArrowOption = Annotated[
    list[str] | None, typer.Option(metavar="COLUMN", help="Of Ignite: a byte[] with Arrow IPC streams.")
]
WithoutOption = Annotated[
    list[str] | None, typer.Option(metavar="COLUMN", help="Of Ignite: a column that is left out.")
]


def describe_ignite_cache(address: str, as_json: bool, count_rows: bool) -> None:
    """Print all about a cache of Ignite. `count_rows` reads it, for the rows of each partition.

    Raises InputError and SourceError.
    """
    from insitu.grid.ignite import describe_ignite

    found = describe_ignite(address, count_rows=count_rows)
    if as_json:
        print_json(found)
        return
    typer.echo(f"cache      {found['address']}, {_format_copies(found)}")
    typer.echo(f"rows       {found['rows']:,}")
    typer.echo(f"size       about {format_size(found['bytes'])} on the way")
    typer.echo(
        f"topology   version {_format_topology(found['topology'])}, {found['partitions']} partition(s)"
    )
    for index, column in enumerate(found["columns"]):
        shape = "[" + ",".join(map(str, column["shape"])) + "]" if column["shape"] else ""
        dtype = "text" if column["dtype"] == "str" else column["dtype"]
        typer.echo(
            f"{'columns' if index == 0 else '':10} {column['name']}: {dtype}{shape} ({column['type']})"
        )
    for index, problem in enumerate(found["problems"]):
        typer.echo(f"{'problems' if index == 0 else '':10} {problem}")
    for index, name in enumerate(found["classes"]):
        typer.echo(f"{'classes' if index == 0 else '':10} {name}")
    typer.echo()
    print_table(
        ("NODE", "PRIMARIES", "SERVERS"),
        [(n["node"], str(n["primaries"]), ", ".join(n["servers"])) for n in found["nodes"]],
    )
    if count_rows:
        typer.echo(f"\nread       {found['rows_read']:,} rows, digest {found['digest']}\n")
        print_table(
            ("PARTITION", "ROWS", "DIGEST"),
            [
                ("all" if p["partition"] is None else str(p["partition"]), f"{p['rows']:,}", p["digest"])
                for p in found["partition_list"]
            ],
        )


def _format_copies(found: dict[str, Any]) -> str:
    if found["mode"] == "REPLICATED":
        return "replicated: each node has all rows"
    return f"{found['mode'].lower()}, {found['backups']} backup(s)"


def _format_topology(version: list[int]) -> str:
    return ".".join(map(str, version))


def format_origin(origin: dict[str, Any]) -> str:
    """Return what `describe CACHE` says of where the rows come from."""
    first, last = origin["topology"]
    remote = f", {format_size(origin['remote_bytes'])} by other servers" if origin["remote_bytes"] else ""
    versions = _format_topology(first) + (f" to {_format_topology(last)}" if last != first else "")
    return (
        f"{origin['address']}, read {format_time(origin['read'][0])}, topology version {versions}, "
        f"digest {origin['digest']}{remote}"
    )
