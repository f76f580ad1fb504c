"""Says that the disk of a job is full, while a command follows the job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from insitu.cli.console import print_notice
from insitu.paths import JobPaths


def watch_disk(job: JobPaths, is_over: Callable[[], bool]) -> Callable[[], bool]:
    """Return `is_over` of a job that is followed, which also says, once, that its disk is full: the job waits
    then, and can't write down why."""
    said = False

    def look() -> bool:
        nonlocal said
        if is_over():
            return True
        if not said and _is_full(job):
            said = True
            print_notice(
                f"The disk of {job.root} is full, and {job.root.name} waits for room to write down what "
                f"happens. Free some space there, or end the job by `insitu stop {job.root.name}`"
            )
        return False

    return look


def _is_full(job: JobPaths) -> bool:
    with contextlib.suppress(OSError):
        found = os.statvfs(job.root)
        # A file system may keep some for root.
        is_root = os.geteuid() == 0
        blocks, files = (found.f_bfree, found.f_ffree) if is_root else (found.f_bavail, found.f_favail)
        return not blocks or (found.f_files > 0 and not files)
    return False
