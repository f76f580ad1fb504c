"""Which jobs there are."""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from foreign_user import needs_root, open_folder, run_as

from insitu.base.errors import UnknownJob
from insitu.base.paths import Paths
from insitu.base.progress import ProgressWriter
from insitu.base.spec import JobSpec, NodeId, TaskId, TaskSpec
from insitu.cluster.client.status import BrokenJob, find_job, list_job_ids, list_jobs, read_status
from insitu.cluster.decide.job import new_job
from insitu.cluster.job_files.journal import Journal

W0 = TaskId("worker", 0)


def test_jobs_are_found_by_the_beginning_of_their_id(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    assert list_job_ids(paths) == []
    for name in ("digits-aa11", "digits-aa11b", "digits-bb22", ".staged"):
        (paths.jobs / name).mkdir(parents=True)
    assert find_job(paths, "digits-b").root.name == "digits-bb22"
    assert find_job(paths, "digits-aa11").root.name == "digits-aa11"
    with pytest.raises(UnknownJob, match="could be any of these") as ambiguous:
        find_job(paths, "digits")
    assert ambiguous.value.matches == ("digits-aa11", "digits-aa11b", "digits-bb22")
    assert pickle.loads(pickle.dumps(ambiguous.value)).matches == ambiguous.value.matches
    with pytest.raises(UnknownJob, match="Did you mean digits-bb22"):
        find_job(paths, "digit-bb22")
    for text in ("", ".staged", "../x"):
        with pytest.raises(UnknownJob):
            find_job(paths, text)


@pytest.mark.parametrize("name", [b"a b", b"-x", b"\xc3\xa9", b"\xff", b"x" * 101, b"new\nline", b".staged"])
def test_a_folder_that_no_job_can_have_made_is_passed_over(tmp_path: Path, name: bytes) -> None:
    paths = Paths(tmp_path)
    os.makedirs(os.path.join(os.fsencode(paths.jobs), name))
    assert list_job_ids(paths) == [] == list_jobs(paths, all_jobs=True)


@pytest.mark.parametrize("spec", [None, "{}", "no JSON", '{"job_id": "a b", "command": []}'])
def test_a_folder_without_a_job_is_listed_as_broken(tmp_path: Path, spec: str | None) -> None:
    paths = Paths(tmp_path)
    job = paths.job("broken-1")
    job.root.mkdir(parents=True)
    Journal(job.journal).create(new_job([TaskSpec(TaskId("worker", 0), NodeId("node-0"))], 0))
    if spec is not None:
        job.spec.write_text(spec)
    job.output.touch()
    (found,) = list_jobs(paths, all_jobs=True)
    assert isinstance(found, BrokenJob) and "specification can't be read" in found.reason
    assert list_jobs(paths) == []


def test_a_journal_that_holds_no_state_makes_a_broken_job(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    job = paths.job("broken-1")
    job.root.mkdir(parents=True)
    Journal(job.journal).create(new_job([], 0))
    with closing(sqlite3.connect(job.journal)) as connection, connection:
        connection.execute("UPDATE entries SET state = '{\"tasks\": 1}'")
    (found,) = list_jobs(paths, all_jobs=True)
    assert isinstance(found, BrokenJob) and "journal" in found.reason


def test_behind_the_last_step_of_an_epoch_that_step_is_shown(tmp_path: Path) -> None:
    task = TaskId("worker", 0)
    job = Paths(tmp_path).job("j-1")
    job.task(task).mkdir(parents=True)
    job.spec.write_text(json.dumps(JobSpec("j-1", "j", "-", ("train.py",), 1, 1).to_json()))
    Journal(job.journal).create(new_job([TaskSpec(task, NodeId("node-0"), (0,))], 0))
    job.output.touch()
    writer = ProgressWriter(job.progress(task))
    writer.steps_over = True
    writer.write(1, 18, 100, "forward")
    assert read_status(job).steps == (1, 17)
    writer.steps_over = False
    writer.write(1, 18, 100, "gradient")
    assert read_status(job).steps == (1, 18)
    writer.close()


@needs_root
def test_a_job_of_another_user_is_named(tmp_path: Path) -> None:
    for folder in open_folder():
        paths = Paths(folder)
        (paths.jobs / "theirs-1").mkdir(parents=True)
        paths.jobs.chmod(0o755)
        (paths.jobs / "theirs-1").chmod(0o700)
        assert run_as(lambda paths=paths: find_job(paths, "theirs")).startswith(
            "InputError: A job can be used by"
        )
        assert run_as(lambda paths=paths: list_jobs(paths)) == "[]"
        assert "a job of another user" in run_as(lambda paths=paths: list_jobs(paths, all_jobs=True))
