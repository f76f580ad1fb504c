"""Runs one job: the supervisor holds its tasks, the controller feeds events and performs actions.

Both are processes of the job itself. Begin reading with `controller.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.control.job_cleanup import clean_up, finalize_job, staged_folder

__getattr__, __dir__ = export_lazily(__name__)
