"""Rows and bytes that a process has read, by node."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from grid_jobs import ROWS, job_context, write_own_map

from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.grid import Catalog, bring_up, dataset, import_cache
from insitu.grid.reading.reads import ReadCounter


def test_bytes_are_counted_by_where_they_lie(
    paths: Paths, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = ReadCounter()
    monkeypatch.setattr("insitu.grid.caches.dataset_opening.READS", counter)
    monkeypatch.setattr("insitu.grid.reading.datasets.READS", counter)
    monkeypatch.setattr("insitu.grid.reading.cache_reader.READS", counter)
    bring_up(paths, 2)
    import_cache(paths, "a", [str(source)], partitions=2)
    write_own_map(paths, ("node-0",), ((0, 1),))
    spec = Catalog(paths).get("a")
    ds = dataset("a", features="x", context=job_context(paths)).shuffle().batch(64)
    for _ in ds:
        pass
    here = sum(p.rows for p in spec.partitions if p.owners == ("node-0",))
    written = json.loads(paths.job("job-1").reads(TaskId("worker", 0)).read_text())
    assert written == {
        "local_bytes": here * 10,
        "remote_bytes": (ROWS - here) * 10,
        "local_rows": here,
        "remote_rows": ROWS - here,
    }
    assert 0 < here < ROWS


def test_counts_are_written_when_they_are_published(tmp_path: Path) -> None:
    counter = ReadCounter()
    counter.count(10, 20, 1, 2)
    counter.publish()
    assert not list(tmp_path.iterdir())
    counter.write_to(tmp_path / "reads.json")
    counter.count(1, 0, 1, 0)
    counter.publish()
    assert json.loads((tmp_path / "reads.json").read_text()) == {
        "local_bytes": 11,
        "remote_bytes": 20,
        "local_rows": 2,
        "remote_rows": 2,
    }


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_disk_that_takes_no_counts_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    counter = ReadCounter()
    counter.write_to(tmp_path / "reads.json")

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("insitu.base.disk.durable.os.fsync", refuse)
        counter.publish()
        counter.publish()
    assert len(caplog.records) == 1 and "Training continues" in caplog.text
    assert os.strerror(number) in caplog.text
    counter.publish()
    assert json.loads((tmp_path / "reads.json").read_text())["local_rows"] == 0
