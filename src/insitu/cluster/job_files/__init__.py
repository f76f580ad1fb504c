"""The files of a job: journal, lock, logs and specification, written and read back.

The names of the files are in `insitu.base.paths`. Begin reading with `journal.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.job_files.copy_times import append_copy, read_copies
    from insitu.cluster.job_files.heartbeat import Heartbeat, find_last_sign
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
    from insitu.cluster.job_files.logs import (
        JobLogs,
        MergedLog,
        bound_controller_log,
        follow,
        rotated_path,
        split_prefix,
    )
    from insitu.cluster.job_files.records import (
        JobEnvironment,
        has_checkpoint,
        read_environment,
        read_options,
        read_placement,
        read_spec,
        write_environment,
    )
    from insitu.cluster.job_files.request_socket import (
        connect_for_requests,
        is_from_owner,
        listen_for_requests,
    )

__getattr__, __dir__ = export_lazily(__name__)
