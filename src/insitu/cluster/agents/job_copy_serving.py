"""Answers other machines that look for the copy of a job; see `job_copy_folder.py`. Never writes."""

from __future__ import annotations

from typing import Any

from insitu.cluster.agents.job_copy_folder import describe_copies, list_files
from insitu.cluster.agents.own_folders import is_own_folder
from insitu.cluster.agents.records import is_locked
from insitu.cluster.agents.task_servers import list_engine_jobs
from insitu.errors import GridError, InputError
from insitu.grid import list_nodes_with_stores
from insitu.paths import Paths
from insitu.spec import check_simple_name

KINDS = ("job_copies", "job_copy_files", "job_copy_part")
PART_BYTES = 1 << 20
_MOST_FILES = 1 << 20

Fields = dict[str, Any]


def list_served_jobs(paths: Paths) -> list[str]:
    """Return the jobs whose supervisor has a server on a node of this home."""
    return sorted(
        {
            job.root.name
            for node in list_nodes_with_stores(paths)
            for job in list_engine_jobs(paths, node)
            if is_locked(job.engine_lock(node))
        }
    )


def answer_about_copies(paths: Paths, kind: str, fields: Fields) -> tuple[Fields, bytes]:
    """Answer a question about the copies of jobs in this home: which there are, what files one has, and what
    is in a file. Raises InputError for what there can't be, GridError for what isn't there, OSError."""
    if kind == "job_copies":
        return {"copies": describe_copies(paths), "served": list_served_jobs(paths)}, b""
    job_id = fields.get("job")
    if type(job_id) is not str:
        raise InputError(f"A job has an id. Received: {job_id!r:.100}")
    root = paths.job_copy(check_simple_name("A job's id", job_id)).root
    if not is_own_folder(root):
        raise GridError(f"There is no copy of {job_id} here")
    if kind == "job_copy_files":
        return {"files": [list(each) for each in list_files(root)][:_MOST_FILES]}, b""
    path, start = fields.get("path"), fields.get("start")
    if type(start) is not int or start < 0:
        raise InputError(f"A part of a file begins at a byte. Received: {start!r:.100}")
    if path not in dict(list_files(root)):
        raise GridError(f"The copy of {job_id} here has no file {path!r:.100}")
    with (root / str(path)).open("rb") as file:
        file.seek(start)
        return {}, file.read(PART_BYTES)
