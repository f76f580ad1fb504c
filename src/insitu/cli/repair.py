"""`insitu repair`: rebuilds the catalogue, and names of `insitu://`, from what is in the stores."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.wording import format_count, inflect
from insitu.cli.console import JsonOption, format_size, print_json, print_notice, print_table
from insitu.cli.repair_names import is_terminal

if TYPE_CHECKING:
    from insitu.cluster import MovePlan, Outcome
    from insitu.grid import RepairReport


# The part of `insitu repair` that moves the metadata of a cluster to another store


HostsOption = Annotated[
    Path | None,
    typer.Option("--hosts", metavar="FILE", help="With --metadata: the hosts that insitu's etcd runs on."),
]
LauncherOption = Annotated[
    str | None,
    typer.Option("--launcher", metavar="COMMAND", help="As in `insitu up`.", show_default="ssh {host}"),
]
InsituOption = Annotated[
    str | None,
    typer.Option("--insitu", metavar="COMMAND", help="Runs insitu on the hosts.", show_default="insitu"),
]


def move_by_command(wanted: str, yes: bool, of_hosts: Mapping[str, object], others: Sequence[str]) -> None:
    """Move the metadata of this home, as `insitu repair --metadata` says it. `of_hosts`: the options for an
    etcd that insitu runs; `others`: options that were given and don't go with it. Raises InsituError."""
    from insitu.cluster import (
        EMBEDDED,
        OWN_ETCD,
        SSH,
        HostCommands,
        move_metadata,
        move_with_members,
        parse_hosts,
        read_hosts_file,
    )

    if others:
        raise InputError(f"--metadata goes with --yes and --hosts alone. Received: {', '.join(others)}")
    paths, hosts = Paths.default(), of_hosts["--hosts"]

    def ask(plan: MovePlan) -> bool:
        return _ask(plan, yes)

    if hosts is None:
        if given := [name for name, value in of_hosts.items() if value is not None]:
            raise InputError(f"--launcher and --insitu go with --hosts. Received: {', '.join(given)} alone")
        is_there = move_metadata(paths, wanted, ask)
    elif wanted not in (OWN_ETCD, EMBEDDED):
        raise InputError(f"--hosts is for --metadata etcd or embedded. Received: --metadata {wanted}")
    else:
        lines = parse_hosts(read_hosts_file(Path(str(hosts))), str(hosts))
        launcher, insitu = of_hosts["--launcher"] or SSH, of_hosts["--insitu"] or "insitu"
        commands = HostCommands(lines, str(launcher), str(insitu), "")
        is_there = move_with_members(paths, wanted == OWN_ETCD, commands, _report, ask)
    if not is_there:
        raise typer.Exit(1)
    print_notice("All is there. Start the cluster by `insitu up --hosts FILE`; --metadata isn't needed.")


def _report(outcome: Outcome) -> None:
    answer = outcome.answer
    said = f"failed: {outcome.problem}" if answer is None else f"a member of etcd serves at {answer['etcd']}"
    print_notice(f"{outcome.host}: {said}")


def _ask(plan: MovePlan, yes: bool) -> bool:
    catalog, names = (format_count(count, "record") for count in (plan.catalog, plan.names))
    print_notice(
        f"From {plan.origin} to {plan.target}: {catalog} of the catalogue, {names} of files, "
        f"{format_size(plan.size)}."
    )
    if yes:
        return True
    if not is_terminal():
        print_notice("Nothing was moved: there is no terminal to ask on. Give --yes.")
        return False
    return typer.confirm("Move them?", err=True)


_HELP = """
Rebuild a lost or damaged catalogue from the manifests in the stores, and manifests from the catalogue.

No version is removed, and a damaged catalogue is kept under another name. A version whose import died just
before it was published is named and left out; --with-unpublished publishes it. Exits with 1 where a version
can't be put back as a whole, or partitions stay on a second path. Stores are in the folder $INSITU_HOME, by
default ~/.insitu.

Partitions that an earlier insitu has moved to the second path of a store come back into it. What caches that
were deleted have left there is removed.

If the head of this machine knows no files of insitu://, though nodes hold some, their names are put back.
It shows which files are there, and which of them may be older than what was lost, and asks first. Bring up
all nodes before. A head that knows some files gets none from elsewhere: what it doesn't know is named.

With --metadata all that the head knows is moved to an etcd, or from it to a file in this home (`embedded`),
after `insitu down`. It shows what is moved and asks, copies, reads all back, and marks the store of before,
with which no head begins from then on. If it was interrupted, run it again. For an etcd that insitu runs
itself give --hosts, too.

Examples:

    insitu repair --dry-run
    insitu repair
    insitu repair --yes
    insitu repair --forget-files
    insitu repair --with-unpublished --json
    insitu repair --metadata etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379
    insitu repair --metadata etcd --hosts hosts.txt
    insitu repair --metadata embedded
"""


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("repair", help=_HELP)(repair_command)


def repair_command(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    with_unpublished: Annotated[
        bool,
        typer.Option("--with-unpublished", help="Also publish complete versions that were never published."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Put files of insitu:// back without asking.")] = False,
    forget_files: Annotated[
        bool,
        typer.Option("--forget-files", help="Give up the files of insitu:// that the head doesn't know."),
    ] = False,
    metadata: Annotated[
        str | None,
        typer.Option(metavar="URL|etcd|embedded", help="Move what the head knows there."),
    ] = None,
    hosts: HostsOption = None,
    launcher: LauncherOption = None,
    insitu: InsituOption = None,
    as_json: JsonOption = False,
) -> None:
    of_hosts = {"--hosts": hosts, "--launcher": launcher, "--insitu": insitu}
    if metadata is not None:
        of_repair = {"--dry-run": dry_run, "--with-unpublished": with_unpublished, "--json": as_json}
        of_repair["--forget-files"] = forget_files
        move_by_command(metadata, yes, of_hosts, [name for name, given in of_repair.items() if given])
        return
    if given := [name for name, value in of_hosts.items() if value is not None]:
        raise InputError(f"{', '.join(of_hosts)} go with --metadata. Received: {', '.join(given)} without it")
    _repair(dry_run, with_unpublished, yes, forget_files, as_json)


def _repair(dry_run: bool, with_unpublished: bool, yes: bool, forget_files: bool, as_json: bool) -> None:
    from insitu.cli.repair_names import NamesRepair
    from insitu.cluster import begin_lost_store, find_owners
    from insitu.grid import repair_catalog

    paths = Paths.default()
    if not dry_run and begin_lost_store(paths):
        print_notice(
            f"{paths.metadata} is lost, so the head begins with an empty one. Start it by `insitu up` as "
            f"before, then run `insitu repair` again: it puts back what the nodes hold."
        )
        raise typer.Exit(1)
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
    names = NamesRepair(paths, dry_run=dry_run, forgets=forget_files)
    if not as_json:
        _print(report, dry_run)
        names.show()
    names.ask(yes)
    if as_json:
        print_json(_to_json(report, dry_run) | {"files": names.to_json()})
    else:
        names.say_done()
    if not report.complete or not names.is_complete:
        raise typer.Exit(1)


def _pin_again(paths: Paths) -> None:
    """Keep the versions that running jobs read: who used what was in the catalogue that is lost."""
    from insitu.base.errors import InsituError
    from insitu.base.spec import NO_CACHE
    from insitu.cluster import find_running_jobs, read_placement, read_spec
    from insitu.grid import Catalog

    running, others = find_running_jobs(paths)
    if others:
        print_notice(f"What jobs of other users read isn't kept for them: {', '.join(others)}")
    for job_id in running:
        job = paths.job(job_id)
        try:
            if read_spec(job).cache == NO_CACHE:
                continue
            _, cache = read_placement(job)
            Catalog(paths).pin(cache.name, cache.version, job_id)
        except InsituError as error:
            print_notice(f"{job_id} runs, but what it reads can't be kept for it: {error}")


@contextlib.contextmanager
def _shown_progress() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr if that is a terminal."""
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
        "brought_back": {
            node: {"moved": moved, "left": left} for node, (moved, left) in report.brought_back.items()
        },
        "problems": report.problems,
    }


def _print(report: RepairReport, dry_run: bool) -> None:
    restored = "would be restored" if dry_run else "restored"
    was = "would be" if dry_run else "was"
    would = "would come" if dry_run else "came"
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
        print_notice(f"{format_count(len(report.manifests_written), 'manifest')} {written}.")
    if report.stores_identified:
        print_notice(f"The id of the store {was} written again on {', '.join(report.stores_identified)}.")
    if report.nodes_listed:
        print_notice(f"The list of nodes {was} written again: {', '.join(report.nodes_listed)}.")
    for node, (moved, left) in report.brought_back.items():
        rest = f", {left} {inflect(left, 'stays', 'stay')} there" if left else ""
        came = f"{format_count(moved, 'partition')} of {node} {would} back"
        print_notice(f"{came} from its second path into its store{rest}.")
    if report.unpublished:
        print_notice(
            "Versions that were never published are removed by the next `insitu caches` or `insitu import`. "
            "`insitu repair --with-unpublished` publishes them."
        )
    if report.incomplete:
        print_notice("What was left out stays in the stores. Bring its nodes back and repair again.")
    if dry_run:
        print_notice("This was a dry run: nothing was changed.")
    elif not rows and not report.problems:
        print_notice("There are no caches, neither in the catalogue nor in the stores.")
