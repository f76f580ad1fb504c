"""What a supervisor does before a job begins; `tests/process/test_jobs.py` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.cluster.control import supervisor
from insitu.errors import ClusterError
from insitu.paths import JobPaths


def test_a_socket_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: JobPaths) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(supervisor, "listen_for_requests", refuse)
    with pytest.raises(ClusterError, match=r"can't begin.*Operation not permitted\. Set INSITU_HOME"):
        supervisor.open_request_socket(JobPaths(tmp_path))


def test_a_socket_of_a_dead_supervisor_is_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        supervisor.open_request_socket(JobPaths(tmp_path)).close()


def test_the_end_of_a_job_names_the_last_error_of_its_controllers(tmp_path: Path) -> None:
    job = JobPaths(tmp_path / "digits-1")
    job.root.mkdir()
    assert "none wrote why" in supervisor.describe_controller_deaths(job)
    job.controller_log.write_bytes(b"Traceback\n" * 1000 + b"ValueError: no \xff\n\n")
    text = supervisor.describe_controller_deaths(job)
    assert "died 60 times within 60 s: ValueError: no \N{REPLACEMENT CHARACTER}. All" in text
    assert str(job.controller_log) in text and "`insitu resume digits-1`" in text
