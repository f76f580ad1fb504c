"""`insitu rebalance`: spreads a cache over the agents that are alive now."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.errors import GridError, InputError
from insitu.base.paths import Paths
from insitu.base.wording import format_count
from insitu.cli.completion import complete_cache
from insitu.cli.console import JsonOption, format_size, print_json, print_notice, print_table, shown_bytes

if TYPE_CHECKING:
    from insitu.grid import RebalanceReport

_HELP = """
Move partitions of CACHE between agents until each has as many copies as the others, with the fewest bytes.

Numbers of partitions of which they are the primary owners become as equal as the copies allow. Copies on
nodes that are lost are made again from backups. Each copy is verified before its node becomes the owner; jobs
that run continue reading the former one, which is removed when none needs it. A call that is interrupted
leaves every partition with an owner, and the next one continues. The exit code is 1 where something couldn't
be moved.

Examples:

    insitu rebalance photos --dry-run
    insitu rebalance photos --rate 200
"""


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("rebalance", help=_HELP)(rebalance)


def rebalance(
    name: Annotated[
        str, typer.Argument(metavar="CACHE", help="The cache's name.", autocompletion=complete_cache)
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would move, and do nothing.")] = False,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Megabytes a second at most, all together; 0: no limit. Else 5 for each core of the node "
            "with the fewest."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    from insitu.cluster import find_owners
    from insitu.grid import rebalance_cache

    if rate is not None and not rate >= 0:
        raise InputError(f"--rate must be at least 0. Received: {rate:g}")
    paths = Paths.default()
    remote = find_owners(paths)
    if remote is None:
        raise InputError(
            f"Partitions move between the agents of several hosts. Received: {paths.home}, which has none. "
            f"`insitu up --hosts FILE` starts them"
        )
    with shown_bytes(f"rebalance {name}") as on_moved:
        limit = _choose_rate(paths) if rate is None else rate * 1e6 or None
        reports = rebalance_cache(paths, name, remote, dry_run=dry_run, rate=limit, on_moved=on_moved)
    if as_json:
        print_json([_describe(report, dry_run) for report in reports])
    else:
        for report in reports:
            _print(report, dry_run)
    failed = [why for report in reports for why in report.failed]
    for why in failed:
        print_notice(why)
    if not all(report.complete for report in reports):
        raise GridError(
            f"Each partition needs a live copy and room where it goes. Received: "
            f"{format_count(len(failed), 'move')} of "
            f"{name} that failed, "
            f"{format_count(sum(len(report.plan.unavailable) for report in reports), 'partition')} "
            f"without a live copy. Bring their nodes back and run the command again"
        )


def _choose_rate(paths: Paths) -> float:
    from insitu.cluster import choose_copy_rate, read_nodes

    return choose_copy_rate(member.facts.cores for member in read_nodes(paths)[0] if member.state == "alive")


def _describe(report: RebalanceReport, dry_run: bool) -> dict[str, Any]:
    """Return what `rebalance --json` prints of one version (docs/reference/json.md)."""
    return {
        "cache": report.cache.name,
        "version": report.cache.version,
        "dry_run": dry_run,
        "moves": [
            {"partition": m.partition, "from": m.source, "to": m.target, "bytes": m.bytes}
            for m in report.plan.moves
        ],
        "dropped": [{"partition": partition, "node": node} for partition, node in report.plan.drops],
        "unavailable": list(report.plan.unavailable),
        "promoted": [{"partition": p, "node": report.plan.owners[p][0]} for p in report.plan.promoted],
        "bytes": report.plan.bytes,
        "moved": report.moved,
        "failed": report.failed,
    }


def _print(report: RebalanceReport, dry_run: bool) -> None:
    plan, named = report.plan, f"{report.cache.name} version {report.cache.version}"
    if not plan.moves and not plan.drops and not plan.promoted:
        print_notice(f"{named} is spread evenly already.")
        return
    if plan.promoted:
        verb = "would get" if dry_run else "got"
        print_notice(
            f"{format_count(len(plan.promoted), 'partition')} of {named} {verb} another primary owner."
        )
    if not plan.moves and not plan.drops:
        return
    copies, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for move in plan.moves:
        copies[move.source, move.target] += 1
        sizes[move.source, move.target] += move.bytes
    rows = [
        (source, target, str(copies[source, target]), format_size(sizes[source, target]))
        for source, target in sorted(copies)
    ]
    print_table(("FROM", "TO", "PARTITIONS", "SIZE"), rows)
    if dry_run:
        print_notice(f"This was a dry run: {format_size(plan.bytes)} of {named} would move.")
    else:
        print_notice(f"Moved {format_size(report.moved)} of {named}.")
