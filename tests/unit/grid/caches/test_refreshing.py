"""Rows of Ignite that enter at the beginning of an epoch, from servers in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid_jobs import job_context, write_own_map
from ignite_wire import FakeCluster, cluster_of, drawing, drawings

from insitu.base.context import Context
from insitu.base.errors import GridError, InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, ShardMap
from insitu.extensions.ignite import cluster as cluster_module
from insitu.extensions.ignite import debounce
from insitu.grid import (
    Catalog,
    Dataset,
    ShardLedger,
    audit,
    bring_up,
    dataset,
    find_version,
    read_refreshes,
)
from insitu.grid.caches.refreshing import EpochVersions, find_refreshing_epoch
from insitu.grid.caches.snapshots import read_snapshot
from insitu.grid.sources import ColumnOptions

SHARDS = ((0, 1, 2), (3, 4))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "1")
    monkeypatch.setattr(cluster_module, "_PAUSES", (0.01,))
    monkeypatch.setattr(debounce, "STABLE_SECONDS", 0.01)


@pytest.fixture
def cluster(paths: Paths) -> Iterator[FakeCluster]:
    """Two servers with 60 rows, beside two nodes; a job has read them."""
    bring_up(paths, 2)
    with cluster_of(2, drawings(60)) as servers:
        start(paths, servers, 1)
        yield servers


def start(paths: Paths, servers: FakeCluster, every: int) -> CacheSpec:
    options = ColumnOptions(without=frozenset(["value"]))
    cache = read_snapshot(paths, servers.address(), options)
    Catalog(paths).pin(cache.name, cache.version, "job-1")
    write_own_map(paths, ("node-0", "node-1"), SHARDS, cache.name)
    paths.job("job-1").spec.write_text(json.dumps({"refresh": every}))
    return cache


def task(paths: Paths, shard: int) -> Context:
    found = job_context(
        paths,
        f"worker:{shard}",
    )
    name = Catalog(paths).caches()[0].name
    return replace(found, cache=name, shards=(shard,), num_shards=2, stall_timeout=30.0)


def rows_of(paths: Paths, shard: int, **more: Any) -> Dataset:
    return dataset(context=task(paths, shard), features="key", label=None, **more).batch(10)


def keys(ds: Dataset, epoch: int) -> list[int]:
    batches = [batch.data for batch in ds.shard_batches(ds.shards[0], epoch) if batch.rows]
    return [int(key) for batch in batches for key in batch]


def add_rows(servers: FakeCluster, first: int, stop: int) -> None:
    for index in range(first, stop):
        servers.cache.partitions[index % len(servers.cache.partitions)].append(drawing(index))


def test_rows_that_were_added_enter_at_the_next_epoch(paths: Paths, cluster: FakeCluster) -> None:
    first, second = rows_of(paths, 0), rows_of(paths, 1)
    assert first.is_refreshed
    before = keys(first, 0) + keys(second, 0)
    add_rows(cluster, 60, 75)
    assert keys(first, 0) + keys(second, 0) == before and len(before) == 60
    after = keys(first, 1) + keys(second, 1)
    assert len(set(after)) == len(after) == 75
    assert first.at_epoch(1).num_steps > first.num_steps
    assert sum(len(rows) for _, rows in first.shard_origins(0, 1, 99)) == len(keys(first, 1))
    found = read_refreshes(paths.job("job-1"))
    assert [(each.epoch, each.cache.version, each.cache.rows) for each in found] == [(1, 2, 75)]
    assert [p.owners for p in found[0].cache.partitions] == [p.owners for p in first.cache.partitions]


def test_a_task_that_is_started_again_reads_what_the_epoch_had(paths: Paths, cluster: FakeCluster) -> None:
    before = keys(rows_of(paths, 0).shuffle(3), 1)
    add_rows(cluster, 60, 75)
    assert keys(rows_of(paths, 0).shuffle(3), 1) == before
    assert len(keys(rows_of(paths, 0), 2)) > len(before)
    assert keys(rows_of(paths, 0).shuffle(3), 1) == before
    assert Catalog(paths).pinned_by(rows_of(paths, 0).cache.name, 3) == ["job-1"]


def test_equal_rows_make_the_same_bits_and_take_no_further_room(paths: Paths, cluster: FakeCluster) -> None:
    ds = rows_of(paths, 0)
    later = ds.at_epoch(1).cache
    assert (ds.cache.version, later.version) == (1, 2)
    assert [p.checksum for p in later.partitions] == [p.checksum for p in ds.cache.partitions]
    for info in later.partitions:
        files = [paths.partition(info.owners[0], later.name, version, info.index) for version in (1, 2)]
        assert files[0].stat().st_ino == files[1].stat().st_ino
    assert keys(ds, 1) == keys(ds, 0)
    add_rows(cluster, 60, 61)  # of partition 0
    third = ds.at_epoch(2).cache
    same = [a.checksum == b.checksum for a, b in zip(third.partitions, later.partitions, strict=True)]
    assert same == [False, True, True, True, True]
    assert sorted(keys(ds, 2)) == sorted([*keys(ds, 0), 60])


def test_tasks_agree_on_one_version(paths: Paths, cluster: FakeCluster) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(
            target=lambda shard=shard: found.append(rows_of(paths, shard).at_epoch(1).cache.version)
        )
        for shard in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [2, 2] and Catalog(paths).caches()[0].version == 2


def test_without_servers_the_rows_before_are_read_again(paths: Paths, cluster: FakeCluster) -> None:
    ds = rows_of(paths, 0)
    for server in cluster.servers:
        server.alive = False
        server.stop()
    assert keys(ds, 1) == keys(ds, 0)
    (refresh,) = read_refreshes(paths.job("job-1"))
    assert refresh.cache.version == 1 and "can't be reached" in (refresh.problem or "")


def test_moved_partitions_are_read_from_their_new_server(paths: Paths, cluster: FakeCluster) -> None:
    """The topology has changed: files stay on the nodes of their shards, and no task is disturbed."""
    ds = rows_of(paths, 0)
    cluster.primaries, cluster.topology = [1] * 5, (2, 0)
    later = ds.at_epoch(1).cache
    origin = dict(later.origin or {})
    assert set(origin["primaries"]) == {0} and len(origin["servers"]) == 1 and origin["remote_bytes"] == 0
    assert origin["topology"] == [[2, 0], [2, 0]]
    assert [p.owners for p in later.partitions] == [p.owners for p in ds.cache.partitions]
    cluster.cache.partitions.append([])
    cluster.primaries = [1] * 6
    assert ds.at_epoch(2).cache.version == 2
    assert "must keep its partitions" in (read_refreshes(paths.job("job-1"))[1].problem or "")


def test_the_audit_counts_what_each_epoch_had(paths: Paths, cluster: FakeCluster) -> None:
    job, first = paths.job("job-1"), rows_of(paths, 0).cache
    add_rows(cluster, 60, 75)
    for epoch in (0, 1):
        for shard in (0, 1):
            ledger = ShardLedger(epoch, shard)
            for partition, rows in rows_of(paths, shard).shard_origins(shard, epoch, 99):
                ledger.add(partition, rows)
            ledger.complete = True
            job.ledger.mkdir(exist_ok=True)
            ledger.publish(job)
    from insitu.grid import read_ledgers

    refreshes, shard_map = read_refreshes(job), ShardMap(first.name, 1, SHARDS)
    found = audit(first, shard_map, read_ledgers(job), lambda epoch: find_version(refreshes, first, epoch))
    assert [(e.version, e.expected, e.counted, e.clean) for e in found] == [
        (1, 60, 60, True),
        (2, 75, 75, True),
    ]
    assert not audit(first, shard_map, read_ledgers(job))[1].clean


def test_every_other_epoch(paths: Paths, tmp_path: Path) -> None:
    assert [find_refreshing_epoch(epoch, 3) for epoch in range(7)] == [0, 0, 0, 3, 3, 3, 6]
    assert find_refreshing_epoch(5, 0) == 0
    first = CacheSpec("a", 1, (), (), 0, None, 0.0)
    read: list[int] = []

    def read_again(paths: Paths, before: CacheSpec) -> CacheSpec:
        read.append(before.version)
        raise SourceError("no server")

    job = paths.job("job-1")
    job.root.mkdir(parents=True)
    versions = EpochVersions(paths, job, first, 2, 5.0, read_again)
    assert [versions.find(epoch).version for epoch in (7, 6, 1, 2, 3)] == [1] * 5
    assert read == [1, 1] and [each.epoch for each in read_refreshes(job)] == [2, 6]


def test_a_task_that_reads_for_too_long_is_an_error(paths: Paths) -> None:
    job = paths.job("job-1")
    job.root.mkdir(parents=True)
    first = CacheSpec("a", 1, (), (), 0, None, 0.0)
    versions = EpochVersions(paths, job, first, 1, 0.1)
    with versions._locked() as mine:
        assert mine
        with pytest.raises(GridError, match=r"Another task reads the rows of epoch 2.*--stall-timeout"):
            versions.find(1)


def test_several_passes_are_refused(paths: Paths, cluster: FakeCluster) -> None:
    with pytest.raises(InputError, match="an epoch is one pass"):
        rows_of(paths, 0).repeat(2)
    filtered = dataset(context=task(paths, 0), features="key", label=None).filter(lambda key: key % 2 == 0)
    add_rows(cluster, 60, 75)
    assert all(key % 2 == 0 for key in keys(filtered.batch(10), 1))
    np.testing.assert_array_equal(np.unique(np.diff(np.sort(keys(filtered.batch(10), 1))) % 2), [0])


def answer(paths: Paths, epoch: int) -> None:
    """Answer a task on a host as the job's supervisor does: by a record, once it is asked for."""
    job = paths.job("job-1")
    deadline = time.monotonic() + 30
    while not job.refresh(epoch, wanted=True).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first = Catalog(paths).caches()[0]
    EpochVersions(paths, job, first, 1, 30.0).find(epoch)


def test_a_task_on_a_host_asks_for_the_rows_of_an_epoch(paths: Paths, cluster: FakeCluster) -> None:
    paths.job("job-1").spec.unlink()  # a host has none
    ds = dataset(context=replace(task(paths, 0), refresh=1), features="key", label=None).batch(10)
    assert ds.is_refreshed and ds.at_epoch(0) is ds
    add_rows(cluster, 60, 75)
    supervisor = threading.Thread(target=answer, args=(paths, 1))
    supervisor.start()
    assert ds.at_epoch(1).cache.rows == 75
    supervisor.join(30)
    assert int(paths.job("job-1").refresh(1, wanted=True).read_text()) == 1


def test_a_task_on_a_host_waits_for_its_supervisor_for_a_while(paths: Paths, cluster: FakeCluster) -> None:
    job, first = paths.job("job-1"), Catalog(paths).caches()[0]
    versions = EpochVersions(paths, job, first, 1, 0.1, asks_supervisor=True)
    with pytest.raises(GridError, match=r"epoch 2. Received: nothing from the head's machine"):
        versions.find(1)
    later = replace(first, version=7)
    job.refresh(1).write_text(json.dumps({"epoch": 1, "problem": None, "cache": later.to_json()}))
    with pytest.raises(GridError, match=r"Received: no catalogue that has them"):
        versions.find(1)
