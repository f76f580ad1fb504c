"""`insitu delete`: caches and jobs, and what is refused as a whole."""

from __future__ import annotations

import functools
import json

import command_line
import pytest
from job_runs import Insitu

from insitu.base.errors import InputError, JobRunning, UnknownJob
from insitu.base.paths import JobPaths
from insitu.cli import console, delete
from insitu.cluster import list_job_ids, submit
from insitu.cluster.client import deletion
from insitu.cluster.job_files import take_lock
from insitu.grid import Catalog
from insitu.options import JobOptions


@pytest.fixture
def job(insitu: Insitu) -> JobPaths:
    """A job of which nothing runs any more; its pin is still there."""
    return insitu.job(submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",))))


run = functools.partial(command_line.run, "delete")


def test_a_job_and_its_cache_go_together(insitu: Insitu, job: JobPaths):
    assert Catalog(insitu.paths).pinned_by("data/train") == [job.root.name]
    found = json.loads(run("data/train", job.root.name, "--yes", "--json").stdout)
    assert [(entry["kind"], entry["name"]) for entry in found] == [
        ("job", job.root.name),
        ("cache", "data/train"),
    ]
    assert found[0]["bytes"] > 0 and found[1]["bytes"] == 400
    assert list_job_ids(insitu.paths) == [] and list(insitu.paths.jobs.iterdir()) == []
    assert Catalog(insitu.paths).stored() == []


def test_a_job_that_runs_keeps_all(insitu: Insitu, job: JobPaths, monkeypatch: pytest.MonkeyPatch):
    lock = take_lock(job.controller)
    with pytest.raises(InputError, match="A job that runs can't be deleted"):
        run("data/train", job.root.name, "--yes")
    with pytest.raises(InputError, match=f"used by {job.root.name}"):
        run("data/train", "--yes")
    # One that is resumed between the look and the deletion.
    monkeypatch.setattr(deletion, "is_running", lambda job: False)
    with pytest.raises(JobRunning, match="the job runs"):
        deletion.delete_job(insitu.paths, job)
    assert lock and job.spec.exists() and Catalog(insitu.paths).get("data/train")


def test_a_name_that_nothing_has_deletes_nothing(insitu: Insitu, job: JobPaths):
    with pytest.raises(UnknownJob, match="No cache is called"):
        run("data/train", "nothing", "--yes")
    assert job.spec.exists() and Catalog(insitu.paths).get("data/train")


def test_the_beginning_of_an_id_deletes_nothing(insitu: Insitu, job: JobPaths):
    """It may be the name of a cache that is gone."""
    beginning = job.root.name.partition("-")[0]
    with pytest.raises(InputError, match=f"Received: {beginning}, .*`insitu delete {job.root.name}`"):
        run(beginning, "data/train", "--yes")
    assert job.spec.exists() and Catalog(insitu.paths).get("data/train")


def test_it_asks_first(insitu: Insitu, job: JobPaths, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"Give --yes to delete"):
        run("data/train", job.root.name)
    asked = []
    monkeypatch.setattr(console.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr(console.typer, "confirm", lambda text, **_: asked.append(text))
    delete.delete_command([job.root.name])
    assert asked == [f"Delete {job.root.name}?"] and not job.root.exists()


def test_a_job_whose_journal_is_damaged_goes_too(insitu: Insitu, job: JobPaths):
    job.journal.write_bytes(b"no journal")
    assert run(job.root.name, "--yes").exit_code == 0
    assert not job.root.exists()
