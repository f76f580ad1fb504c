"""The search of hyper-parameters in examples/search. Run by `make test-track`, which installs Optuna."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job_runs import JOB_PATIENCE, insitu_at, wait_for

SEARCH = Path(__file__).parents[2] / "examples" / "search" / "search.py"
optuna = pytest.importorskip("optuna")


@pytest.mark.long
def test_a_search_that_is_killed_is_taken_up_with_its_job(tmp_path: Path) -> None:
    with insitu_at(tmp_path) as insitu:
        environment = insitu.environment | {"KERAS_BACKEND": "jax"}
        command = [sys.executable, str(SEARCH), "--trials", "3", "--epochs", "4"]
        with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL) as search:
            wait_for("a job", lambda: insitu.json("ps", "--all"), JOB_PATIENCE)
            storage = f"sqlite:///{tmp_path}/search.db"

            def has_job() -> bool:
                trials = optuna.load_study(study_name="circle", storage=storage).trials
                return "job" in trials[0].user_attrs

            wait_for("its trial", has_job, JOB_PATIENCE)
            os.kill(search.pid, signal.SIGKILL)
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("trial 0 is taken up")
        best = re.search(r"best: trial \d+ \((trial-\d+-\w+)\), val_accuracy ([\d.]+)", done.stdout)
        assert best and float(best[2]) > 0.6, done.stdout
        jobs = insitu.json("ps", "--all")
        assert len(jobs) == 3 and best[1] in {job["job_id"] for job in jobs}
        trials = optuna.load_study(study_name="circle", storage=storage).trials
        assert [each.number for each in trials] == [0, 1, 2]
        assert {job["state"] for job in jobs} <= {"finished", "stopped"}
