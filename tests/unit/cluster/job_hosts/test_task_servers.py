"""Folders of jobs on an agent's host. tests/process/test_host_jobs.py runs what they are for."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from insitu.base.disk.access import make_sticky_folder
from insitu.base.errors import ClusterError
from insitu.base.paths import Paths
from insitu.base.process.processes import identify_process, read_boot, read_host
from insitu.base.spec import NodeId
from insitu.cluster.client.status import list_job_ids
from insitu.cluster.job_hosts import task_servers
from insitu.cluster.job_hosts.host_server import is_whole_job, remove_copy, take_engine_lock

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


def test_the_folder_of_a_host_is_none_of_a_head_that_etcd_has_put_there(paths: Paths) -> None:
    """It was taken for the supervisor's, so the job couldn't be brought, and its tasks sent nothing back."""
    job = paths.job("mine")
    paths.node(NODE).mkdir(parents=True)
    os.close(take_engine_lock(paths, NODE, job))
    paths.head.touch()
    assert is_whole_job(paths, job)  # a head whose record is lost
    paths.metadata_settings.touch()
    assert not is_whole_job(paths, job) and list_job_ids(paths) == []
    with subprocess.Popen(["sleep", "600"]) as process:
        lock = {"path": str(job.engine_lock(NODE).resolve()), "host": read_host(), "boot": read_boot()}
        own = identify_process(process.pid)
        assert own is not None
        job.engine_lock(NODE).write_text(json.dumps(lock | {"pid": own.pid, "start": own.start}))
        with job.engine_lock(NODE).open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            task_servers.remove_host_copy(paths, job)
    assert not job.root.exists() and process.returncode == -signal.SIGKILL
    task_servers.remove_host_copy(paths, job)
    job.root.mkdir()
    job.spec.touch()
    task_servers.remove_host_copy(paths, job)
    assert is_whole_job(paths, job) and list_job_ids(paths) == ["mine"]
