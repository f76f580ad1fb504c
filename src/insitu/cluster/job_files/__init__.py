"""The files of a job: journal, lock, logs and specification, written and read back.

The names of the files are in `insitu.paths`. Begin reading with `journal.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.job_files.journal import Journal
    from insitu.cluster.job_files.lock import holder, is_locked, signal_holder, take_lock, write_holder
    from insitu.cluster.job_files.logs import JobLogs, Merged
    from insitu.cluster.job_files.output import split_prefix
    from insitu.cluster.job_files.records import read_placement, read_spec
    from insitu.cluster.job_files.tail import follow

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "journal": ("Journal",),
        "lock": ("holder", "is_locked", "signal_holder", "take_lock", "write_holder"),
        "logs": ("JobLogs", "Merged"),
        "output": ("split_prefix",),
        "records": ("read_placement", "read_spec"),
        "tail": ("follow",),
    },
)

__all__ = [
    "JobLogs",
    "Journal",
    "Merged",
    "follow",
    "holder",
    "is_locked",
    "read_placement",
    "read_spec",
    "signal_holder",
    "split_prefix",
    "take_lock",
    "write_holder",
]
