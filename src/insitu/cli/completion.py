"""What the shell completes: jobs, tasks, caches and nodes."""

from __future__ import annotations

import typer

from insitu.base.errors import InsituError
from insitu.base.paths import Paths


def complete_job(incomplete: str) -> list[str]:
    """Return, for the shell, job ids that begin with what was typed."""
    from insitu.cluster import list_job_ids

    return [job for job in list_job_ids(Paths.default()) if job.startswith(incomplete)]


def complete_task(context: typer.Context, incomplete: str) -> list[str]:
    """Return, for the shell, the tasks of the job named before that begin with what was typed."""
    from insitu.cluster import find_job, read_status

    try:
        job = find_job(Paths.default(), context.params.get("job_id") or "")
        tasks = [str(t.task) for t in read_status(job).state.tasks]
    except InsituError:
        return []
    return [task for task in tasks if task.startswith(incomplete)]


def complete_cache(incomplete: str) -> list[str]:
    """Return, for the shell, caches that begin with what was typed."""
    from insitu.grid import Catalog

    try:
        return [c.name for c in Catalog(Paths.default()).caches() if c.name.startswith(incomplete)]
    except InsituError:
        # A shell that completes shows no errors; the command itself will.
        return []


def complete_node(incomplete: str) -> list[str]:
    """Return, for the shell, nodes that begin with what was typed."""
    from insitu.service import list_nodes

    try:
        return [n["node"] for n in list_nodes(Paths.default()) if n["node"].startswith(incomplete)]
    except InsituError:
        return []


def complete_start(incomplete: str) -> list[str]:
    """Return, for the shell, what the first argument of `start` can be: a cache, or a dash for none."""
    return [*complete_cache(incomplete), *(["-"] if incomplete in ("", "-") else [])]
