"""`insitu repair`: rebuilds the catalogue from what lies in the stores."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.cli.console import JsonOption, format_size, print_json, print_notice, print_table
from insitu.paths import Paths

if TYPE_CHECKING:
    from insitu.grid import RepairReport

_HELP = """
Rebuild a lost or damaged catalogue from the manifests in the stores, and manifests from the catalogue.

Nothing is removed: a damaged catalogue is kept under another name. A version whose import died just before
it was published is named and left out; --with-unpublished publishes it. Exits with 1 where a version can't be
put back as a whole. Stores lie in the folder $INSITU_HOME, by default ~/.insitu.

Examples:

    insitu repair --dry-run
    insitu repair
    insitu repair --with-unpublished --json
"""


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("repair", help=_HELP)(repair_command)


def repair_command(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    with_unpublished: Annotated[
        bool, typer.Option("--with-unpublished", help="Publish complete versions that never were.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    from insitu.cluster import find_owners
    from insitu.grid import repair_catalog

    paths = Paths.default()
    remote = find_owners(paths) if paths.head.exists() else None
    with _shown_progress() as progress:
        report = repair_catalog(
            paths,
            dry_run=dry_run,
            with_unpublished=with_unpublished,
            progress=progress,
            remote=remote,
        )
    if not dry_run and report.restored:
        _pin_again(paths)
    if as_json:
        print_json(_to_json(report, dry_run))
    else:
        _print(report, dry_run)
    if not report.complete:
        raise typer.Exit(1)


def _pin_again(paths: Paths) -> None:
    """Keep the versions that running jobs read: who used what was in the catalogue that is lost."""
    from insitu.cluster import is_running, list_job_ids, read_placement, read_spec
    from insitu.errors import InsituError
    from insitu.grid import Catalog
    from insitu.spec import NO_CACHE

    for job_id in list_job_ids(paths):
        job = paths.job(job_id)
        try:
            if not is_running(job) or read_spec(job).cache == NO_CACHE:
                continue
            _, cache = read_placement(job)
            Catalog(paths).pin(cache.name, cache.version, job_id)
        except InsituError as error:
            print_notice(f"{job_id} runs, but what it reads can't be kept for it: {error}")


@contextlib.contextmanager
def _shown_progress() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("read manifests", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _to_json(report: RepairReport, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "complete": report.complete,
        "catalog_set_aside": str(report.set_aside) if report.set_aside else None,
        "restored": [
            {"cache": c.name, "version": c.version, "rows": c.rows, "bytes": c.bytes} for c in report.restored
        ],
        "known": [{"cache": c.name, "version": c.version} for c in report.known],
        "unpublished": [{"cache": name, "version": version} for name, version in report.unpublished],
        "incomplete": [
            {"cache": name, "version": version, "reason": why} for name, version, why in report.incomplete
        ],
        "replaced": [{"cache": name, "version": version} for name, version in report.replaced],
        "manifests_written": [str(path) for path in report.manifests_written],
        "stores_identified": list(report.stores_identified),
        "nodes_listed": list(report.nodes_listed),
        "problems": report.problems,
    }


def _print(report: RepairReport, dry_run: bool) -> None:
    restored = "would be restored" if dry_run else "restored"
    was = "would be" if dry_run else "was"
    rows = [(c.name, str(c.version), f"{c.rows:,}", format_size(c.bytes), restored) for c in report.restored]
    rows += [
        (c.name, str(c.version), f"{c.rows:,}", format_size(c.bytes), "in the catalogue")
        for c in report.known
    ]
    rows += [(name, str(version), "-", "-", "never published") for name, version in report.unpublished]
    rows += [(name, str(version), "-", "-", f"left out: {why}") for name, version, why in report.incomplete]
    if rows:
        print_table(("CACHE", "VERSION", "ROWS", "SIZE", "STATE"), sorted(rows))
    for problem in report.problems:
        print_notice(f"passed over: {problem}")
    if report.set_aside:
        kept = "would be kept" if dry_run else "is kept"
        print_notice(f"The damaged catalogue {kept} as {report.set_aside}.")
    if report.manifests_written:
        written = "would be written" if dry_run else "written"
        print_notice(f"{len(report.manifests_written)} manifest(s) {written}.")
    if report.stores_identified:
        print_notice(f"The id of the store {was} written again on {', '.join(report.stores_identified)}.")
    if report.nodes_listed:
        print_notice(f"The list of nodes {was} written again: {', '.join(report.nodes_listed)}.")
    if report.unpublished:
        print_notice(
            "Versions that were never published are removed by the next `insitu caches` or `insitu import`. "
            "`insitu repair --with-unpublished` publishes them."
        )
    if not report.complete:
        print_notice("What was left out stays in the stores. Bring its nodes back and repair again.")
    if dry_run:
        print_notice("This was a dry run: nothing was changed.")
    elif not rows and not report.problems:
        print_notice("There are no caches, neither in the catalogue nor in the stores.")
