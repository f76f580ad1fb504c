"""Making a job: its folder, its defaults, and nothing left of one that could not be made."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from job_runs import Insitu

from insitu.base.config import DeviceSettings
from insitu.base.errors import ClusterError, InputError, JobSpecError, StorageFull, UnknownCache
from insitu.base.paths import JobPaths
from insitu.base.spec import CacheSpec
from insitu.cluster import read_spec, submit
from insitu.cluster.client import submission
from insitu.cluster.job_files.journal import Journal
from insitu.grid import Catalog, import_cache
from insitu.options import JobOptions
from insitu.service import build_job_report


@pytest.fixture
def insitu(tmp_path: Path) -> Insitu:
    insitu = Insitu(tmp_path)
    insitu.script("print('greeting')")
    return insitu


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)


def make(insitu: Insitu, **options: object) -> JobPaths:
    request = JobOptions("data/train", insitu.folder, ("train.py",), **options)  # type: ignore[arg-type]
    return insitu.job(submit(insitu.paths, request))


@pytest.mark.usefixtures("unstarted")
def test_a_job_has_all_that_its_processes_read(insitu: Insitu) -> None:
    job = make(insitu, workers=2, name="n")
    assert job.root.name.startswith("n-")
    assert (job.code / "train.py").read_text() == "print('greeting')"
    assert stat.S_IMODE(job.secret.stat().st_mode) == 0o600 and len(job.secret.read_bytes()) == 32
    assert Journal(job.journal).state().phase == "pending"
    assert Catalog(insitu.paths).pinned_by("data/train") == [job.root.name]
    assert [len(s) for s in json.loads(job.shard_map("data/train").read_text())["shards"]] == [2, 2]
    assert sorted(p.name for p in job.tasks.iterdir()) == ["worker-0", "worker-1"]


@pytest.mark.usefixtures("unstarted")
def test_a_job_uses_the_version_that_is_named(
    insitu: Insitu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = insitu.paths
    monkeypatch.setattr(submission, "clean_up", lambda paths, cache: None)  # would end the other job, too
    Catalog(paths).pin("data/train", 1, "other")
    np.save(tmp_path / "x.npy", np.zeros((6, 2)))
    import_cache(paths, "data/train", [str(tmp_path / "x.npy")], overwrite=True, partitions=4)
    for name, version in (("data/train@1", 1), ("data/train", 2)):
        job = insitu.job(submit(paths, JobOptions(name, insitu.folder, ("train.py",))))
        assert read_spec(job).cache == "data/train" and job.root.name.startswith("data-train-")
        assert job.root.name in Catalog(paths).pinned_by("data/train", version)
        report = build_job_report(job)
        assert (report["cache"], report["cache_version"]) == ("data/train", version)
    with pytest.raises(UnknownCache, match="which has versions 1, 2"):
        submit(paths, JobOptions("data/train@3", insitu.folder, ("train.py",)))


@pytest.mark.usefixtures("unstarted")
def test_what_was_not_asked_for_follows_from_the_rest(
    insitu: Insitu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    spec = read_spec(make(insitu))
    assert (spec.workers, spec.shards, spec.threads, spec.ps) == (1, 1, 8, 0)
    spec = read_spec(make(insitu, workers=2, ps=None))
    assert (spec.shards, spec.threads, spec.ps, spec.name) == (2, 4, 1, "data-train")
    assert read_spec(make(insitu, shards=3, workers=None)).workers == 1


@pytest.mark.parametrize(
    ("cache", "name"),
    [
        ("digits", "digits"),
        ("digits/train", "digits-train"),
        ("a/digits/test", "digits-test"),
        ("a/digits", "digits"),
        ("train", "train"),
    ],
)
def test_a_job_is_named_after_its_cache_and_not_only_after_a_split(cache: str, name: str) -> None:
    spec = CacheSpec(cache, 1, (), (), 0, None, 0.0)
    request = JobOptions(cache, Path("job"), ("train.py",))
    assert submission._choose_name(request, spec) == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "ray"}, "--engine must be local, hosts or k8s. Received: ray"),
        ({"name": "a b"}, "A job's name"),
        ({"workers": 9}, "9"),
        (
            {"workers": 2, "gpus_per_worker": 1},
            r"this machine, of whose 0 GPUs 0 are taken, can give 0 to 2 task",
        ),
        ({"gpus_per_worker": -1}, "--gpus-per-worker must be at least 0"),
        (
            {"workers": 2, "memory_per_worker": 51},
            r"--memory-per-worker 51, in MiB, and this machine has 100 MiB free for 2 tasks",
        ),
        (
            {"workers": 2, "cores_per_worker": 3},
            r"--cores-per-worker 3, and this machine has 5 for 2 tasks",
        ),
        ({"env": ("NOT_SET",)}, "--env names a variable of this shell. Received: NOT_SET, which isn't set"),
    ],
)
def test_what_can_not_be_used_is_refused(
    insitu: Insitu, options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "count_free_gpus", lambda: (0, 0))
    monkeypatch.setattr(submission, "read_available_bytes", lambda: 100 << 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    with pytest.raises(InputError, match=message):
        make(insitu, **options)
    assert not insitu.paths.jobs.exists() or nothing_is_left(insitu)


def nothing_is_left(insitu: Insitu) -> bool:
    return list(insitu.paths.jobs.iterdir()) == [] and Catalog(insitu.paths).pinned_by("data/train") == []


@pytest.mark.parametrize(
    ("step", "error", "expected"),
    [
        ("copy_code", OSError(28, "No space left on device"), StorageFull),
        ("_write", OSError(28, "No space left on device"), StorageFull),
        ("_write", PermissionError(13, "Permission denied"), ClusterError),
        ("start_supervisor", ClusterError("no process"), ClusterError),
        ("resolve_command", JobSpecError("no script"), JobSpecError),
        ("_write", KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_start_that_fails_leaves_nothing(
    insitu: Insitu,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: BaseException,
    expected: type[BaseException],
) -> None:
    called = []

    def fail(*_: object) -> None:
        called.append(step)
        raise error

    monkeypatch.setattr(submission, step, fail)
    with pytest.raises(expected):
        submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=1))
    assert called == [step] and nothing_is_left(insitu)


@pytest.mark.usefixtures("unstarted")
def test_a_job_is_on_disk_before_it_is_visible(insitu: Insitu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut leaves a whole job or none: its files are synced before the folder gets its name."""
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append("jobs" if name == str(insitu.paths.jobs) else name.rpartition("/")[2])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    job = make(insitu)
    assert {"job.json", "placement.json", "secret", "train.py"} <= set(synced)
    assert synced[-1] == "jobs" and synced.index("secret") < len(synced) - 1
    assert job.root.exists()


@pytest.mark.usefixtures("unstarted")
def test_a_job_starts_where_the_memory_of_its_workers_is_free(
    insitu: Insitu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "read_available_bytes", lambda: 100 << 20)
    assert read_spec(make(insitu, workers=2, ps=1, memory_per_worker=50)).memory_per_worker == 50


@pytest.mark.usefixtures("unstarted")
def test_the_processors_of_a_worker_are_its_threads_unless_these_are_given(
    insitu: Insitu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    spec = read_spec(make(insitu, workers=2, cores_per_worker=3))
    assert (spec.cores_per_worker, spec.threads) == (3, 3)
    assert read_spec(make(insitu, workers=2, cores_per_worker=3, threads=1)).threads == 1
    insitu.script("import insitu")  # a chief that trains is one more worker
    spec = read_spec(make(insitu, workers=1, chief=True, cores_per_worker=4))
    assert (spec.workers, spec.threads) == (2, 4)


@pytest.mark.usefixtures("unstarted")
def test_what_the_user_allows_reaches_the_tasks(insitu: Insitu) -> None:
    assert "INSITU_ALLOW_UNAUTHENTICATED" not in read_spec(make(insitu)).settings
    assert read_spec(make(insitu, allow_unauthenticated=True)).settings["INSITU_ALLOW_UNAUTHENTICATED"] == "1"


@pytest.mark.usefixtures("unstarted")
def test_settings_of_the_shell_become_the_jobs(insitu: Insitu, monkeypatch: pytest.MonkeyPatch) -> None:
    """They change its bits. Another shell may resume it, and `insitu describe` says what they are."""
    monkeypatch.setenv("INSITU_VIRTUAL_DEVICES", "4")
    monkeypatch.setenv("INSITU_BACKEND_THREADS", "2,1")
    monkeypatch.setenv("INSITU_ALLOW_UNAUTHENTICATED", "1")
    assert read_spec(make(insitu)).settings == {
        "INSITU_VIRTUAL_DEVICES": "cpu:4",
        "INSITU_BACKEND_THREADS": "2,1",
        "INSITU_ALLOW_UNAUTHENTICATED": "1",
    }
    given = DeviceSettings(virtual_devices=("cpu", 2))
    job = make(insitu, virtual_devices=given.virtual_devices)
    assert read_spec(job).settings["INSITU_VIRTUAL_DEVICES"] == "cpu:2"
    assert "INSITU_VIRTUAL_DEVICES" not in submission.find_inherited_settings(given)
    monkeypatch.setenv("INSITU_VIRTUAL_DEVICES", "many")
    with pytest.raises(InputError, match="many"):
        make(insitu)


def test_files_of_the_environment_are_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"PYTHONPATH": f"src{os.pathsep}/lib", "INSITU_IGNITE_CREDENTIALS": "secret.txt", "OTHER": "x"}
    assert submission.resolve_paths(given) == {
        "PYTHONPATH": f"{tmp_path}/src{os.pathsep}/lib",
        "INSITU_IGNITE_CREDENTIALS": f"{tmp_path}/secret.txt",
        "OTHER": "x",
    }
