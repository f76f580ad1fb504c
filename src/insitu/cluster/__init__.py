"""Jobs: what runs where, and what is done when something of it fails.

Inner rooms, each of which may import those to its right: `chaos`, `client`, `control`, `engines`, `task`,
`job_files`, `decide`. Begin reading with `decide/job.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.chaos import (
        FaultInjector,
        InjectedFault,
        find_leftovers,
        plan_faults,
        read_results,
        wait_until_ended,
    )
    from insitu.cluster.client import (
        BrokenJob,
        JobStatus,
        Request,
        delete_job,
        end_job,
        find_inherited_settings,
        find_job,
        is_running,
        list_job_ids,
        list_jobs,
        read_exit_code,
        read_status,
        resume_job,
        scale_job,
        stop_job,
        submit,
        watch_stragglers,
    )
    from insitu.cluster.control import clean_up
    from insitu.cluster.decide import encode_job
    from insitu.cluster.job_files import Journal, follow, read_placement, read_spec, split_prefix

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "chaos": (
            "FaultInjector",
            "InjectedFault",
            "plan_faults",
            "find_leftovers",
            "read_results",
            "wait_until_ended",
        ),
        "client": (
            "BrokenJob",
            "JobStatus",
            "Request",
            "delete_job",
            "end_job",
            "read_exit_code",
            "find_inherited_settings",
            "find_job",
            "is_running",
            "list_job_ids",
            "list_jobs",
            "read_status",
            "resume_job",
            "scale_job",
            "stop_job",
            "submit",
            "watch_stragglers",
        ),
        "control": ("clean_up",),
        "decide": ("encode_job",),
        "job_files": ("Journal", "follow", "read_placement", "read_spec", "split_prefix"),
    },
)

__all__ = [
    "BrokenJob",
    "FaultInjector",
    "InjectedFault",
    "JobStatus",
    "Journal",
    "Request",
    "clean_up",
    "delete_job",
    "encode_job",
    "end_job",
    "find_inherited_settings",
    "find_job",
    "find_leftovers",
    "follow",
    "is_running",
    "list_job_ids",
    "list_jobs",
    "plan_faults",
    "read_exit_code",
    "read_placement",
    "read_results",
    "read_spec",
    "read_status",
    "resume_job",
    "scale_job",
    "split_prefix",
    "stop_job",
    "submit",
    "wait_until_ended",
    "watch_stragglers",
]
