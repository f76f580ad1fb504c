"""The files of a job: journal, lock, logs and specification, written and read back.

The names of the files are in `insitu.paths`. Begin reading with `journal.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.job_files.copy_times import append_copy, read_copies
    from insitu.cluster.job_files.journal import Journal
    from insitu.cluster.job_files.lock import (
        find_other_host,
        is_locked,
        read_controller,
        read_supervisor,
        signal_controller,
        take_lock,
        write_controller_pid,
    )
    from insitu.cluster.job_files.logs import JobLogs, MergedLog, bound_controller_log
    from insitu.cluster.job_files.output import split_prefix
    from insitu.cluster.job_files.records import (
        JobEnvironment,
        has_checkpoint,
        read_environment,
        read_placement,
        read_spec,
        write_environment,
    )
    from insitu.cluster.job_files.request_socket import (
        connect_for_requests,
        is_from_owner,
        listen_for_requests,
    )
    from insitu.cluster.job_files.tail import follow, rotated_path

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "copy_times": ("append_copy", "read_copies"),
        "journal": ("Journal",),
        "lock": (
            "find_other_host",
            "is_locked",
            "read_controller",
            "read_supervisor",
            "signal_controller",
            "take_lock",
            "write_controller_pid",
        ),
        "logs": ("JobLogs", "MergedLog", "bound_controller_log"),
        "output": ("split_prefix",),
        "records": (
            "JobEnvironment",
            "has_checkpoint",
            "read_environment",
            "read_placement",
            "read_spec",
            "write_environment",
        ),
        "request_socket": ("connect_for_requests", "is_from_owner", "listen_for_requests"),
        "tail": ("follow", "rotated_path"),
    },
)

__all__ = [
    "JobEnvironment",
    "JobLogs",
    "Journal",
    "MergedLog",
    "append_copy",
    "bound_controller_log",
    "connect_for_requests",
    "find_other_host",
    "follow",
    "has_checkpoint",
    "is_from_owner",
    "is_locked",
    "listen_for_requests",
    "read_controller",
    "read_copies",
    "read_environment",
    "read_placement",
    "read_spec",
    "read_supervisor",
    "rotated_path",
    "signal_controller",
    "split_prefix",
    "take_lock",
    "write_controller_pid",
    "write_environment",
]
