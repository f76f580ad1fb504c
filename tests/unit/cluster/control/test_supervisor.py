"""What a supervisor does before a job begins; `tests/process/test_jobs.py` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.cluster.control import supervisor
from insitu.paths import JobPaths


def test_a_job_whose_socket_cannot_be_made_says_so_in_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: JobPaths) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(supervisor, "listen_for_requests", refuse)
    assert supervisor.open_request_socket(JobPaths(tmp_path)) is None
    text = (tmp_path / "output.log").read_text()
    assert text.startswith("[insitu] the job can't begin") and "Set INSITU_HOME" in text
    assert "Operation not permitted" in text and "the job can't begin" in capsys.readouterr().err


def test_a_socket_of_a_dead_supervisor_is_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        listener = supervisor.open_request_socket(JobPaths(tmp_path))
        assert listener is not None
        listener.close()
    assert not (tmp_path / "output.log").exists()
