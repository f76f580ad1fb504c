"""A job's specification and placement, read back from its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from job_runs import Insitu

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.base.process.processes import read_host
from insitu.base.spec import NodeId, TaskId
from insitu.cluster import submit
from insitu.cluster.client import submission
from insitu.cluster.job_files.records import has_checkpoint, read_environment, read_placement, read_spec
from insitu.options import JobOptions


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPaths:
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    insitu = Insitu(tmp_path)
    insitu.script("")
    return insitu.job(submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=2)))


def test_what_start_wrote_is_read_back(job: JobPaths) -> None:
    spec = read_spec(job)
    assert (spec.job_id, spec.cache, spec.command, spec.workers) == (
        job.root.name,
        "data/train",
        ("train.py",),
        2,
    )
    placement, cache = read_placement(job)
    assert [(t.task, t.shards) for t in placement.tasks] == [
        (TaskId("worker", 0), (0,)),
        (TaskId("worker", 1), (1,)),
    ]
    assert placement.home_nodes == (NodeId("node-0"),) * 2
    assert (cache.name, len(cache.partitions)) == ("data/train", 4)


def test_what_a_job_was_started_in_is_its_owner_s_alone(
    job: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = read_environment(job)
    assert kept.variables["PATH"] == os.environ["PATH"] and kept.host == read_host()
    assert kept.versions["python"] and kept.keras["floatx"] and kept.job_dir.endswith("job")
    assert job.environment.stat().st_mode & 0o777 == 0o600
    for text in ("{", "[]", "{}"):
        job.environment.write_text(text)
        with pytest.raises(ClusterError, match="variables that the job was started with can't be read"):
            read_environment(job)


def test_a_checkpoint_that_is_half_written_is_none(job: JobPaths) -> None:
    assert not has_checkpoint(job)
    for name in (".staging-1-0", "epoch-00001.step-00000000"):
        folder = job.checkpoints / "fit-00000" / name
        folder.mkdir(parents=True)
        (folder / "state.json").touch()
        assert has_checkpoint(job) == (not name.startswith("."))


@pytest.mark.parametrize("change", ["missing", "no JSON", "no job", "a task of no role", "a list", "nested"])
def test_a_folder_that_holds_no_job_is_an_error_with_its_path(job: JobPaths, change: str) -> None:
    if change == "missing":
        job.spec.unlink()
        job.placement.unlink()
    elif change == "a task of no role":
        data = json.loads(job.placement.read_text())
        data["tasks"][0]["task"] = "boss:0"
        job.placement.write_text(json.dumps(data))
        job.spec.write_text(json.dumps({**json.loads(job.spec.read_text()), "job_id": "a b"}))
    else:
        for path in (job.spec, job.placement):
            path.write_text({"no JSON": "{", "a list": "[]", "nested": "[" * 100_000}.get(change, "{}"))
    with pytest.raises(ClusterError, match=r"specification.*Start a new job") as error:
        read_spec(job)
    assert error.value.logs == str(job.spec)
    with pytest.raises(ClusterError, match=r"placement.*Start a new job") as error:
        read_placement(job)
    assert error.value.logs == str(job.placement)
