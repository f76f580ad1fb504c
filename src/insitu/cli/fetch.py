"""`insitu fetch`: copies of a cache's partitions from other hosts, for processes outside of jobs."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from insitu.base.errors import GridError
from insitu.base.paths import Paths
from insitu.base.wording import format_count
from insitu.cli.completion import complete_cache
from insitu.cli.console import JsonOption, format_size, print_json, print_notice, shown_bytes

_HELP = """
Copy the partitions of CACHE that are on other hosts alone to this machine, for processes outside of jobs.

What is here already isn't copied. An interrupted call is continued by the next one. The copies aren't those
of an owner: they stay until the version is replaced or deleted. Jobs don't need them.

Examples:

    insitu fetch digits/train
"""


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("fetch", help=_HELP)(fetch)


def fetch(
    name: Annotated[
        str, typer.Argument(metavar="CACHE", help="The cache's name.", autocompletion=complete_cache)
    ],
    as_json: JsonOption = False,
) -> None:
    from insitu.cluster import find_stores
    from insitu.grid import Catalog, find_missing_here, list_local_nodes

    paths = Paths.default()
    cache = Catalog(paths).get(name)
    missing = find_missing_here(paths, cache, range(len(cache.partitions)))
    node, moved, started = list_local_nodes(paths)[0], 0, time.monotonic()
    if missing:
        remote = find_stores(paths)
        if remote is None:
            raise GridError(
                f"The partitions of a cache are in stores that can be reached. Received: {name}, of which "
                f"{len(missing)} are missing in {paths.home}. `insitu describe {name} --verify` names them"
            )
        with shown_bytes(f"fetch {name}") as show:
            moved = remote.fetch_here(
                paths, node, cache, missing, lambda node, done, total: show(done, total)
            ).bytes
    if as_json:
        print_json({"cache": name, "version": cache.version, "partitions": len(missing), "bytes": moved})
    elif not missing:
        print_notice(f"All partitions of {name} are here already.")
    else:
        print_notice(
            f"Fetched {format_count(len(missing), 'partition')} of {name} version {cache.version} into "
            f"{node}: {format_size(moved)} in {time.monotonic() - started:.1f} s"
        )
