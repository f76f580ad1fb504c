"""Copies of a job's folder on other hosts. Begin reading with `job_copying.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.job_backup.folder_copies import (
        STATISTICS,
        FolderCopy,
        Mark,
        list_changes,
        read_parts,
        scan_folder,
    )
    from insitu.cluster.job_backup.job_code_copy import (
        JobFilesCopy,
        encode_refresh,
        encode_shards,
        read_job_files,
        unpack_code,
    )
    from insitu.cluster.job_backup.job_copy_folder import (
        JobCopyFolder,
        describe_copies,
        drop_old_copies,
        list_files,
    )
    from insitu.cluster.job_backup.job_copy_reading import open_copy_reader
    from insitu.cluster.job_backup.job_copying import JobCopying

__getattr__, __dir__ = lazy_door(__name__)
