"""Folders of jobs on an agent's host. tests/process/test_host_jobs.py runs what they are for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from insitu.access import make_sticky_folder
from insitu.cluster.agents import task_servers
from insitu.cluster.agents.host_server import remove_copy, take_engine_lock
from insitu.errors import ClusterError
from insitu.paths import Paths
from insitu.spec import NodeId

NODE = NodeId("a")


@pytest.fixture
def paths(home: Path) -> Paths:
    found = Paths(home)
    make_sticky_folder(home, found.jobs)
    return found


def test_what_a_killed_server_has_left_is_removed(paths: Paths) -> None:
    job = paths.job("mine")
    os.close(take_engine_lock(paths, NODE, job))
    assert task_servers.list_engine_jobs(paths, NODE) == [job]
    task_servers.sweep_jobs(paths, NODE)
    assert not job.root.exists()


def test_a_job_of_a_head_that_was_in_this_home_stays_whole(paths: Paths) -> None:
    """An agent that came up there, after `insitu down --force`, removed it with its checkpoints."""
    job = paths.job("mine")
    job.checkpoints.mkdir(parents=True)
    job.root.chmod(0o700)
    job.spec.touch()
    os.close(take_engine_lock(paths, NODE, job))
    task_servers.sweep_jobs(paths, NODE)
    assert job.spec.exists() and job.checkpoints.exists() and not job.engine_lock(NODE).exists()
    os.close(take_engine_lock(paths, NODE, job))
    remove_copy(paths, NODE, job)
    assert job.spec.exists() and job.checkpoints.exists() and not job.engine_lock(NODE).exists()


def test_jobs_of_other_members_of_a_shared_home_are_left_alone(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their folders can't be looked into: the agent didn't start."""
    job = paths.job("theirs")
    os.close(take_engine_lock(paths, NODE, job))
    with monkeypatch.context() as patch:
        other = job.root.stat().st_uid + 1
        patch.setattr(os, "geteuid", lambda: other)
        task_servers.sweep_jobs(paths, NODE)
    assert job.root.exists()


@pytest.mark.parametrize("made", ["open", "link"])
def test_a_job_does_not_run_in_a_folder_that_others_have_made(
    paths: Paths, made: str, tmp_path: Path
) -> None:
    """A member of a shared home sees the job's name, and may be first: its code would be run."""
    job = paths.job("mine")
    if made == "open":
        job.root.mkdir()
        job.root.chmod(0o777)
    else:
        (tmp_path / "theirs").mkdir()
        job.root.symlink_to(tmp_path / "theirs")
    with pytest.raises(ClusterError, match="only its user may write there"):
        take_engine_lock(paths, NODE, job)
