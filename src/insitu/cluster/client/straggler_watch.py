"""Samples the progress of a running job to find its stragglers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from insitu.base.paths import JobPaths
from insitu.base.progress import Progress, read_progress
from insitu.base.spec import TaskId
from insitu.cluster.decide import Straggler, find_stragglers


def watch_stragglers(
    job: JobPaths, tasks: Sequence[TaskId], seconds: float = 0.5, pause: float = 0.0005
) -> list[Straggler]:
    """Return the stragglers among `tasks`, from their progress records over some seconds."""
    samples: list[Mapping[TaskId, Progress | None]] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        samples.append({task: read_progress(job.progress(task)) for task in tasks})
        if not any(record and record.step >= 0 for record in samples[-1].values()):
            return []
        time.sleep(pause)
    return find_stragglers(samples)
