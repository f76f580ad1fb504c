"""A worker dies while all train as one program over the devices of all."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from backend_checks import DEADLINE, RUNS, result_of, start_tasks

pytest.importorskip("jax")


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE)
def test_the_survivor_names_the_lost_and_does_not_wait(tmp_path: Path):
    first, second = start_tasks("jax", tmp_path, 2, "lose", RUNS.with_name("mesh_runs.py"))
    try:
        # Far below the week that a task which is done waits for the others.
        assert result_of(first) == {"lost": "worker:1"}
        assert second.wait(timeout=60) == -signal.SIGKILL
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
