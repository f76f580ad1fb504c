"""Copies come to other hosts once, counted, and each failure names the node."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_hosts import StoreHosts

from insitu.base.errors import TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid import Catalog, import_cache, scrub_cache, tidy_store
from insitu.grid.catalog import store_tidying
from insitu.grid.catalog.manifests import read_manifest
from insitu.grid.serving import store_actions
from insitu.grid.transfer import remote_stores
from insitu.grid.transfer.client import PartitionClient

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[StoreHosts]:
    with contextlib.closing(StoreHosts(tmp_path, "a", "b", "c")) as found:
        yield found


@pytest.fixture
def spread(paths: Paths, hosts: StoreHosts, tmp_path: Path) -> CacheSpec:
    """A cache of 3 partitions, each on two of the hosts."""
    np.save(tmp_path / "s.npy", np.arange(60_000).reshape(-1, 2))
    paths.home.mkdir(mode=0o700)
    paths.head.write_text("{}")
    (cache,) = import_cache(
        paths, "s", [str(tmp_path / "s.npy")], partitions=3, backups=1, remote=hosts.remote()
    )
    hosts.copy_catalog(paths)
    return cache


def not_on(cache: CacheSpec, node: NodeId) -> list[int]:
    return [info.index for info in cache.partitions if node not in info.owners]


def test_copies_are_fetched_once_and_counted(hosts: StoreHosts, spread: CacheSpec) -> None:
    wanted = {node: not_on(spread, node) for node in (A, B, C)}
    seen: list[tuple[NodeId, int, int]] = []
    fetched = hosts.remote().fetch(spread, wanted, lambda *words: seen.append(words))
    for node, indices in wanted.items():
        paths = hosts.paths[node]
        assert fetched[node].bytes == sum(spread.partitions[i].bytes for i in indices)
        assert fetched[node].partitions == len(indices) == 1
        assert read_manifest(paths.manifest(node, "s", 1)).held == (0, 1, 2)
        assert [paths.fetched(node, "s", 1, i).exists() for i in range(3)] == [i in indices for i in range(3)]
    assert {node for node, done, total in seen if done == total} == {A, B, C}
    again = hosts.remote().fetch(spread, {A: range(3)})
    assert (again[A].partitions, again[A].bytes) == (3, 0)


def test_copies_stay_while_a_job_has_the_version_pinned(
    paths: Paths, hosts: StoreHosts, spread: CacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    Catalog(paths).pin("s", 1, "job")
    hosts.copy_catalog(paths)
    (index,) = not_on(spread, A)
    hosts.remote().fetch(spread, {A: [index]})
    there = hosts.paths[A]
    file, mark = there.partition("a", "s", 1, index), there.fetched("a", "s", 1, index)

    def grow_old() -> None:
        old = time.time() - store_tidying.FETCHED_SECONDS - 10
        os.utime(mark, (old, old))

    grow_old()
    tidy_store(there, A)
    assert file.exists()
    Catalog(paths).unpin("job")
    hosts.copy_catalog(paths)
    os.utime(mark)
    tidy_store(there, A)
    assert file.exists(), "the pin of the job that it was fetched for may be on its way"
    grow_old()
    tidy_store(there, A)
    assert not file.exists() and not mark.exists()
    assert read_manifest(there.manifest(A, "s", 1)).held == tuple(sorted({0, 1, 2} - {index}))
    # A copy that the catalogue places here isn't one that was fetched for a job.
    hosts.remote().fetch(spread, {A: [index]}, marked=False)
    grow = there.fetched("a", "s", 1, index)
    assert not grow.exists()
    tidy_store(there, A)
    assert file.exists()


def test_an_agent_in_the_home_of_the_head_removes_copies_too(
    paths: Paths, hosts: StoreHosts, spread: CacheSpec
) -> None:
    hosts.remote().fetch_here(paths, NodeId("h"), spread, [0, 1])
    mark = paths.fetched("h", "s", 1, 1)
    mark.touch()
    os.utime(mark, (1, 1))
    Catalog(paths).pin("s", 1, "job")
    tidy_store(paths, NodeId("h"))
    assert mark.exists()
    Catalog(paths).unpin("job")
    tidy_store(paths, NodeId("h"))
    assert [paths.partition("h", "s", 1, i).exists() for i in (0, 1)] == [True, False] and not mark.exists()
    assert read_manifest(paths.manifest(NodeId("h"), "s", 1)).held == (0,)


def test_each_failure_names_the_node(hosts: StoreHosts, spread: CacheSpec) -> None:
    with pytest.raises(TransferError, match=r"z: no agent of this name is alive"):
        hosts.remote().fetch(spread, {NodeId("z"): [0]})
    (index,) = not_on(spread, C)
    for owner in spread.partitions[index].owners:
        hosts.stop(owner)
    with pytest.raises(
        TransferError, match=rf"^c: Partition {index} of s version 1 can't be fetched: no source"
    ):
        hosts.remote().fetch(spread, {C: [index]})
    lost = hosts.stop("c")
    with pytest.raises(TransferError, match=r"^c: .*(failed|said nothing)"):
        hosts.remote(c=lost).fetch(spread, {C: [index]})


@pytest.mark.parametrize(("cut", "connections"), [(False, 1), (True, 2)])
def test_a_task_is_asked_about_over_one_connection_and_over_a_new_one_after_a_failure(
    hosts: StoreHosts, spread: CacheSpec, monkeypatch: pytest.MonkeyPatch, cut: bool, connections: int
) -> None:
    opened: list[PartitionClient] = []
    failing = [False]

    class Watched(PartitionClient):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            opened.append(self)

        def act(self, kind: str, fields: Mapping[str, Any]) -> Any:
            if failing.pop():
                failing.append(False)
                raise TransferError("the connection is cut")
            failing.append(kind == "fetch" and cut)
            return super().act(kind, fields)

    monkeypatch.setattr(remote_stores, "PartitionClient", Watched)
    (index,) = not_on(spread, C)
    size = spread.partitions[index].bytes
    fetched = hosts.remote().fetch(spread, {C: [index]}, rate=size / 0.3)
    assert fetched[C].bytes == size and len(opened) == connections


@pytest.mark.parametrize("rate", [None, 1e7])
def test_copies_and_checks_with_a_rate_give_way_to_other_programs(
    paths: Paths, hosts: StoreHosts, spread: CacheSpec, monkeypatch: pytest.MonkeyPatch, rate: float | None
) -> None:
    lowered: set[int] = set()

    def watch(function: Any) -> Any:
        def watched(*arguments: Any, **options: Any) -> Any:
            lowered.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return function(*arguments, **options)

        return watched

    for name in ("fetch_partition", "check_copy"):
        monkeypatch.setattr(store_actions, name, watch(getattr(store_actions, name)))
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    (index,) = not_on(spread, C)
    hosts.remote().fetch(spread, {C: [index]}, rate=rate)
    hosts.remote().verify(spread, {C: [index]}, rate=rate)
    assert lowered == {usual if rate is None else 19}
    # Threads of the connections outlive the copy, and answer others.
    left = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            left.add(os.getpriority(os.PRIO_PROCESS, int(thread)))
    assert left == {usual}


def test_damage_on_a_host_is_found_there_and_repaired_from_another(
    paths: Paths, hosts: StoreHosts, spread: CacheSpec
) -> None:
    read: list[int] = []
    checks = scrub_cache(paths, spread, remote=hosts.remote(), on_read=read.append)
    assert [(c.partition, c.problem) for c in checks] == [(i, None) for i in (0, 0, 1, 1, 2, 2)]
    assert sum(read) == 2 * spread.bytes
    node = spread.partitions[1].owners[0]
    file = hosts.paths[node].partition(node, "s", 1, 1)
    good = file.read_bytes()
    file.write_bytes(good[:-10] + b"0123456789")
    (damaged,) = [c for c in scrub_cache(paths, spread, remote=hosts.remote()) if c.problem is not None]
    assert (damaged.partition, damaged.node, damaged.path) == (1, node, file)
    assert f"{node}: " in str(damaged.problem)
    checks = scrub_cache(paths, spread, remote=hosts.remote(), repair=True)
    assert [c.node for c in checks if c.repaired] == [node] and file.read_bytes() == good
    hosts.stop(node)
    lost = [c for c in scrub_cache(paths, spread, remote=hosts.remote()) if c.problem is not None]
    assert {c.node for c in lost} == {node} and "its agent isn't alive" in str(lost[0].problem)
