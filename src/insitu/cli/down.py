"""`insitu down`: takes down simulated nodes, or the agents and the head of several hosts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from insitu.base.errors import InputError, JobEnded
from insitu.base.paths import Paths
from insitu.base.wording import format_count
from insitu.cli.console import JsonOption, print_json, print_notice
from insitu.cli.hosts import check_all_ended, down_hosts

if TYPE_CHECKING:
    from insitu.cluster import DownReport


def down(
    force: Annotated[
        bool,
        typer.Option(
            "--force", "--yes", help="Stop running jobs, and delete the stores with all that is in them."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Take simulated nodes down and delete their stores, or end the agents and the head of several hosts.

    The stores of hosts stay, and the next `insitu up --hosts` finds them. With --force they are deleted, too.
    Stores of simulated nodes that hold caches are deleted with --force alone.

    Examples:

    ```
    insitu down
    insitu down --force --json
    ```
    """
    from insitu.cluster import read_head

    paths = Paths.default()
    jobs: list[str] = []
    ended: DownReport | None = None
    if read_head(paths) is not None:
        if force:
            jobs = _stop_jobs(paths, force=True)
        ended = down_hosts(paths, force, quiet=as_json)
    nodes: list[str] = []
    caches: list[str] = []
    if ended is None or (force and not ended.left):
        jobs += _stop_jobs(paths, force=force)
        nodes, caches = _delete_stores(paths, force=force)
        if ended is not None:
            nodes = []  # its nodes are those of the agents, which are named
    if as_json:
        agents, left = ((), {}) if ended is None else (ended.ended, ended.left)
        done = {"agents": list(agents), "left": dict(left), "nodes": nodes, "jobs": jobs, "caches": caches}
        print_json(done)
    else:
        if nodes:
            print_notice(
                f"{format_count(len(nodes), 'node')} down, and their stores deleted: {', '.join(nodes)}"
            )
        if caches:
            print_notice(f"{format_count(len(caches), 'cache')} deleted: {', '.join(caches)}")
    if ended is not None:
        check_all_ended(ended)


def _delete_stores(paths: Paths, *, force: bool) -> tuple[list[str], list[str]]:
    """Delete the stores of this home. Returns its nodes, and the caches that it had. Raises InputError if it
    has some, without `force`."""
    from insitu.grid import Catalog, take_down

    caches = sorted({cache.name for cache in Catalog(paths).stored()})
    return list(take_down(paths, force=force).nodes), caches


def _stop_jobs(paths: Paths, *, force: bool) -> list[str]:
    """Stop the running jobs, whose data would go, and return their ids. Raises InputError, which names them,
    without `force`."""
    from insitu.cli.jobs import stop_and_wait
    from insitu.cluster import find_running_jobs

    running, others = find_running_jobs(paths)
    if others:
        print_notice(f"Left alone, as jobs of other users: {', '.join(others)}")
    if running and not force:
        raise InputError(
            f"The stores are in use by {format_count(len(running), 'running job')}: {', '.join(running)}. "
            f"Stop them with `insitu stop JOB`; `insitu down --force` stops them and deletes all caches"
        )
    for job in running:
        print_notice(f"Stopping {job}: its data will be deleted.")
        with contextlib.suppress(JobEnded):
            stop_and_wait(paths.job(job))
    return running
