"""The socket in a job's folder."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from insitu.base.paths import JobPaths
from insitu.cluster.job_files.request_socket import (
    connect_for_requests,
    is_from_owner,
    listen_for_requests,
)


def make_job(folder: Path) -> JobPaths:
    folder.mkdir(parents=True)
    return JobPaths(folder)


@pytest.mark.parametrize("length", [10, 130, 200])
def test_a_folder_may_have_a_long_name(tmp_path: Path, length: int) -> None:
    job = make_job(tmp_path / ("x" * length))
    with (
        listen_for_requests(job) as listener,
        connect_for_requests(job, 1.0) as ours,
        listener.accept()[0] as its,
    ):
        ours.sendall(b"hello")
        assert its.recv(5) == b"hello"
        assert is_from_owner(its)
    assert stat.S_IMODE(job.requests.stat().st_mode) == 0o600


def test_a_socket_that_a_dead_supervisor_left_is_replaced(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    listen_for_requests(job).close()
    with pytest.raises(ConnectionRefusedError):
        connect_for_requests(job, 1.0)
    with listen_for_requests(job), connect_for_requests(job, 1.0):
        pass


def test_without_a_socket_nobody_is_reached(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        connect_for_requests(make_job(tmp_path / "job"), 1.0)
