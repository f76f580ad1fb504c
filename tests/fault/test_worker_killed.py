"""A worker is killed in the middle of training: the job goes on and ends with the same bits."""

from __future__ import annotations

from pathlib import Path

from training_jobs import TrainingJobs, assert_every_row_once


def test_sigkill_changes_nothing(tmp_path: Path):
    jobs = TrainingJobs(tmp_path, nodes=2)
    _, undisturbed = jobs.run("--workers", "2", "--threads", "1")
    job, results = jobs.run("--workers", "2", "--threads", "1", backup=3, kill_at=["worker:1", 2, 4])
    assert jobs.injected.read_text() == "worker:1"
    assert job["attempt"] == 2
    assert "SIGKILL" in job["attempts"][0]["cause"]["text"]
    assert job["attempts"][0]["cause"]["task"] == "worker:1"
    assert results == undisturbed
    assert_every_row_once(job, epochs=4)
    # The second attempt began in the middle of the third epoch, not at the start.
    assert max(task["progress"]["rows"] for task in job["task_list"]) < 2 * job["ledger"][0]["expected"]
