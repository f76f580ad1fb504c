"""The files that tasks write about themselves, and the roster."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.base.progress import ProgressWriter
from insitu.base.roster import Member, Roster, read_roster
from insitu.base.spec import TaskId
from insitu.cluster.decide.job_state import Failure
from insitu.cluster.engines.task_files import TaskFiles

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)
ROSTER = Roster(3, (Member(W0, 2, "127.0.0.1:20000", (0, 1)),))


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    job = JobPaths(tmp_path / "job")
    job.root.mkdir()
    return job


def test_records_are_read_until_they_are_cleared(job: JobPaths):
    files = TaskFiles(job)
    files.clear_records([W0, W1])
    assert files.read_progress([W0, W1]) == {} and files.read_failure(W0) is None

    writer = ProgressWriter(job.progress(W0))
    writer.write(1, 2, 3, "exchange")
    writer.close()
    failure = Failure("ValueError", "no", "abc", peer_lost=True)
    job.failure(W0).write_text(
        json.dumps({"type": "ValueError", "message": "no", "fingerprint": "abc", "peer_lost": True})
    )
    found = files.read_progress([W0, W1])
    assert list(found) == [W0]
    assert (found[W0].epoch, found[W0].step, found[W0].rows, found[W0].place) == (1, 2, 3, "exchange")
    assert files.read_failure(W0) == failure and files.read_failure(W1) is None

    files.clear_records([W0, W1])
    assert files.read_progress([W0]) == {} and files.read_failure(W0) is None


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_a_full_disk_is_named_where_a_task_could_not_say_why_it_ended(
    job: JobPaths, monkeypatch: pytest.MonkeyPatch, free: int
):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    files = TaskFiles(job)
    files.clear_records([W0, W1])
    job.failure(W1).write_text('{"type": "ValueError", "message": "no", "fingerprint": "abc"}')
    failure = files.read_failure(W0)
    assert (failure is not None) == (free == 0)
    if failure is not None:
        assert str(job.root) in failure.message and f"insitu resume {job.root.name}" in failure.message
        assert (failure.fingerprint, failure.peer_lost, failure.final) == ("", False, False)
    assert files.read_failure(W1) == Failure("ValueError", "no", "abc")


def test_the_roster_is_what_tasks_read(job: JobPaths):
    TaskFiles(job).publish_roster(ROSTER)
    assert read_roster(job.roster) == ROSTER


def test_a_folder_that_is_not_there_is_an_error_of_the_cluster(tmp_path: Path):
    (tmp_path / "job").write_text("a file")
    files = TaskFiles(JobPaths(tmp_path / "job"))
    with pytest.raises(ClusterError):
        files.publish_roster(ROSTER)
    with pytest.raises(ClusterError):
        files.clear_records([W0])
