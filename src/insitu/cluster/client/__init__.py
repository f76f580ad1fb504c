"""Submits jobs, reads how they are, stops, resumes and scales them: what commands of the user do.

Runs in the process of the command line. Begin reading with `submission.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.client.deletion import delete_job
    from insitu.cluster.client.exports import (
        ExportedModel,
        copy_export,
        find_event_folders,
        find_export,
        list_outputs,
        measure_job,
    )
    from insitu.cluster.client.file_cluster import publish_waiting
    from insitu.cluster.client.file_system import InsituFileSystem
    from insitu.cluster.client.job_code import pack_code
    from insitu.cluster.client.job_requests import (
        Shell,
        end_job,
        resume_job,
        scale_job,
        signal_task,
        stop_job,
    )
    from insitu.cluster.client.job_restoring import find_or_restore_job, list_copied_jobs
    from insitu.cluster.client.kept_environment import is_secret
    from insitu.cluster.client.lost_jobs import resume_lost_job
    from insitu.cluster.client.names_repair import (
        begin_lost_store,
        find_lost_names,
        forget_lost_names,
        put_names_back,
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
    from insitu.cluster.client.start_conditions import check_file_size_limit
    from insitu.cluster.client.status import (
        BrokenJob,
        JobStatus,
        find_job,
        find_running_jobs,
        is_running,
        list_job_ids,
        list_jobs,
        read_exit_code,
        read_status,
    )
    from insitu.cluster.client.straggler_watch import watch_stragglers
    from insitu.cluster.client.submission import (
        check_job,
        find_inherited_settings,
        find_problems,
        submit,
    )

__getattr__, __dir__ = export_lazily(__name__)
