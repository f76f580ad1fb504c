"""A worker is killed in the middle of data that every process reads by itself: it alone is replaced, takes
the data up where the others are, and the job ends with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
from training_jobs import TrainingJobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
OPTIONS = ("--workers", "2", "--threads", "1", "--standby", "1")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> TrainingJobs:
    return TrainingJobs(tmp_path_factory.mktemp("streams"), 2)


@pytest.fixture(scope="module", params=["arrays", "tf.data", "PyDataset"])
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(jobs: TrainingJobs, kind: str) -> list[Any]:
    _, results = jobs.run(*OPTIONS, kind=kind)
    assert results[0] == results[1]
    return results


@pytest.mark.parametrize("batch", [2, "test 0"])
def test_a_killed_worker_changes_nothing(
    jobs: TrainingJobs, undisturbed: list[Any], kind: str, batch: Any
) -> None:
    job, results = jobs.run(*OPTIONS, kind=kind, kill_at=["worker:1", 2, batch])
    assert jobs.injected.read_text() == "worker:1"
    assert [(each["how"], each["tasks"]) for each in job["recoveries"]] == [("replaced", ["worker:1"])], job
    assert results == undisturbed
