"""`insitu delete`: deletes caches, and jobs that have ended."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from insitu.base.errors import InputError
from insitu.base.paths import JobPaths, Paths
from insitu.cli.console import JsonOption, ask_to_delete, format_size, print_json, print_notice
from insitu.cli.describe import complete_either

_HELP = """
Delete caches, with all of their versions and backups, and jobs that have ended, with their checkpoints.

Names and ids are given whole. A cache that a job uses, and a job that runs, are refused, and then nothing is
deleted. A name that both a cache and a job have means the cache. On a terminal it asks first.

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
            help="Names of caches, or whole ids of jobs.",
            autocompletion=complete_either,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "--force", help="Don't ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    from insitu.cluster import delete_job, forget_job, list_jobs_elsewhere, release_pins
    from insitu.grid import delete_cache

    paths = Paths.default()
    elsewhere = [name for name in list_jobs_elsewhere(paths) if name in names]
    caches, jobs = _find(paths, [name for name in dict.fromkeys(names) if name not in elsewhere])
    if not yes:
        ask_to_delete("delete", ", ".join([*caches, *(job.root.name for job in jobs), *elsewhere]))
    deleted: list[dict[str, Any]] = []
    for name in elsewhere:
        forget_job(paths, name)
        release_pins(paths, name)
        deleted.append({"kind": "job", "name": name, "bytes": 0})
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
    from insitu.cluster import clean_up, is_running, list_jobs_elsewhere
    from insitu.grid import Catalog

    caches, jobs = [], []
    for name in names:
        job = find_cache_or_job(paths, name)
        if job is None:
            caches.append(name)
        elif job.root.name != name:  # perhaps a cache is meant that is gone already
            raise InputError(
                f"What is deleted has its whole name given. Received: {name}, with which the id of the job "
                f"{job.root.name} begins. `insitu delete {job.root.name}` deletes that job"
            )
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
            lost = [
                f". If the machine of {job} is lost, `insitu delete {job}`"
                for job in list_jobs_elsewhere(paths, cache)
            ]
            raise InputError(
                f"A cache that a job uses can't be deleted. Received: {cache}, used by {', '.join(users)}. "
                f"Stop {'it' if len(users) == 1 else 'them'} with `insitu stop JOB_ID` first"
                f"{''.join(lost)}"
            )
    return caches, jobs
