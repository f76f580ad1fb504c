"""Submits jobs, reads how they are, stops, resumes and scales them: what commands of the user do.

Runs in the process of the command line. Begin reading with `submission.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.client.deletion import delete_job
    from insitu.cluster.client.job_requests import end_job, resume_job, scale_job, stop_job
    from insitu.cluster.client.status import (
        BrokenJob,
        JobStatus,
        find_job,
        is_running,
        list_job_ids,
        list_jobs,
        read_exit_code,
        read_status,
    )
    from insitu.cluster.client.straggler_watch import watch_stragglers
    from insitu.cluster.client.submission import Request, find_inherited_settings, submit

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "deletion": ("delete_job",),
        "job_requests": ("end_job", "resume_job", "scale_job", "stop_job"),
        "status": (
            "BrokenJob",
            "JobStatus",
            "read_exit_code",
            "find_job",
            "is_running",
            "list_job_ids",
            "list_jobs",
            "read_status",
        ),
        "straggler_watch": ("watch_stragglers",),
        "submission": ("Request", "find_inherited_settings", "submit"),
    },
)

__all__ = [
    "BrokenJob",
    "JobStatus",
    "Request",
    "delete_job",
    "end_job",
    "find_inherited_settings",
    "find_job",
    "is_running",
    "list_job_ids",
    "list_jobs",
    "read_exit_code",
    "read_status",
    "resume_job",
    "scale_job",
    "stop_job",
    "submit",
    "watch_stragglers",
]
