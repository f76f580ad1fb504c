"""Snapshots of caches of Ignite, from servers that speak the protocol in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid_jobs import job_context, write_own_map
from ignite_wire import FakeServer, cluster_of, drawings

from insitu.base.context import Context
from insitu.base.errors import InputError, SourceError
from insitu.base.paths import Paths
from insitu.extensions.ignite import cluster as cluster_module
from insitu.extensions.ignite.connector import CONNECTOR
from insitu.extensions.ignite.protocol import NEXT_PAGE, SCAN
from insitu.grid import Catalog, bring_up, dataset
from insitu.grid.caches import snapshots
from insitu.grid.caches.snapshots import read_snapshot
from insitu.grid.sources import ColumnOptions, describe_moves

NO_OPTIONS = ColumnOptions()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "2")
    monkeypatch.setattr(cluster_module, "_PAUSES", (0.01,))
    monkeypatch.setattr(snapshots, "_read", {})


def test_each_node_holds_the_partitions_of_its_server(paths: Paths) -> None:
    bring_up(paths, 2)
    with cluster_of(3, drawings(200, 7)) as cluster:
        cache = read_snapshot(paths, cluster.address(), NO_OPTIONS)
        for number, server in enumerate(cluster.servers[1:], start=1):
            assert set(server.scanned) <= {p for p in range(7) if p % 3 == number}
        ports = [server.port for server in cluster.servers]
    order = sorted(range(3), key=lambda number: f"127.0.0.1:{ports[number]}")
    beside = {number: f"node-{place % 2}" for place, number in enumerate(order)}
    assert [p.owners for p in cache.partitions] == [(beside[p % 3],) for p in range(7)]
    assert [p.rows for p in cache.partitions] == [29, 29, 29, 29, 28, 28, 28]
    origin = dict(cache.origin or {})
    assert origin["remote_bytes"] == 0 and origin["local_bytes"] > 0
    assert origin["primaries"] == [order.index(p % 3) for p in range(7)]
    batch = dataset(cache.name, paths=paths, context=Context(paths), label=None).sample(200)
    np.testing.assert_array_equal(np.sort(batch["key"]), range(200))


def test_the_same_rows_make_the_same_partitions_beside_any_number_of_servers(paths: Paths) -> None:
    made = []
    for servers in (1, 2, 3):
        bring_up(paths, servers)
        with cluster_of(servers, drawings(300, 8)) as cluster:
            made.append(read_snapshot(paths, cluster.address(), NO_OPTIONS))
    assert len({tuple(p.checksum for p in cache.partitions) for cache in made}) == 1
    assert len({dict(cache.origin or {})["digest"] for cache in made}) == 1


def test_partitions_without_rows_are_empty(paths: Paths) -> None:
    cache = drawings(5, 5)
    cache.partitions[2] = []
    with cluster_of(2, cache) as cluster:
        made = read_snapshot(paths, cluster.address(), NO_OPTIONS)
    assert [p.rows for p in made.partitions] == [1, 1, 0, 1, 1]


def test_what_another_server_gives_is_remote(paths: Paths) -> None:
    """A server dies in the middle of a scan; the next primary gives its partitions, whole."""
    cluster = cluster_of(2, drawings(400))

    def die(server: FakeServer, operation: int, count: int) -> bytes | None:
        if operation != NEXT_PAGE or count < 4:
            return None
        server.alive = False
        cluster.primaries, cluster.topology = [1] * 5, (2, 0)
        server.stop()
        return b""

    cluster.servers[0]._behave = die
    cluster.page_rows = 10
    with cluster:
        cache = read_snapshot(paths, cluster.address(), NO_OPTIONS)
        origin = dict(cache.origin or {})
        now = describe_moves(origin, 1.0)
    assert cache.rows == 400 and origin["remote_bytes"] > 0 and origin["local_bytes"] > 0
    assert now["topology"] == [2, 0] and now["moved"] == 3 and now["problem"] is None
    gone = describe_moves(origin, 0.2)
    assert gone["moved"] is None and "can't be reached" in gone["problem"]


def test_a_script_reads_a_cache_once(paths: Paths, alone: Context) -> None:
    with cluster_of(2, drawings(60)) as cluster:
        address = cluster.address()
        first = dataset(address, tensor="image=uint8[3,4]", without=["key"], paths=paths, context=alone)
        scans = sum(server.requests[SCAN] for server in cluster.servers)
        again = dataset(address, tensor=["image=uint8[3,4]"], without="key", paths=paths, context=alone)
        assert again.cache == first.cache
        assert sum(server.requests[SCAN] for server in cluster.servers) == scans
        with pytest.raises(InputError, match=r"Received: .* with no options, after .*--tensor image=uint8"):
            dataset(address, paths=paths, context=alone)
    (batch, label), *_ = first.batch(60)
    assert batch.shape == (60, 3, 4) and label.shape == (60,)


def test_a_job_trains_on_the_snapshot_that_it_was_started_on(paths: Paths) -> None:
    with cluster_of(2, drawings(60)) as cluster:
        address = cluster.address()
        cache = read_snapshot(paths, address, ColumnOptions(without=frozenset(["key"])))
        scans = sum(server.requests[SCAN] for server in cluster.servers)
        Catalog(paths).pin(cache.name, 1, "job-1")
        write_own_map(paths, ("node-0",), ((0, 1, 2, 3, 4),), cache.name)
        context = replace(job_context(paths), cache=cache.name)
        assert dataset(address, context=context).cache == cache
        assert dataset(address, without="key", context=context).cache == cache
        assert dataset(context=context).cache == cache
        assert sum(server.requests[SCAN] for server in cluster.servers) == scans
        with pytest.raises(InputError, match=r"Received: --without label in the script, --without key at"):
            dataset(address, without="label", context=context)
        with pytest.raises(InputError, match=r"insitu start ignite://.*/OTHER JOB_DIR"):
            dataset(address.replace("CACHE", "OTHER"), context=context)


def test_processes_that_train_together_must_import_before(paths: Paths) -> None:
    context = replace(Context(paths), by_hand=True)
    with pytest.raises(InputError, match=r"one of several processes. Import it before: insitu import NAME"):
        dataset("ignite://localhost/CACHE", context=context)


def test_options_of_ignite_are_for_ignite_alone(paths: Paths, cache: str, alone: Context) -> None:
    with pytest.raises(InputError, match=r"without are said of .*Received: cache a"):
        dataset(cache, without="x", paths=paths, context=alone)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colour'"):
        dataset(cache, colour="x", paths=paths, context=alone)


def test_a_replicated_cache_is_spread_over_the_nodes(paths: Paths) -> None:
    bring_up(paths, 2)
    rows = drawings(100)
    rows.replicated = True
    with cluster_of(2, rows) as cluster:
        cache = read_snapshot(paths, cluster.address(), NO_OPTIONS)
    assert {p.owners[0] for p in cache.partitions} == {"node-0", "node-1"} and cache.rows == 100
    assert "primaries" not in dict(cache.origin or {})


def test_a_snapshot_that_fails_leaves_the_one_before(paths: Paths) -> None:
    with cluster_of(1, drawings(50)) as cluster:
        address = cluster.address()
        read_snapshot(paths, address, NO_OPTIONS)
    with pytest.raises(SourceError, match="can't be reached"):
        read_snapshot(paths, address, NO_OPTIONS)
    assert [cache.version for cache in Catalog(paths).caches()] == [1]


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("ignite://grid-1/DIGITS", "ignite/grid-1-10800/DIGITS"),
        ("ignite://grid-1:7,grid-2/PUBLIC.CITY", "ignite/grid-1-7/PUBLIC.CITY"),
    ],
)
def test_a_snapshot_is_named_by_its_address(address: str, name: str) -> None:
    assert CONNECTOR.name_cache(address) == name


def test_names_that_differ_in_other_signs_stay_apart(tmp_path: Path) -> None:
    addresses = ["ignite://[::1]/A", "ignite://[::2]/A", "ignite://h/A/B", "ignite://h/A B", "ignite://h/A_B"]
    names: list[Any] = [CONNECTOR.name_cache(address) for address in addresses]
    assert len(set(names)) == len(names)
