"""`insitu delete`: deletes caches, and jobs that have ended."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from insitu.cli.console import JsonOption, format_size, print_json, print_notice
from insitu.cli.describe import complete_either
from insitu.errors import InputError
from insitu.paths import JobPaths, Paths

_HELP = """
Delete caches, with all of their versions and backups, and jobs that have ended, with their checkpoints.

A cache that a job uses, and a job that runs, are refused, and then nothing is deleted. A name that both a
cache and a job have means the cache. On a terminal it asks first.

Examples:

    insitu delete digits/test
    insitu delete digits-3fa9c1 digits-77b0e2 --yes
"""


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("delete", help=_HELP)(delete_command)


def delete_command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="CACHE_OR_JOB...",
            help="Names of caches, or jobs' ids or enough of their beginning.",
            autocompletion=complete_either,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "--force", help="Don't ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    from insitu.cluster import delete_job
    from insitu.grid import delete_cache

    paths = Paths.default()
    caches, jobs = _find(paths, list(dict.fromkeys(names)))
    _ask([*caches, *(job.root.name for job in jobs)], yes)
    deleted: list[dict[str, Any]] = []
    # Jobs first: one of them may be the last that has used one of the caches.
    for job in jobs:
        deleted.append({"kind": "job", "name": job.root.name, "bytes": delete_job(paths, job)})
    for cache in caches:
        deleted.append({"kind": "cache", "name": cache, "bytes": delete_cache(paths, cache)})
    if as_json:
        print_json(deleted)
        return
    for found in deleted:
        print_notice(f"Deleted the {found['kind']} {found['name']}: {format_size(found['bytes'])}")


def _find(paths: Paths, names: list[str]) -> tuple[list[str], list[JobPaths]]:
    """Return the caches and the jobs that `names` mean. Raises for the first that can't be deleted."""
    from insitu.cli.describe import find_cache_or_job
    from insitu.cluster import clean_up, is_running
    from insitu.grid import Catalog

    caches, jobs = [], []
    for name in names:
        job = find_cache_or_job(paths, name)
        if job is None:
            caches.append(name)
        elif is_running(job):
            raise InputError(
                f"A job that runs can't be deleted. Received: {job.root.name}. Stop it with "
                f"`insitu stop {job.root.name}` first"
            )
        elif job not in jobs:
            jobs.append(job)
    for cache in caches:
        clean_up(paths, cache)  # jobs that died with their machine use nothing
        users = [job for job in Catalog(paths).pinned_by(cache) if paths.job(job) not in jobs]
        if users:
            raise InputError(
                f"A cache that a job uses can't be deleted. Received: {cache}, used by {', '.join(users)}. "
                f"Stop {'it' if len(users) == 1 else 'them'} with `insitu stop JOB_ID` first"
            )
    return caches, jobs


def _ask(names: list[str], yes: bool) -> None:
    """Ask whether to go on. Raises InputError where nobody can answer."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(
            f"`insitu delete` asks first, and its input isn't a terminal. Received: {', '.join(names)}. Give "
            f"--yes to delete without asking"
        )
    typer.confirm(f"Delete {', '.join(names)}?", abort=True, err=True)
