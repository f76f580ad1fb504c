"""An import onto other hosts: what a local one writes, on the hosts that own it, or nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_hosts import StoreHosts, latest

from insitu.base.errors import GridError, StorageFull, TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid import Catalog, bring_up, dataset, delete_cache, import_cache, tidy_store
from insitu.grid.catalog.manifests import read_manifest
from insitu.grid.catalog.orphaned_imports import find_ended_imports, list_staged_imports
from insitu.grid.importing import import_targets
from insitu.grid.serving.store_actions import end_import
from insitu.grid.stores.store_settings import set_quota
from insitu.grid.transfer import RemoteStores

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[StoreHosts]:
    with contextlib.closing(StoreHosts(tmp_path, "a", "b", "c")) as found:
        yield found


def do_import(head: Paths, remote: RemoteStores, source: Path, **options: Any) -> CacheSpec:
    (cache,) = import_cache(head, "d", [str(source)], remote=remote, **options)
    return cache


def everything(paths: Paths) -> list[str]:
    return sorted(str(p.relative_to(paths.nodes)) for p in paths.nodes.rglob("part-*"))


def test_the_bytes_are_those_of_a_local_import(
    head: Paths, hosts: StoreHosts, source: Path, tmp_path: Path
) -> None:
    remote = hosts.remote()
    cache = do_import(head, remote, source, partitions=6, backups=1)
    local = Paths(tmp_path / "local")
    bring_up(local, 3)
    (expected,) = import_cache(local, "d", [str(source)], partitions=6, backups=1)
    assert [p.checksum for p in cache.partitions] == [p.checksum for p in expected.partitions]
    assert Catalog(head).get("d") == cache
    for info in cache.partitions:
        assert len(info.owners) == 2
        for node in info.owners:
            file = hosts.paths[node].partition(node, "d", 1, info.index)
            there = local.partition(expected.partitions[info.index].owners[0], "d", 1, info.index)
            assert file.read_bytes() == there.read_bytes()
            assert hosts.paths[node].verified(node, "d", 1, info.index).exists()
    for node, paths in hosts.paths.items():
        manifest = read_manifest(paths.manifest(node, "d", 1))
        held = tuple(info.index for info in cache.partitions if node in info.owners)
        assert (manifest.state, manifest.held, manifest.cache) == ("committed", held, cache)
        assert list_staged_imports(paths) == []
    assert set(remote.sent) == {A, B, C} and remote.sent.total() > cache.rows * 2 * 8
    # Nothing of it stays where the import ran, and the catalogue knows the stores.
    assert everything(head) == [] and list(head.staging.iterdir()) == []
    assert set(Catalog(head).stores().values()) == {A, B, C}


def test_a_home_of_the_head_may_have_a_store_of_its_own(head: Paths, hosts: StoreHosts, source: Path) -> None:
    addresses = {node: server.address for node, server in hosts.servers.items()}
    remote = RemoteStores(addresses, b"a secret that nobody can guess..", here=["a"])
    cache = do_import(head, remote, source, partitions=3, backups=2)
    for info in cache.partitions:
        for node in info.owners:
            paths = head if node == A else hosts.paths[node]
            assert paths.partition(node, "d", 1, info.index).stat().st_size == info.bytes
    assert hosts.files("a") == {}


def test_without_an_agent_that_is_alive_nothing_is_imported(head: Paths, source: Path) -> None:
    with pytest.raises(GridError, match=r"needs an agent that is alive. Received: none"):
        do_import(head, RemoteStores({}, b"x" * 16), source)
    assert latest(head, "d") == 0


@pytest.mark.parametrize("reason", ["quota", "disk"])
def test_a_host_without_room_is_named_before_anything_is_read(
    head: Paths, hosts: StoreHosts, source: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "quota":
        set_quota(hosts.paths[B], B, 100)
    else:
        usage = os.statvfs("/")
        from insitu.grid.serving import store_actions

        free = {str(hosts.paths[B].node("b")): 100}
        monkeypatch.setattr(
            store_actions, "_free_bytes", lambda path: free.get(str(path), usage.f_bavail * usage.f_frsize)
        )
    with pytest.raises(StorageFull, match=r"No room is left (in the store|on the disk) of b.*: about \d+"):
        do_import(head, hosts.remote(), source)
    assert latest(head, "d") == 0 and hosts.files("a") == hosts.files("c") == {}


def test_an_owner_that_is_lost_in_the_middle_leaves_the_old_version(
    head: Paths, hosts: StoreHosts, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = do_import(head, hosts.remote(), source, partitions=6)
    files = {name: hosts.files(name) for name in "ac"}
    remote, prepare = hosts.remote(), RemoteStores.prepare

    def lose_b(self: RemoteStores, *arguments: Any) -> None:
        hosts.stop("b")
        prepare(self, *arguments)

    monkeypatch.setattr(RemoteStores, "prepare", lose_b)
    with pytest.raises(TransferError, match=r"Received: b: .*(failed|said nothing)"):
        do_import(head, remote, source, partitions=6, overwrite=True)
    assert Catalog(head).get("d") == old
    # The others have removed what had come, b keeps it until the head tells it.
    assert {name: hosts.files(name) for name in "ac"} == files
    (left,) = list_staged_imports(hosts.paths[B])
    assert find_ended_imports(head, [left]) == [(left, False)]
    hosts.start("b")
    end_import(hosts.paths[B], B, left.cache, left.token, published=False)
    assert list_staged_imports(hosts.paths[B]) == []
    assert read_manifest(hosts.paths[B].manifest(B, "d", 1)).state == "committed"
    monkeypatch.undo()
    new = do_import(head, hosts.remote(), source, partitions=6, overwrite=True)
    assert Catalog(head).get("d") == new and new.version > old.version


@pytest.mark.parametrize("here", [(), (B,)])
def test_an_import_that_began_before_the_head_was_replaced_publishes_nothing(
    head: Paths, hosts: StoreHosts, source: Path, here: tuple[NodeId, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has told this home: its head had ended."""
    remote, put_in_place = hosts.remote(number=0, here=here), import_targets.ClusterOwners.put_in_place
    old = do_import(head, remote, source, partitions=6)

    def replace_head(*arguments: Any) -> None:
        hosts.numbers[B] = 1
        put_in_place(*arguments)

    monkeypatch.setattr(import_targets.ClusterOwners, "put_in_place", replace_head)
    with pytest.raises(TransferError, match=r"Received: b: .*number 1 of the cluster.*one of number 0"):
        do_import(head, remote, source, partitions=6, overwrite=True)
    assert Catalog(head).get("d") == old
    monkeypatch.undo()
    with pytest.raises(TransferError, match="whose head was replaced"):
        remote.release(B, old, [0])
    assert do_import(head, hosts.remote(number=1), source, partitions=6, overwrite=True).version > old.version


def test_an_owner_that_is_lost_while_rows_are_sent_is_named(
    head: Paths, hosts: StoreHosts, source: Path
) -> None:
    address = hosts.stop("b")
    with pytest.raises(TransferError, match=r"Received: b: .*(failed|said nothing)"):
        do_import(head, hosts.remote(b=address), source, partitions=6)
    assert latest(head, "d") == 0 and hosts.files("a") == hosts.files("c") == {}


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("where", ["publish", "end"])
def test_what_a_killed_import_has_brought_is_ended_by_the_head(
    head: Paths, hosts: StoreHosts, source: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Before the transaction of the catalogue it is removed, after it is published."""

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    monkeypatch.setattr(import_targets.ClusterOwners, "end", kill)
    if where == "publish":
        monkeypatch.setattr(Catalog, "publish", kill)
    with pytest.raises(Killed):
        do_import(head, hosts.remote(), source, partitions=6)
    for node, paths in hosts.paths.items():
        (left,) = list_staged_imports(paths)
        assert left.version == 1 and read_manifest(paths.manifest(node, "d", 1)).state == "prepared"
        ((found, published),) = find_ended_imports(head, [left])
        assert (found, published) == (left, where == "end")
        for _ in range(2):  # a message may come twice
            end_import(paths, node, left.cache, left.token, published=published)
        assert list_staged_imports(paths) == []
        assert paths.version(node, "d", 1).exists() == published
        if published:
            assert read_manifest(paths.manifest(node, "d", 1)).state == "committed"


def test_an_import_that_is_alive_is_not_ended(
    head: Paths, hosts: StoreHosts, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    publish = Catalog.publish

    def look(self: Catalog, *arguments: Any, **options: Any) -> Any:
        found.append(find_ended_imports(head, list_staged_imports(hosts.paths[A])))
        return publish(self, *arguments, **options)

    monkeypatch.setattr(Catalog, "publish", look)
    do_import(head, hosts.remote(), source)
    assert found == [[]]


def test_versions_that_were_replaced_or_deleted_go_from_the_hosts(
    head: Paths, hosts: StoreHosts, source: Path
) -> None:
    do_import(head, hosts.remote(), source)
    pinned = do_import(head, hosts.remote(), source, overwrite=True)
    Catalog(head).pin("d", pinned.version, "job")
    last = do_import(head, hosts.remote(), source, overwrite=True)
    hosts.copy_catalog(head)
    assert tidy_store(hosts.paths[A], A) == [("d", 1)]
    assert {v.name for v in hosts.paths[A].cache_store("a", "d").iterdir()} == {"v2", "v3"}
    Catalog(head).unpin("job")
    delete_cache(head, "d")
    assert tidy_store(hosts.paths[A], A) == [], "its copy of the catalogue is an older one"
    hosts.copy_catalog(head)
    assert tidy_store(hosts.paths[A], A) == [("d", 2), ("d", 3)] and hosts.files("a") == {}
    # b wasn't there when the cache was deleted, and a new one has come since.
    again = do_import(head, hosts.remote(), source)
    assert again.version > last.version
    hosts.copy_catalog(head)
    tidy_store(hosts.paths[B], B)
    assert {v.name for v in hosts.paths[B].cache_store("b", "d").iterdir()} == {f"v{again.version}"}


def test_rows_are_appended_on_the_hosts_that_have_the_others(
    head: Paths, hosts: StoreHosts, source: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "more.npz", **{k: v[:50] for k, v in np.load(source).items()})
    before = do_import(head, hosts.remote(), source, partitions=3, backups=1)
    after = do_import(head, hosts.remote(), tmp_path / "more.npz", append=True, partitions=3)
    assert after.partitions[:3] == before.partitions and after.rows == before.rows + 50
    hosts.copy_catalog(head)
    for node, paths in hosts.paths.items():
        tidy_store(paths, node)
        for info in after.partitions:
            if node in info.owners:
                assert paths.partition(node, "d", 2, info.index).stat().st_size == info.bytes
    hosts.stop("b")
    with pytest.raises(GridError, match=r"all nodes that hold some must be alive. Received: d, of which b"):
        do_import(head, hosts.remote(), tmp_path / "more.npz", append=True)


def test_parts_of_a_split_are_published_together(head: Paths, hosts: StoreHosts, source: Path) -> None:
    parts = import_cache(
        head, "d", [str(source)], split={"train": 0.8, "test": 0.2}, partitions=3, remote=hosts.remote()
    )
    assert [cache.name for cache in parts] == ["d/train", "d/test"]
    assert sum(cache.rows for cache in parts) == len(np.load(source)["id"])
    assert all(list_staged_imports(paths) == [] for paths in hosts.paths.values())


def test_rows_are_read_where_they_were_fetched(head: Paths, hosts: StoreHosts, source: Path) -> None:
    cache = do_import(head, hosts.remote(), source, partitions=4)
    with pytest.raises(GridError, match=r"of which 4 partitions are on a, b, c alone. `insitu fetch d`"):
        dataset("d", features="id", label=None, paths=head)
    assert hosts.remote().fetch_here(head, NodeId("node-0"), cache, range(4)).bytes == cache.bytes
    rows = [row for batch in dataset("d", features="id", label=None, paths=head).batch(64) for row in batch]
    assert sorted(int(row) for row in rows) == sorted(np.load(source)["id"].tolist())
