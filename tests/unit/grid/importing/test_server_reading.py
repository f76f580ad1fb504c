"""Nodes of several hosts read a cache of Ignite, each from the servers on its host."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ignite_wire import (
    FakeCache,
    FakeCluster,
    FakeServer,
    binary_object,
    binary_type,
    cluster_of,
    drawing,
    drawings,
    number,
)
from store_hosts import StoreHosts

from insitu.base.errors import InputError, SourceError, TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.extensions.ignite import carried_settings, debounce, source, ways
from insitu.extensions.ignite import cluster as cluster_module
from insitu.extensions.ignite.protocol import NEXT_PAGE
from insitu.extensions.ignite.wire import pack_string
from insitu.grid import Catalog, bring_up
from insitu.grid.caches.snapshots import read_snapshot, read_snapshot_again
from insitu.grid.catalog.orphaned_imports import list_staged_imports
from insitu.grid.importing import server_reading
from insitu.grid.importing.server_reading import ServerRequest, read_on_hosts
from insitu.grid.layout import server_places
from insitu.grid.sources import ColumnOptions
from insitu.grid.transfer.client import PartitionClient
from insitu.grid.transfer.remote_stores import RemoteImport

NO_OPTIONS = ColumnOptions()
NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "2")
    monkeypatch.setattr(cluster_module, "_PAUSES", (0.01,))
    monkeypatch.setattr(debounce, "STABLE_SECONDS", 0.01)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreHosts]:
    """Hosts a, b and c with the addresses 127.0.1.1 to 127.0.1.3, which count as addresses of a network."""
    for module in (server_places, ways):
        monkeypatch.setattr(module, "is_loopback", lambda host: host == "127.0.0.1")
    monkeypatch.setattr(server_reading, "list_host_addresses", lambda: ["127.0.1.254"])
    with contextlib.closing(StoreHosts(tmp_path, *NAMES)) as found:
        for place, node in enumerate(NAMES, start=1):
            actions = found.servers[NodeId(node)].actions
            own = {"list_addresses": lambda fields, place=place: [f"127.0.1.{place}", "shared"]}
            actions._actions = {**actions._actions, **own}
        yield found


def servers_on(cache: FakeCache, *places: int) -> FakeCluster:
    """A cluster of Ignite with a server at 127.0.1.N for each N; they hold the partitions in turn."""
    cluster = FakeCluster(cache, [p % len(places) for p in range(len(cache.partitions))])
    for place in places:
        cluster.add(host=f"127.0.1.{place}")
    return cluster


def read_here(tmp_path: Path, cluster: FakeCluster, nodes: int = 3) -> CacheSpec:
    """The same snapshot, beside the simulated nodes of one machine."""
    local = Paths(tmp_path / "local")
    bring_up(local, nodes)
    return read_snapshot(local, cluster.address(), NO_OPTIONS)


def checksums(cache: CacheSpec) -> list[tuple[int, str]]:
    return [(info.rows, info.checksum) for info in cache.partitions]


def assert_nothing_left(head: Paths, hosts: StoreHosts) -> None:
    assert Catalog(head).caches() == []
    for node, paths in hosts.paths.items():
        assert list_staged_imports(paths) == [] and not list(paths.node(node).rglob("part-*")), node


def test_each_host_reads_its_own_servers_into_its_own_store(
    head: Paths, hosts: StoreHosts, tmp_path: Path
) -> None:
    remote = hosts.remote()
    with servers_on(drawings(300, 9), 1, 2, 3) as cluster:
        plain = read_here(tmp_path, cluster)
        for server in cluster.servers:
            server.scanned.clear()
        seen = []

        def progress(rows: int, done: int, total: int | None) -> None:
            seen.append((rows, done, total))

        cache = read_snapshot(head, cluster.address(), NO_OPTIONS, progress=progress, remote=remote)
        for own, server in enumerate(cluster.servers[1:], start=1):  # samples come from the first one
            assert sorted(server.scanned) == [p for p in range(9) if p % 3 == own]
    assert [info.owners for info in cache.partitions] == [(NAMES[p % 3],) for p in range(9)]
    assert checksums(cache) == checksums(plain) and cache.rows == 300
    assert Catalog(head).get(cache.name) == cache and not remote.sent, "no row comes from here"
    origin, local = dict(cache.origin or {}), dict(plain.origin or {})
    for same in ("digest", "servers", "primaries", "partitions", "rows"):
        assert origin[same] == local[same], same
    assert origin["remote_bytes"] == 0 and origin["local_bytes"] == local["local_bytes"] > 0
    assert {node: read["rows"] for node, read in origin["nodes"].items()} == dict.fromkeys(NAMES, 100)
    assert seen[-1][0] == 300 and seen[-1][1] == seen[-1][2]
    for node, paths in hosts.paths.items():
        assert len(list(paths.node(node).rglob("part-*.arrow"))) == 3
        assert not list(paths.staging.iterdir())


def test_partitions_of_a_server_beside_no_node_go_round_the_nodes(
    head: Paths, hosts: StoreHosts, tmp_path: Path
) -> None:
    with servers_on(drawings(200, 8), 1, 9) as cluster:
        cache = read_snapshot(head, cluster.address(), NO_OPTIONS, remote=hosts.remote())
        plain = read_here(tmp_path, cluster)
    assert [info.owners[0] for info in cache.partitions] == ["a", "b", "a", "a", "a", "c", "a", "b"]
    assert checksums(cache) == checksums(plain)
    origin = dict(cache.origin or {})
    assert origin["nodes"]["a"]["local_bytes"] > 0 and origin["nodes"]["a"]["remote_bytes"] > 0
    assert origin["nodes"]["b"]["local_bytes"] == 0 and origin["nodes"]["b"]["remote_bytes"] > 0
    # Shards follow from the servers: one that has no place counts once for each of its readers.
    assert [server.rpartition(":")[0] for server in origin["servers"]] == ["127.0.1.1"] + ["127.0.1.9"] * 3


def test_a_server_that_dies_is_read_again_from_the_next_primary(
    head: Paths, hosts: StoreHosts, tmp_path: Path
) -> None:
    cluster = servers_on(drawings(600, 6), 1, 2, 3)

    def die(server: FakeServer, operation: int, count: int) -> bytes | None:
        if operation != NEXT_PAGE or count < 4:
            return None
        server.alive = False
        cluster.primaries, cluster.topology = [0, 0, 2, 0, 0, 2], (2, 0)
        server.stop()
        return b""

    with cluster:
        plain = read_here(tmp_path, cluster)
        cluster.page_rows, cluster.servers[1]._behave = 10, die
        cluster.servers[1].requests.clear()
        cache = read_snapshot(head, cluster.address(), NO_OPTIONS, remote=hosts.remote())
    assert not cluster.servers[1].alive and checksums(cache) == checksums(plain)
    origin = dict(cache.origin or {})
    assert origin["digest"] == dict(plain.origin or {})["digest"]
    assert [info.owners[0] for info in cache.partitions] == [NAMES[p % 3] for p in range(6)]
    assert origin["nodes"]["b"]["remote_bytes"] == origin["remote_bytes"] > 0
    assert [version[0] for version in origin["topology"]] == [1, 2]


def test_passwords_go_to_the_agents_and_nowhere_else(
    head: Paths, hosts: StoreHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSITU_IGNITE_USERNAME", "ada")
    monkeypatch.setenv("INSITU_IGNITE_PASSWORD", "hidden")
    carry = carried_settings.carry_settings

    def carry_and_forget() -> dict[str, str]:
        found = carry()
        monkeypatch.delenv("INSITU_IGNITE_PASSWORD")  # agents have environments of their own
        monkeypatch.delenv("INSITU_IGNITE_USERNAME")
        return found

    monkeypatch.setattr(carried_settings, "carry_settings", carry_and_forget)
    with servers_on(drawings(60, 3), 1, 2, 3) as cluster:
        cluster.password = "hidden"
        cache = read_snapshot(head, cluster.address(), NO_OPTIONS, remote=hosts.remote())
    assert cache.rows == 60
    for home in (head, *hosts.paths.values()):
        for path in home.home.rglob("*"):
            assert not path.is_file() or b"hidden" not in path.read_bytes(), path


def test_an_answer_that_is_lost_reads_nothing_twice(
    head: Paths, hosts: StoreHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, lost = PartitionClient.act, []

    def lose_first(self: PartitionClient, kind: str, fields: Any) -> Any:
        answer = act(self, kind, fields)
        if kind == "read_servers" and len(lost) < 2:
            lost.append(1)
            raise TransferError("the link is away")
        return answer

    monkeypatch.setattr(PartitionClient, "act", lose_first)
    with servers_on(drawings(90, 6), 1, 2, 3) as cluster:
        cache = read_snapshot(head, cluster.address(), NO_OPTIONS, remote=hosts.remote())
        assert len(lost) == 2 and checksums(cache) == checksums(read_here(tmp_path, cluster))


def test_texts_that_are_too_long_for_blocks_begin_again(
    head: Paths, hosts: StoreHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text(key: int) -> tuple[bytes, bytes]:
        return number(4, "q", key), pack_string("x" * (1 if key < 2000 else 400))

    cache = FakeCache([[text(key) for key in range(p, 3000, 3)] for p in range(3)])
    monkeypatch.setattr("insitu.grid.intake.import_plan.BUFFER_BYTES", 100_000)
    with servers_on(cache, 1, 2, 3) as cluster:
        plain = read_here(tmp_path, cluster)
        monkeypatch.setattr("insitu.grid.intake.partition_builder.MOST_TEXT_BYTES", 20_000)
        found = read_snapshot(head, cluster.address(), NO_OPTIONS, remote=hosts.remote())
    assert [info.rows for info in found.partitions] == [1000] * 3 and found.block_rows < plain.block_rows


def test_what_is_read_again_stays_on_its_nodes(head: Paths, hosts: StoreHosts) -> None:
    """A job trains there. Rows of a server that runs elsewhere by now come over the network."""
    remote = hosts.remote()
    with servers_on(drawings(90, 6), 1, 2, 3) as cluster:
        before = read_snapshot(head, cluster.address(), NO_OPTIONS, remote=remote)
        same = read_snapshot_again(head, before, remote)
        cluster.primaries, cluster.topology = [0] * 6, (2, 0)
        after = read_snapshot_again(head, before, remote)
    for found in (same, after):
        assert [p.owners for p in found.partitions] == [p.owners for p in before.partitions]
        assert checksums(found) == checksums(before)
    assert dict(same.origin or {})["remote_bytes"] == 0
    read = dict(after.origin or {})["nodes"]
    assert {node: each["remote_bytes"] > 0 for node, each in read.items()} == {
        "a": False,
        "b": True,
        "c": True,
    }


def test_hosts_write_the_partitions_alone_that_have_changed(
    head: Paths, hosts: StoreHosts, tmp_path: Path
) -> None:
    remote, rows = hosts.remote(), drawings(90, 6)

    def files(cache: CacheSpec) -> list[tuple[int, bytes]]:
        places = [(p.owners[0], cache.name, cache.version, p.index) for p in cache.partitions]
        paths = [hosts.paths[place[0]].partition(*place) for place in places]
        return [(path.stat().st_ino, path.read_bytes()) for path in paths]

    with servers_on(rows, 1, 2, 3) as cluster:
        first = read_snapshot(head, cluster.address(), NO_OPTIONS, remote=remote)
        before = files(first)
        rows.partitions[4].append(drawing(94))
        spoiled = hosts.paths[NodeId("b")].partition(NodeId("b"), first.name, 1, 1)
        spoiled.write_bytes(bytes(spoiled.stat().st_size))
        second = read_snapshot(head, cluster.address(), NO_OPTIONS, remote=remote)
        after = files(second)
        plain = read_here(tmp_path, cluster)
        third = read_snapshot_again(head, second, remote)
    assert [a[0] == b[0] for a, b in zip(before, after, strict=True)] == [
        True,
        False,
        True,
        True,
        False,
        True,
    ]
    assert checksums(second) == checksums(plain) and second.rows == 91
    assert [after[p][1] == before[p][1] for p in range(6)] == [True] * 4 + [False, True]
    assert files(third) == after and third.version == 3
    for paths in hosts.paths.values():
        assert not list(paths.staging.iterdir())


def test_a_node_that_is_gone_has_its_partitions_read_by_others(head: Paths, hosts: StoreHosts) -> None:
    remote = hosts.remote()
    with servers_on(drawings(90, 6), 1, 2, 3) as cluster:
        found = read_snapshot(head, cluster.address(), NO_OPTIONS, remote=remote)
        gone = [replace(p, owners=(NodeId("gone"),)) if p.index == 4 else p for p in found.partitions]
        again = read_snapshot_again(head, replace(found, partitions=tuple(gone)), remote)
    assert [p.owners[0] for p in again.partitions] == [
        "b" if p.index == 4 else p.owners[0] for p in found.partitions
    ]


def test_a_replicated_cache_is_read_here_and_sent(head: Paths, hosts: StoreHosts) -> None:
    rows, remote = drawings(100), hosts.remote()
    rows.replicated = True
    with servers_on(rows, 1, 2) as cluster:
        cache = read_snapshot(head, cluster.address(), NO_OPTIONS, remote=remote)
    assert {p.owners[0] for p in cache.partitions} == set(NAMES) and cache.rows == 100
    assert remote.sent and "nodes" not in dict(cache.origin or {})


def test_labels_of_nan_are_refused_on_hosts_too(head: Paths, hosts: StoreHosts) -> None:
    kind = binary_type("example.Rated", [("label", 6)])
    labels = [1.0, 2.0, float("nan"), 3.0]
    rows = [
        (number(4, "q", key), binary_object(kind, [("label", number(6, "d", label))]))
        for key, label in enumerate(labels)
    ]
    with (
        servers_on(FakeCache([rows[:2], rows[2:]], [kind]), 1, 2) as cluster,
        pytest.raises(SourceError, match=r"b: .*1 of the labels of rows .0, 2. are NaN"),
    ):
        read_snapshot(head, cluster.address(), NO_OPTIONS, remote=hosts.remote())
    assert_nothing_left(head, hosts)


def change_on_the_way(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Have something change after the head has planned, and before the nodes read."""

    def read(*arguments: Any) -> int:
        change()
        return read_on_hosts(*arguments)

    monkeypatch.setattr("insitu.grid.importing.importer.read_on_hosts", read)


def test_what_is_another_cache_by_then_is_named(
    head: Paths, hosts: StoreHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with servers_on(drawings(60, 6), 1, 2, 3) as cluster:

        def change() -> None:
            cluster.cache.types = []
            cluster.cache.partitions = [[(number(4, "q", p), number(4, "q", p))] for p in range(6)]

        with monkeypatch.context() as patch:
            change_on_the_way(patch, change)
            with pytest.raises(SourceError, match=r"columns of a table must stay.* value int64, after key"):
                read_snapshot(head, cluster.address(), NO_OPTIONS, remote=hosts.remote())
    assert_nothing_left(head, hosts)


def test_another_cluster_at_the_same_address_is_named(
    head: Paths, hosts: StoreHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_way = source.find_way
    with servers_on(drawings(60, 6), 1, 2, 3) as cluster, FakeCluster(drawings(60, 6), [7] * 6) as other:
        for _ in range(8):
            other.add()
        for server in other.servers[:7]:
            server.alive = False

        def lead_astray(*arguments: Any) -> Any:
            return other.address(7) if arguments[2] == "b" else find_way(*arguments)

        monkeypatch.setattr(source, "find_way", lead_astray)
        with pytest.raises(SourceError, match=r"b: All hosts must read the same servers"):
            read_snapshot(head, cluster.address(), NO_OPTIONS, remote=hosts.remote())
    assert_nothing_left(head, hosts)


def test_rows_that_are_lost_with_a_server_are_an_error(
    head: Paths, hosts: StoreHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_servers = RemoteImport.read_servers
    with servers_on(drawings(60, 6), 1, 2, 3) as cluster:

        def lose(*arguments: Any) -> Any:
            cluster.servers[2].alive = False
            cluster.servers[2].stop()
            cluster.primaries, cluster.topology = [0, 1, 0] * 2, (2, 0)
            cluster.cache.partitions[2] = cluster.cache.partitions[5] = []
            return read_servers(*arguments)

        monkeypatch.setattr(RemoteImport, "read_servers", lose)
        with pytest.raises(
            SourceError, match=r"Received: 40 of 60 after 1 server left.*Nothing was imported"
        ):
            read_snapshot(head, cluster.address(), NO_OPTIONS, remote=hosts.remote())
    assert_nothing_left(head, hosts)


def test_servers_that_only_this_host_reaches_are_named(
    head: Paths, hosts: StoreHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        cluster_of(2, drawings(60, 6)) as cluster,
        pytest.raises(SourceError, match=r"loopback interface alone, and a on another host.*--engine local"),
    ):
        read_snapshot(head, cluster.address(), NO_OPTIONS, remote=hosts.remote())
    assert_nothing_left(head, hosts)


def test_requests_of_other_forms_are_refused_without_their_passwords(hosts: StoreHosts) -> None:
    request = ServerRequest(
        "ignite://h/C", {"fill": ["a=b"]}, frozenset("n"), frozenset("ns"), {"P": "hidden"}
    )
    assert ServerRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    assert "hidden" not in repr(request)
    others = ({"near": 5, "options": "hidden"}, {"settings": None})
    for given in (None, [], {"settings": "hidden"}, *(request.to_json() | each for each in others)):
        with pytest.raises(InputError, match="has address, options, near, servers and settings") as caught:
            ServerRequest.from_json(given)
        assert "hidden" not in str(caught.value)
    with pytest.raises(TransferError, match="was started again in the middle of the import"):
        hosts.remote().ask(NodeId("a"), "read_servers", {"token": "t", "request": request.to_json()})
