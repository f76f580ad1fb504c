"""What all tests share. Set before any backend is imported: threads and logs as in a job's tasks."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from left_open import LeftOpen

from insitu.base.paths import Paths

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
for _name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
    os.environ.setdefault(_name, "1")
# Files that tests write by hand have the modes of most machines: others may read them, and not write.
os.umask(0o022)

# An example may take as long as a loaded machine needs.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    **({} if os.access(os.curdir, os.W_OK) else {"database": None}),
)
# Chance is for those who look for defects. What decides about a change tries the same each time.
settings.register_profile("fixed", settings.get_profile("patient"), derandomize=True, database=None)
settings.load_profile(os.environ.get("TEST_EXAMPLES", "patient"))

LEFT_OPEN = LeftOpen() if os.environ.get("TEST_LEFT_OPEN") == "refuse" else None
if LEFT_OPEN:
    LEFT_OPEN.watch()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from the objects of modules and tests, a million that all stay: each pass
    over them takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Fail at the end of a run where a test has left a socket or a process, in runs that ask for it by
    TEST_LEFT_OPEN=refuse. At exit that would be only a warning."""
    yield
    if LEFT_OPEN and (left := LEFT_OPEN.find()):
        pytest.fail("left open by tests:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of its own for each test, and no trace of a job around it."""
    forget_settings(monkeypatch)
    path = tmp_path / "home"
    monkeypatch.setenv("INSITU_HOME", str(path))
    yield path
    for folder in (path / "nodes").glob("*"):
        shutil.rmtree(Paths(path).file_memory(folder.name), ignore_errors=True)


def forget_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a job, or settings of devices, put into the environment."""
    for name in [n for n in os.environ if n.startswith("INSITU_")] + ["TF_CONFIG"]:
        monkeypatch.delenv(name, raising=False)
    if mode := os.environ.get("TEST_TLS"):  # see `make test-tls`
        monkeypatch.setenv("INSITU_TLS", mode)


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A job of two workers in which nothing fails: (`TrainingJobs` on the same rows, what `describe --ledger`
    says of the job, each worker's result)."""
    from training_jobs import TrainingJobs

    jobs = TrainingJobs(tmp_path_factory.mktemp("two-workers"), nodes=2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Tests before may have left settings, under which a job rounds differently.
        forget_settings(monkeypatch)
        return (jobs, *jobs.run("--workers", "2", "--threads", "1"))
