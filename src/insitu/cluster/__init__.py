"""The cluster: what runs where. This is its door; everything is loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.cluster.chaos import (
        Disturber,
        Injected,
        chaos_faults,
        leftovers,
        results_of,
        wait_until_over,
    )
    from insitu.cluster.following import follow
    from insitu.cluster.journal import Journal
    from insitu.cluster.output import split_prefix
    from insitu.cluster.records import read_placement, read_spec
    from insitu.cluster.status import (
        BrokenJob,
        JobStatus,
        exit_code,
        find_job,
        is_running,
        job_ids,
        list_jobs,
        read_status,
        stop_job,
    )
    from insitu.cluster.straggling import watch_stragglers
    from insitu.cluster.submission import Request, submit
    from insitu.cluster.wishes import resume_job, scale_job

_DOOR = {
    "BrokenJob": "status",
    "Disturber": "chaos",
    "Injected": "chaos",
    "chaos_faults": "chaos",
    "leftovers": "chaos",
    "results_of": "chaos",
    "wait_until_over": "chaos",
    "JobStatus": "status",
    "Journal": "journal",
    "Request": "submission",
    "exit_code": "status",
    "find_job": "status",
    "follow": "following",
    "is_running": "status",
    "job_ids": "status",
    "list_jobs": "status",
    "read_placement": "records",
    "read_spec": "records",
    "read_status": "status",
    "resume_job": "wishes",
    "scale_job": "wishes",
    "split_prefix": "output",
    "stop_job": "status",
    "submit": "submission",
    "watch_stragglers": "straggling",
}

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


def __getattr__(name: str) -> Any:
    if name in _DOOR:
        return getattr(import_module(f"insitu.cluster.{_DOOR[name]}"), name)
    raise AttributeError(f"module 'insitu.cluster' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
