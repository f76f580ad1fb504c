"""The reservation: an actor of Ray that has the GPUs and processors of one job on one node, so that Ray gives
them to nobody else.

It outlives who has made it, and ends by itself once the process that runs the job's tasks there has ended,
however that ends: it watches the lock that this process holds.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from insitu.cluster.agents.ray_holder import RAYLET_ENV, read_environment
from insitu.cluster.job_files import is_locked
from insitu.paths import HOME_ENV, Paths
from insitu.processes import identify_process

POLL_SECONDS = 1.0
BEGIN_SECONDS = 60.0
"""Seconds within which the process that is watched begins."""
END_SECONDS = 10.0
"""Seconds without that process after which all is free again: another one may take its place."""


class Reservation:
    """What Ray runs. Ray says which GPUs it has been given."""

    def __init__(self, job: str, node: str, cores: int) -> None:
        self._cores = cores
        environment = read_environment(identify_process(int(os.environ.get(RAYLET_ENV) or 0)))
        home = Path(environment.get(HOME_ENV) or "~/.insitu").expanduser().absolute()
        lock = Paths(home).job(job).engine_lock(node)
        threading.Thread(target=_end_after, args=(lock,), daemon=True).start()

    def read(self) -> tuple[list[str], int]:
        """Return Ray's ids of the GPUs, and the number of processors."""
        import ray

        return [str(each) for each in ray.get_gpu_ids()], self._cores


def _end_after(lock: Path) -> None:
    """End this process once nobody holds the lock any more."""
    watch_lock(lock)
    os._exit(0)


def watch_lock(
    lock: Path, begin: float = BEGIN_SECONDS, end: float = END_SECONDS, pause: float = POLL_SECONDS
) -> None:
    """Return once nobody has held the lock for `end` seconds, or for `begin` seconds from the start."""
    until = time.monotonic() + begin
    while time.monotonic() < until:
        if is_locked(lock):
            until = time.monotonic() + end
        time.sleep(pause)
