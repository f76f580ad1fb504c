"""The scrub command: reads a cache again in the background, and repairs what has decayed."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.wording import format_count
from insitu.cli.completion import complete_cache
from insitu.cli.console import JsonOption, format_size, open_byte_bar, print_json, print_notice

if TYPE_CHECKING:
    from insitu.base.spec import CacheSpec
    from insitu.grid import CopyCheck

_LOWEST_PRIORITY = 19


def scrub(
    name: Annotated[
        str, typer.Argument(metavar="CACHE", help="The cache's name.", autocompletion=complete_cache)
    ],
    repair: Annotated[
        bool, typer.Option("--repair", help="Put a good copy in the place of each damaged one.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option(help="Megabytes to read a second at most.", show_default="no limit")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read all copies of a cache's partitions, and name the partition, node and blocks of what is damaged.

    It runs at the lowest priority, and leaves nothing in the page cache, so it may run beside trainings. The
    exit code is 0 if all copies are good or were repaired, 1 if one is damaged.

    Examples:

    ```
    insitu scrub digits/train
    insitu scrub digits/train --repair --rate 100
    ```
    """
    from insitu.cli.data import find_remote
    from insitu.grid import Catalog, scrub_cache

    if rate is not None and not rate > 0:
        raise InputError(f"--rate must be positive. Received: {rate:g}")
    paths = Paths.default()
    cache = Catalog(paths).get(name)
    os.nice(_LOWEST_PRIORITY)
    started = time.monotonic()
    with _shown_progress(cache) as on_read:
        limit = None if rate is None else rate * 1e6
        remote = find_remote(paths, cache)
        checks = scrub_cache(paths, cache, repair=repair, rate=limit, on_read=on_read, remote=remote)
    seconds = time.monotonic() - started
    if as_json:
        print_json(_describe(cache, checks, seconds))
    else:
        size = sum(cache.partitions[check.partition].bytes for check in checks)
        damaged = sum(check.problem is not None for check in checks)
        typer.echo(
            f"{format_count(len(checks), 'file')} of {cache.name} version {cache.version}, "
            f"{format_size(size)} in "
            f"{seconds:.1f} s: {f'{damaged} damaged' if damaged else 'all as they were written'}"
        )
    _report(checks)


def _report(checks: list[CopyCheck]) -> None:
    """Print what is wrong. Raises CorruptPartition if something is left."""
    left = []
    for check in checks:
        if check.repaired:
            print_notice(f"{check.problem}\nIt was repaired from the copy on another node.")
        elif check.problem is not None:
            left.append(check.problem)
    for problem in left[:-1]:
        print_notice(str(problem))
    if left:
        raise left[-1]


def _describe(cache: CacheSpec, checks: list[CopyCheck], seconds: float) -> dict[str, Any]:
    """Return what `scrub --json` prints (docs/reference/json.md)."""
    return {
        "name": cache.name,
        "version": cache.version,
        "seconds": seconds,
        "copies": [
            {
                "partition": check.partition,
                "node": check.node,
                "path": str(check.path),
                "problem": None if check.problem is None else str(check.problem),
                "blocks": list(check.blocks),
                "repaired": check.repaired,
            }
            for check in checks
        ],
    }


@contextlib.contextmanager
def _shown_progress(cache: CacheSpec) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda size: None
        return
    total = sum(info.bytes * len(info.owners) for info in cache.partitions)
    with open_byte_bar() as bar:
        task = bar.add_task(f"scrub {cache.name}", total=total)
        yield lambda size: bar.advance(task, size)


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(scrub)
