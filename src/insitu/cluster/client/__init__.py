"""Submits jobs, reads how they are, stops, resumes and scales them: what commands of the user do.

Runs in the process of the command line. Begin reading with `submission.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.client.deletion import delete_job
    from insitu.cluster.client.exports import ExportedModel, copy_export, find_export
    from insitu.cluster.client.file_system import InsituFileSystem
    from insitu.cluster.client.job_bringing import find_or_bring_job, list_copied_jobs
    from insitu.cluster.client.job_code import pack_code
    from insitu.cluster.client.job_requests import (
        Shell,
        end_job,
        resume_job,
        scale_job,
        signal_task,
        stop_job,
    )
    from insitu.cluster.client.numbers import (
        CurvePoint,
        Goodput,
        Rates,
        find_newest,
        measure_goodput,
        read_curve,
        read_rates,
        summarize_metrics,
    )
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
    from insitu.cluster.client.submission import (
        Request,
        find_inherited_settings,
        find_withheld_secrets,
        submit,
    )

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "deletion": ("delete_job",),
        "exports": ("ExportedModel", "copy_export", "find_export"),
        "file_system": ("InsituFileSystem",),
        "job_bringing": ("find_or_bring_job", "list_copied_jobs"),
        "job_code": ("pack_code",),
        "job_requests": ("Shell", "end_job", "resume_job", "scale_job", "signal_task", "stop_job"),
        "numbers": (
            "CurvePoint",
            "Goodput",
            "Rates",
            "find_newest",
            "measure_goodput",
            "read_curve",
            "read_rates",
            "summarize_metrics",
        ),
        "status": (
            "BrokenJob",
            "JobStatus",
            "read_exit_code",
            "find_job",
            "find_withheld_secrets",
            "is_running",
            "list_job_ids",
            "list_jobs",
            "read_status",
        ),
        "straggler_watch": ("watch_stragglers",),
        "submission": ("Request", "find_inherited_settings", "find_withheld_secrets", "submit"),
    },
)

__all__ = [
    "BrokenJob",
    "CurvePoint",
    "ExportedModel",
    "Goodput",
    "InsituFileSystem",
    "JobStatus",
    "Rates",
    "Request",
    "Shell",
    "copy_export",
    "delete_job",
    "end_job",
    "find_export",
    "find_inherited_settings",
    "find_job",
    "find_newest",
    "find_or_bring_job",
    "find_withheld_secrets",
    "is_running",
    "list_copied_jobs",
    "list_job_ids",
    "list_jobs",
    "measure_goodput",
    "pack_code",
    "read_curve",
    "read_exit_code",
    "read_rates",
    "read_status",
    "resume_job",
    "scale_job",
    "signal_task",
    "stop_job",
    "submit",
    "summarize_metrics",
    "watch_stragglers",
]
