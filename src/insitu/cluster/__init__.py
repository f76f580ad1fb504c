"""Jobs: what runs where, and what is done when something of it fails.

Inner rooms, each of which may import those to its right: `chaos`, `client`, `control`, `engines`, `task`,
`job_files`, `decide`. Begin reading with `decide/job.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.chaos import Disturber, Injected, chaos_faults, leftovers, results_of, wait_until_over
    from insitu.cluster.client import (
        BrokenJob,
        JobStatus,
        Request,
        exit_code,
        find_job,
        is_running,
        job_ids,
        list_jobs,
        read_status,
        resume_job,
        scale_job,
        stop_job,
        submit,
        watch_stragglers,
    )
    from insitu.cluster.job_files import Journal, follow, read_placement, read_spec, split_prefix

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "chaos": ("Disturber", "Injected", "chaos_faults", "leftovers", "results_of", "wait_until_over"),
        "client": (
            "BrokenJob",
            "JobStatus",
            "Request",
            "exit_code",
            "find_job",
            "is_running",
            "job_ids",
            "list_jobs",
            "read_status",
            "resume_job",
            "scale_job",
            "stop_job",
            "submit",
            "watch_stragglers",
        ),
        "job_files": ("Journal", "follow", "read_placement", "read_spec", "split_prefix"),
    },
)

__all__ = [
    "BrokenJob",
    "Disturber",
    "Injected",
    "JobStatus",
    "Journal",
    "Request",
    "chaos_faults",
    "exit_code",
    "find_job",
    "follow",
    "is_running",
    "job_ids",
    "leftovers",
    "list_jobs",
    "read_placement",
    "read_spec",
    "read_status",
    "results_of",
    "resume_job",
    "scale_job",
    "split_prefix",
    "stop_job",
    "submit",
    "wait_until_over",
    "watch_stragglers",
]
