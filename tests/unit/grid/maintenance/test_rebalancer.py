"""Partitions move to where the plan has them, and are readable whenever a call is killed."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_hosts import StoreHosts

from insitu.base.errors import GridError, InputError, TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid import Catalog, import_cache, rebalance_cache, tidy_store
from insitu.grid.catalog import store_tidying
from insitu.grid.maintenance import rebalancer
from insitu.grid.transfer import RemoteStores

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[StoreHosts]:
    with contextlib.closing(StoreHosts(tmp_path, "a", "b", "c")) as found:
        yield found


@pytest.fixture
def cache(paths: Paths, hosts: StoreHosts, tmp_path: Path) -> CacheSpec:
    """A cache of 6 partitions on a and b; c was not there."""
    np.save(tmp_path / "m.npy", np.arange(12_000))
    paths.home.mkdir(mode=0o700)
    hosts.stop("c")
    (cache,) = import_cache(
        paths, "m", [str(tmp_path / "m.npy")], partitions=6, backups=1, remote=hosts.remote()
    )
    hosts.start("c")
    hosts.copy_catalog(paths)
    return cache


def check_placed(paths: Paths, hosts: StoreHosts) -> Counter[NodeId]:
    """Return the copies of each node, all of which are there whole."""
    found = Catalog(paths).get("m")
    for info in found.partitions:
        for node in info.owners:
            file = hosts.paths[node].partition(node, "m", 1, info.index)
            assert file.stat().st_size == info.bytes, (info.index, node)
    return Counter(node for info in found.partitions for node in info.owners)


def tidy(paths: Paths, hosts: StoreHosts) -> None:
    """Let all agents remove what is marked, as after a minute."""
    hosts.copy_catalog(paths)
    old = time.time() - store_tidying.FETCHED_SECONDS - 10
    for node, there in hosts.paths.items():
        for mark in there.node(node).rglob("*.fetched"):
            os.utime(mark, (old, old))
        tidy_store(there, node)


def files(hosts: StoreHosts) -> Counter[NodeId]:
    return Counter({node: len(list(p.node(node).rglob("part-*.arrow"))) for node, p in hosts.paths.items()})


def test_a_dry_run_moves_nothing(paths: Paths, hosts: StoreHosts, cache: CacheSpec) -> None:
    (report,) = rebalance_cache(paths, "m", hosts.remote(), dry_run=True)
    assert len(report.plan.moves) == 4 and {m.target for m in report.plan.moves} == {C}
    assert report.moved == 0 and Catalog(paths).get("m") == cache and files(hosts)[C] == 0


def test_a_new_node_gets_its_part_with_the_fewest_bytes(
    paths: Paths, hosts: StoreHosts, cache: CacheSpec
) -> None:
    seen: list[tuple[int, int]] = []
    (report,) = rebalance_cache(paths, "m", hosts.remote(), on_moved=lambda *words: seen.append(words))
    assert report.complete and report.moved == report.plan.bytes == seen[-1][0] == seen[-1][1]
    assert check_placed(paths, hosts) == {A: 4, B: 4, C: 4}
    found = Catalog(paths).get("m")
    assert {p.index: p.owners for p in found.partitions} == dict(report.plan.owners)
    assert files(hosts) == {A: 6, B: 6, C: 4}, "former copies stay for jobs"
    tidy(paths, hosts)
    assert files(hosts) == {A: 4, B: 4, C: 4} and check_placed(paths, hosts).total() == 12
    (again,) = rebalance_cache(paths, "m", hosts.remote())
    assert again.moved == 0 and not again.plan.moves and again.complete


def test_former_copies_stay_while_a_job_reads_them(paths: Paths, hosts: StoreHosts, cache: CacheSpec) -> None:
    Catalog(paths).pin("m", 1, "job")
    rebalance_cache(paths, "m", hosts.remote())
    tidy(paths, hosts)
    assert files(hosts) == {A: 6, B: 6, C: 4}
    Catalog(paths).unpin("job")
    tidy(paths, hosts)
    assert files(hosts) == {A: 4, B: 4, C: 4}


def test_what_a_lost_node_had_is_made_again_from_backups(
    paths: Paths, hosts: StoreHosts, cache: CacheSpec
) -> None:
    hosts.stop("a")
    (report,) = rebalance_cache(paths, "m", hosts.remote())
    assert report.complete and check_placed(paths, hosts) == {B: 6, C: 6}
    hosts.start("a")  # it has all of its copies, none of which is needed
    (report,) = rebalance_cache(paths, "m", hosts.remote())
    assert report.complete and check_placed(paths, hosts) == {A: 4, B: 4, C: 4}
    assert report.moved == 0, "a has them still"
    tidy(paths, hosts)
    assert files(hosts) == {A: 4, B: 4, C: 4}


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("action", ["_copy", "_flip", "_order_owners", "_release_others"])
@pytest.mark.parametrize("calls", [0, 2])
def test_a_call_that_is_killed_leaves_owners_and_the_next_goes_on(
    paths: Paths,
    hosts: StoreHosts,
    cache: CacheSpec,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    calls: int,
) -> None:
    original, left = getattr(rebalancer._Run, action), [calls if action in ("_copy", "_flip") else 0]

    def kill(self: Any, *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return original(self, *arguments)

    monkeypatch.setattr(rebalancer._Run, action, kill)
    with pytest.raises(Killed):
        rebalance_cache(paths, "m", hosts.remote())
    assert check_placed(paths, hosts).total() == 12
    monkeypatch.undo()
    (report,) = rebalance_cache(paths, "m", hosts.remote())
    assert report.complete and check_placed(paths, hosts) == {A: 4, B: 4, C: 4}
    assert all(copy.state == "live" for copy in Catalog(paths).placement("m", 1))
    tidy(paths, hosts)
    assert files(hosts) == {A: 4, B: 4, C: 4}


def test_a_copy_that_fails_is_named_and_the_others_move(
    paths: Paths, hosts: StoreHosts, cache: CacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    (planned,) = rebalance_cache(paths, "m", hosts.remote(), dry_run=True)
    bad, fetch = planned.plan.moves[0].partition, RemoteStores.fetch

    def fail(self: RemoteStores, version: CacheSpec, wanted: Any, *rest: Any, **options: Any) -> Any:
        if wanted == {C: [bad]}:
            raise TransferError("c: no room")
        return fetch(self, version, wanted, *rest, **options)

    monkeypatch.setattr(RemoteStores, "fetch", fail)
    (report,) = rebalance_cache(paths, "m", hosts.remote())
    assert report.failed == [f"partition {bad} to c: c: no room"] and not report.complete
    assert check_placed(paths, hosts)[C] == 3
    assert {*Catalog(paths).get("m").partitions[bad].owners} == {*cache.partitions[bad].owners}


def test_what_cannot_be_rebalanced_is_refused(
    paths: Paths, hosts: StoreHosts, cache: CacheSpec, tmp_path: Path
) -> None:
    for name in ("b", "c"):
        hosts.stop(name)
    with pytest.raises(InputError, match="more nodes that stay than backups"):
        rebalance_cache(paths, "m", hosts.remote())
    import_cache(paths, "local", [str(tmp_path / "m.npy")])
    with pytest.raises(InputError, match=r"is on node-0 in .*, without an agent. Import it again"):
        rebalance_cache(paths, "local", hosts.remote())
    hosts.copy_catalog(paths)
    with pytest.raises(GridError, match="The head alone changes the catalogue"):
        rebalance_cache(hosts.paths[A], "m", hosts.remote())
