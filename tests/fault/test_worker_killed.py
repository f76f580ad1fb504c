"""A worker is killed in the middle of training: it alone is replaced, and the job ends with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
from training_jobs import assert_every_row_once


@pytest.mark.timeout(400)
def test_sigkill_changes_nothing(two_workers: Any):
    jobs, _, undisturbed = two_workers
    options = ("--workers", "2", "--threads", "1", "--standby", "1")
    job, results = jobs.run(*options, backup=3, kill_at=["worker:1", 2, 4])
    assert jobs.injected.read_text() == "worker:1"
    (recovery,) = job["recoveries"]
    assert (recovery["how"], recovery["tasks"], recovery["generation"]) == ("replaced", ["worker:1"], 2)
    assert "SIGKILL" in recovery["text"] and recovery["seconds"] > 0
    assert job["attempt"] == 1
    assert [task["attempt"] for task in job["task_list"]] == [1, 2]
    assert results == undisturbed
    assert_every_row_once(job, epochs=4)
    survivor, replacement = (task["progress"]["rows"] for task in job["task_list"])
    # The survivor fed all its rows once, the replacement none of the steps that were done.
    assert survivor + replacement < 4 * job["ledger"][0]["expected"]
    assert replacement < survivor / 2
