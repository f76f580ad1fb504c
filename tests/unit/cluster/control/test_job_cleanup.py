"""Jobs that died with their maker or their machine are cleaned up by the next start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from foreign_user import needs_root, open_folder, run_as
from job_runs import Insitu

from insitu.cluster import read_status, submit
from insitu.cluster.client import submission
from insitu.cluster.control import job_cleanup
from insitu.cluster.control.job_cleanup import clean_up, finalize_job, staged_folder
from insitu.cluster.decide.events import (
    SubmittedEvent,
)
from insitu.cluster.decide.job import advance
from insitu.cluster.job_files.journal import Journal
from insitu.cluster.job_files.lock import take_lock
from insitu.grid import Catalog
from insitu.options import JobOptions


def test_what_a_job_of_another_home_uses_is_kept_where_etcd_has_the_catalogue(insitu: Insitu) -> None:
    catalog = Catalog(insitu.paths)
    catalog.pin("data/train", 1, "job-of-another-head")
    insitu.paths.metadata_settings.touch()
    clean_up(insitu.paths, "data/train")
    assert catalog.pinned_by("data/train") == ["job-of-another-head"]
    insitu.paths.metadata_settings.unlink()
    clean_up(insitu.paths, "data/train")
    assert catalog.pinned_by("data/train") == []


@pytest.fixture
def insitu(tmp_path: Path) -> Insitu:
    insitu = Insitu(tmp_path)
    insitu.script("print('greeting')")
    return insitu


def make_job(insitu: Insitu, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job whose controller never came to life."""
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    return submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=1))


def test_a_job_that_died_with_its_machine_is_finalized(
    insitu: Insitu, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = insitu.job(make_job(insitu, monkeypatch))
    journal = Journal(job.journal)
    state, actions = advance(journal.state(), SubmittedEvent(), 1.0)
    journal.record(1.0, SubmittedEvent(), actions, state)
    assert Catalog(insitu.paths).pinned_by("data/train") == [job.root.name]
    assert read_status(job).state.phase == "failed"  # seen as such before it is written down

    (job.memory / "worker-1").mkdir(parents=True)  # in /dev/shm

    clean_up(insitu.paths, "data/train")

    assert not job.memory.exists()
    assert journal.state().phase == "failed"
    assert "insitu resume" in job.output.read_text()
    assert Catalog(insitu.paths).pinned_by("data/train") == []


def test_the_reason_why_a_job_ended_is_recorded(insitu: Insitu, monkeypatch: pytest.MonkeyPatch) -> None:
    job = insitu.job(make_job(insitu, monkeypatch))
    finalize_job(job, "its socket can't be made")
    assert read_status(job).state.reason == "its socket can't be made"
    assert "job failed with exit code 1: its socket can't be made" in job.output.read_text()

    finalize_job(job, "nor can it the second time")  # a resume that fails before it begins
    assert read_status(job).state.reason == "its socket can't be made"
    assert job.output.read_text().endswith("[insitu] nor can it the second time\n")


def test_a_job_whose_supervisor_is_lost_is_left_to_the_head(
    insitu: Insitu, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = insitu.job(make_job(insitu, monkeypatch))
    job.lease.write_text("[1, 2, 3.0]")
    monkeypatch.setattr(job_cleanup, "is_in_etcd", lambda paths: True)
    clean_up(insitu.paths, "data/train")
    assert Journal(job.journal).state().phase == "pending"
    assert Catalog(insitu.paths).pinned_by("data/train") == [job.root.name]


def test_a_job_that_runs_is_left_alone(insitu: Insitu, monkeypatch: pytest.MonkeyPatch) -> None:
    job = insitu.job(make_job(insitu, monkeypatch))
    lock = take_lock(job.controller)
    clean_up(insitu.paths, "data/train")
    os.close(lock)
    assert Journal(job.journal).state().phase == "pending"
    assert Catalog(insitu.paths).pinned_by("data/train") == [job.root.name]


def test_a_half_made_job_goes_once_its_maker_is_dead(insitu: Insitu) -> None:
    dead, living, young = (staged_folder(insitu.paths, name) for name in ("dead-1", "living-1", "young-1"))
    for staged in (dead, living, young):
        staged.root.mkdir(parents=True)
    lock = take_lock(living.controller)
    for staged in (dead, living):
        os.utime(staged.root, (0, 0))
    clean_up(insitu.paths, "data/train")
    os.close(lock)
    assert [p.name for p in sorted(insitu.paths.jobs.iterdir())] == [".living-1", ".young-1"]


def test_a_pin_of_a_job_that_is_gone_is_dropped(insitu: Insitu) -> None:
    Catalog(insitu.paths).pin("data/train", 1, "gone-1")
    clean_up(insitu.paths, "data/train")
    assert Catalog(insitu.paths).pinned_by("data/train") == []


def test_half_written_files_of_killed_tasks_go_and_those_of_the_script_stay(
    insitu: Insitu, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = insitu.job(make_job(insitu, monkeypatch))
    staged = ".reads.json.16841.6ae9fb4e"
    left, kept = job.root / "tasks" / "worker-1" / staged, job.code / staged
    for path in (left, kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{")
    finalize_job(job)
    assert not left.exists() and kept.exists()


def test_a_job_of_another_host_is_never_finalized(insitu: Insitu, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some file systems that hosts share, its lock is seen on its own host alone."""
    job = insitu.job(make_job(insitu, monkeypatch))
    job.controller.write_text(json.dumps({"host": "far-1", "pid": os.getpid(), "start": 1}))
    staged = staged_folder(insitu.paths, "made-there-1")
    staged.root.mkdir()
    staged.controller.write_text(json.dumps({"host": "far-1"}))
    os.utime(staged.root, (0, 0))

    clean_up(insitu.paths, "data/train")

    assert Journal(job.journal).state().phase == "pending"
    assert Catalog(insitu.paths).pinned_by("data/train") == [job.root.name]
    assert staged.root.exists()
    status = read_status(job)
    assert status.running and status.state.phase == "pending"


@needs_root
def test_a_job_of_another_user_is_left_alone(insitu: Insitu, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in open_folder():
        shared = Insitu(folder)
        shared.script("print('greeting')")
        job = shared.job(make_job(shared, monkeypatch))
        shared.paths.home.chmod(0o3777)
        for path in (shared.paths.catalog, shared.paths.jobs):
            path.chmod(0o1777)
        assert run_as(lambda shared=shared: clean_up(shared.paths, "data/train")) == "None"
        assert Catalog(shared.paths).pinned_by("data/train") == [job.root.name]
