"""Runs a script of recovery_jobs/ as a job of two workers, one thread each, and reads what it measured."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np

from insitu.base.errors import JobEnded
from insitu.base.paths import Paths
from insitu.cluster import Request, is_running, stop_job, submit
from insitu.grid import import_cache

SCRIPTS = Path(__file__).parent / "recovery_jobs"
PATIENCE = 170.0
CACHE = "bench/rows"


@contextlib.contextmanager
def home(rows: int = 2048) -> Iterator[Paths]:
    """A place for jobs with a cache of random images, as long as it is needed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        paths = Paths(Path(folder) / "home")
        os.environ["INSITU_HOME"] = str(paths.home)
        x = np.random.default_rng(0).random((rows, 784), dtype=np.float32)
        np.savez(Path(folder) / "rows.npz", x=x, label=np.arange(rows) % 10)
        import_cache(paths, CACHE, [str(Path(folder) / "rows.npz")])
        yield paths


def run_job(
    paths: Paths,
    script: str,
    *,
    request: dict[str, Any] | None = None,
    patience: float = PATIENCE,
    **options: Any,
) -> Any:
    """What worker 0 of a job that runs `script` with these options has measured. `request` are options of
    `insitu start`; the job may take `patience` seconds."""
    out = paths.home / "figures.json"
    out.unlink(missing_ok=True)
    told = {"cache": CACHE, "out": str(out), "pin": True, **options}
    asked = {"workers": 2, "threads": 1, "standby": 0, "max_restarts": 0, **(request or {})}
    job = paths.job(submit(paths, Request(CACHE, SCRIPTS, (script, json.dumps(told)), **asked)))
    deadline = time.monotonic() + patience
    try:
        while is_running(job) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        # Asked twice it kills at once.
        for _ in range(2):
            with contextlib.suppress(JobEnded):
                stop_job(job)
    if not out.exists():
        raise common.Unavailable(f"the job has failed: {job.output.read_text()[-2000:]}")
    return json.loads(out.read_text())
