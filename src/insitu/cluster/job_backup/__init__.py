"""Copies of a job's folder on other hosts. Begin reading with `sender.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

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
    from insitu.cluster.job_backup.reader import open_copy_reader
    from insitu.cluster.job_backup.sender import JobCopying
    from insitu.cluster.job_backup.store import (
        JobCopyFolder,
        describe_copies,
        drop_old_copies,
        list_files,
    )

__getattr__, __dir__ = export_lazily(__name__)
