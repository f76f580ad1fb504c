"""The command that deletes jobs which have ended: prune."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.paths import Paths
from insitu.base.wording import format_count
from insitu.cli.console import (
    JsonOption,
    ask_to_delete,
    format_duration,
    format_size,
    print_json,
    print_notice,
    print_table,
)
from insitu.cli.drain import parse_duration
from insitu.cli.storage import parse_size

if TYPE_CHECKING:
    from insitu.cluster import JobStatus

_HELP = """
Delete jobs that have ended, with all that they have written: models, checkpoints and logs.

Shows them first, and asks. Caches stay; `insitu delete` deletes single jobs and caches. Jobs of other users
and jobs that can't be read are left alone.

Examples:

    insitu prune --older-than 7d
    insitu prune --larger-than 1GB
    insitu prune --older-than 30d --yes
"""


def prune(
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="Prune jobs that ended longer ago: 12h, 7d.")
    ] = None,
    larger_than: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Prune jobs with a larger folder: 500MB, 1GB.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    from insitu.cluster import delete_job

    paths = Paths.default()
    age = 0.0 if older_than is None else parse_duration("--older-than", older_than)
    found = find_prunable(paths, time.time() - age, 0 if larger_than is None else parse_size(larger_than))
    if not found:
        print_notice("No job that has ended is of this age and size.")
    elif not yes:
        _show(found)
        ask_to_delete("prune", format_count(len(found), "job"))
    deleted: list[dict[str, Any]] = []
    for status, _ in found:
        name = status.spec.job_id
        deleted.append({"kind": "job", "name": name, "bytes": delete_job(paths, paths.job(name))})
        if not as_json:
            print_notice(f"Deleted the job {name}: {format_size(deleted[-1]['bytes'])}")
    if as_json:
        print_json(deleted)


def find_prunable(paths: Paths, ended_before: float, larger_than: int) -> list[tuple[JobStatus, int]]:
    """Return the jobs that ended before a time, in seconds since 1970, with the bytes in their folders, if
    there are more than `larger_than`; the oldest first."""
    from insitu.cluster import BrokenJob, list_jobs, measure_job

    found = []
    for job in list_jobs(paths, all_jobs=True):
        if isinstance(job, BrokenJob) or job.running or not (job.ended and job.ended <= ended_before):
            continue
        size = measure_job(paths.job(job.spec.job_id))
        if size > larger_than:
            found.append((job, size))
    return found


def _show(found: list[tuple[JobStatus, int]]) -> None:
    now = time.time()
    rows = [
        (j.spec.job_id, j.state.phase, f"{format_duration(now - (j.ended or now))} ago", format_size(size))
        for j, size in found
    ]
    print_table(("JOB", "STATE", "ENDED", "SIZE"), rows)
    print_notice(f"{format_count(len(found), 'job')}, {format_size(sum(size for _, size in found))}")


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("prune", help=_HELP)(prune)
