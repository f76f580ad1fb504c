from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import CacheSpec, Column, NodeId, PartitionInfo
from insitu.cluster.hosts_engine import job_supplies
from insitu.cluster.hosts_engine.job_supplies import JobRefreshes
from insitu.grid import Refresh, record_failed_refresh

CACHE = CacheSpec(
    "data",
    1,
    (Column("x", "float32", ()),),
    (PartitionInfo(0, 10, 100, "sum", (NodeId("a"),)),),
    40,
    None,
    0.0,
)
READ = """
import json, pathlib, sys
job, epoch = pathlib.Path(sys.argv[1]), int(sys.argv[2])
with (job / "asked").open("a") as file:
    print(epoch, file=file)
if epoch == 6:
    sys.exit(3)
record = {"epoch": epoch, "problem": None, "cache": json.loads((job / "cache.json").read_text())}
(job / "refreshes").mkdir(exist_ok=True)
(job / "refreshes" / f"epoch-{epoch:05d}.json").write_text(json.dumps(record))
"""


@pytest.fixture
def job(home: Path, monkeypatch: pytest.MonkeyPatch) -> JobPaths:
    found = Paths(home).job("job-1")
    found.root.mkdir(parents=True)
    (found.root / "cache.json").write_text(json.dumps(CACHE.to_json()))

    class Spec:
        refresh = 2

    monkeypatch.setattr(job_supplies, "read_spec", lambda job: Spec)
    monkeypatch.setattr(job_supplies, "read_placement", lambda job: (None, CACHE))
    return found


def asked(job: JobPaths) -> list[int]:
    path = job.root / "asked"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def take(refreshes: JobRefreshes) -> list[Refresh]:
    """Return what is done, once something is."""
    deadline = time.monotonic() + 60
    while not (found := refreshes.take_done()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def make(job: JobPaths, *command: str) -> JobRefreshes:
    return JobRefreshes(job, command or (sys.executable, "-c", READ))


def test_an_epoch_is_read_once_for_all_who_wait(job: JobPaths) -> None:
    refreshes = make(job)
    assert refreshes.take_done() == []
    refreshes.record_wanted(2)
    refreshes.record_wanted(2)
    (found,) = take(refreshes)
    assert (found.epoch, found.cache, found.problem) == (2, CACHE, None)
    refreshes.record_wanted(2)  # a task that was started on another host
    assert [each.epoch for each in take(refreshes)] == [2]
    assert asked(job) == [2] and refreshes.take_done() == []


def test_epochs_are_read_one_after_the_other(job: JobPaths) -> None:
    refreshes = make(job)
    refreshes.record_wanted(4)
    refreshes.record_wanted(2)
    assert [each.epoch for each in (*take(refreshes), *take(refreshes))] == [2, 4]
    assert asked(job) == [2, 4]


def test_epochs_at_which_nothing_is_read_are_ignored(job: JobPaths) -> None:
    refreshes = make(job)
    for epoch in (0, 1, 3):
        refreshes.record_wanted(epoch)
    assert refreshes.take_done() == [] and asked(job) == []


@pytest.mark.parametrize(
    ("command", "problem"), [((), "ended with exit code 3"), (("/nowhere",), "can't be started")]
)
def test_an_epoch_that_cant_be_read_has_the_rows_before(
    job: JobPaths, command: tuple[str, ...], problem: str
) -> None:
    record_failed_refresh(job, CACHE, 2, "no server answers")
    refreshes = make(job, *command)
    refreshes.record_wanted(6)
    (found,) = take(refreshes)
    assert found.cache == CACHE and problem in (found.problem or "")
    record_failed_refresh(job, CACHE, 6, "another reason")  # a record never changes
    refreshes.record_wanted(6)
    assert take(refreshes) == [found]


def test_who_waits_is_forgotten_where_records_cant_be_read(job: JobPaths) -> None:
    refreshes = make(job)
    refreshes.record_wanted(2)
    refreshes.give_up()
    assert refreshes.take_done() == [] and asked(job) == []


def test_what_is_under_way_ends_with_the_job(job: JobPaths, tmp_path: Path) -> None:
    refreshes = make(job, sys.executable, "-c", "import time; time.sleep(600)")
    refreshes.record_wanted(2)
    refreshes.take_done()
    process: Any = refreshes._reading
    refreshes.close()
    assert process[1].returncode == -9
