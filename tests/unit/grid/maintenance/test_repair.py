"""A lost catalogue comes back from the stores, with the same bits."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_hosts import StoreHosts

from insitu.base.context import Context
from insitu.base.disk.durable import seal, unseal
from insitu.base.errors import CacheExists, CorruptCatalog, GridError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId, Topology
from insitu.grid import Catalog, bring_up, dataset, import_cache, load_topology, repair_catalog
from insitu.grid.catalog.manifests import read_manifest
from insitu.grid.catalog.orphaned_imports import sweep
from insitu.grid.catalog.store_identity import read_stores

A, B, C = (NodeId(f"node-{i}") for i in range(3))


@pytest.fixture
def cache(paths: Paths, source: Path) -> CacheSpec:
    """A cache in six partitions with one backup on three nodes, in its second version."""
    bring_up(paths, 3)
    import_cache(paths, "a", [str(source)], partitions=6, backups=1)
    (cache,) = import_cache(paths, "a", [str(source)], partitions=6, backups=1, overwrite=True)
    import_cache(paths, "b/c", [str(source)], partitions=2, compress="zstd")
    return cache


def rows_of(alone: Context, name: str = "a") -> list[list[Any]]:
    """The values of all rows, in the order in which a training reads them."""
    batches = dataset(name, context=alone).shuffle(seed=3).batch(100)
    return [np.asarray(values[name]).tolist() for values, *_ in batches for name in sorted(values)]


def test_a_lost_catalogue_comes_back_with_the_same_rows(paths: Paths, cache: CacheSpec, alone: Context):
    before, stored = rows_of(alone), Catalog(paths).stored()
    paths.catalog.unlink()
    planned = repair_catalog(paths, dry_run=True)
    assert planned.restored == stored and not paths.catalog.exists()
    calls: list[tuple[int, int]] = []
    report = repair_catalog(paths, progress=lambda done, total: calls.append((done, total)))
    assert report.restored == stored and report.complete and not report.problems
    assert Catalog(paths).stored() == stored and Catalog(paths).caches() == stored
    assert rows_of(alone) == before and calls[-1] == (5, 5)
    again = repair_catalog(paths)
    assert again.known == stored and not again.restored and not again.manifests_written
    assert Catalog(paths).stores().keys() == set(read_stores(paths).values())


def test_the_list_of_nodes_comes_back_too(paths: Paths, cache: CacheSpec):
    paths.catalog.unlink()
    paths.topology.unlink()
    assert repair_catalog(paths).nodes_listed == [A, B, C] and load_topology(paths).nodes == (A, B, C)


@pytest.mark.parametrize("damage", [b"garbage" * 1000, None])
def test_a_damaged_catalogue_is_kept_aside(paths: Paths, cache: CacheSpec, damage: bytes | None):
    stored = Catalog(paths).stored()
    data = damage or paths.catalog.read_bytes().replace(b'"block_rows"', b'"block_rowz"')
    paths.catalog.write_bytes(data)
    with pytest.raises(CorruptCatalog, match="`insitu repair`"):
        Catalog(paths).stored()
    report = repair_catalog(paths)
    assert report.set_aside is not None and report.set_aside.read_bytes() == data
    assert Catalog(paths).stored() == stored


def test_a_catalogue_of_a_newer_insitu_is_left_as_it_is(paths: Paths, cache: CacheSpec):
    database = sqlite3.connect(paths.catalog)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(CorruptCatalog, match=r"Received: 99. Use the newer insitu"):
        repair_catalog(paths)
    assert paths.catalog.exists()


def test_an_older_copy_of_the_catalogue_learns_what_is_newer(paths: Paths, cache: CacheSpec, source: Path):
    old = paths.catalog.read_bytes()
    (newer,) = import_cache(paths, "a", [str(source)], partitions=6, backups=1, overwrite=True)
    paths.catalog.write_bytes(old)
    sweep(paths)
    report = repair_catalog(paths)
    assert report.restored == [newer] and Catalog(paths).get("a") == newer


def kill_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let imports end at a call, as by a kill: nothing is cleaned up."""

    def end(*_: object, **__: object) -> None:
        raise SystemExit(9)

    monkeypatch.setattr(f"insitu.grid.importing.importer.{name}", end)
    monkeypatch.setattr("insitu.grid.importing.importer.remove_unpublished", lambda *_: None)


def test_a_version_that_was_never_published_is_named_and_left_out(
    paths: Paths, cache: CacheSpec, source: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        kill_at(patch, "Catalog.publish")
        import_cache(paths, "a", [str(source)], partitions=6, backups=1, overwrite=True)
    paths.catalog.unlink()
    report = repair_catalog(paths, dry_run=True)
    assert report.unpublished == [("a", 3)] and report.complete
    with_it = repair_catalog(paths, dry_run=True, with_unpublished=True)
    assert ("a", 3) in [(c.name, c.version) for c in with_it.restored]
    repair_catalog(paths)
    assert Catalog(paths).get("a") == cache
    sweep(paths)
    assert not paths.version(A, "a", 3).exists()


def test_killed_after_the_transaction_the_manifests_are_marked_later(
    paths: Paths, cache: CacheSpec, source: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        kill_at(patch, "commit_manifests")
        import_cache(paths, "a", [str(source)], partitions=6, backups=1, overwrite=True)
    assert Catalog(paths).get("a").version == 3
    sweep(paths)
    assert read_manifest(paths.manifest(A, "a", 3)).state == "prepared"
    assert len(repair_catalog(paths).manifests_written) == 3
    assert read_manifest(paths.manifest(A, "a", 3)).state == "committed"


def test_a_damaged_manifest_is_passed_over_and_written_again(paths: Paths, cache: CacheSpec, alone: Context):
    before = rows_of(alone)
    path = paths.manifest(B, "a", 2)
    path.write_bytes(path.read_bytes()[:-5])
    paths.catalog.unlink()
    report = repair_catalog(paths)
    assert any(str(path) in problem for problem in report.problems) and report.complete
    assert report.manifests_written == [path] and Catalog(paths).get("a") == cache
    assert read_manifest(path).held == tuple(p.index for p in cache.partitions if B in p.owners)
    assert rows_of(alone) == before


def test_where_a_manifest_cannot_be_trusted_the_bytes_are_checked(paths: Paths, cache: CacheSpec):
    lost = next(p for p in cache.partitions if B in p.owners)
    file = paths.partition(B, "a", 2, lost.index)
    file.write_bytes(bytes(lost.bytes))
    paths.manifest(B, "a", 2).unlink()
    paths.catalog.unlink()
    report = repair_catalog(paths)
    assert any("its checksum is" in problem for problem in report.problems)
    assert B not in Catalog(paths).get("a").partitions[lost.index].owners and report.complete


def test_versions_with_missing_partitions_are_left_out_until_their_node_is_back(
    paths: Paths, cache: CacheSpec
):
    stored = Catalog(paths).stored()
    shutil.move(paths.node(A), paths.home / "away")
    paths.catalog.unlink()
    report = repair_catalog(paths)
    assert [c.name for c in report.restored] == ["a"], "it has backups"
    assert report.incomplete == [("b/c", 1, "1 partition is missing: 0")] and not report.complete
    sweep(paths)
    shutil.move(paths.home / "away", paths.node(A))
    assert repair_catalog(paths).complete
    assert Catalog(paths).get("b/c") == stored[-1]


def test_no_manifest_that_can_be_read_leaves_a_version_out(paths: Paths, cache: CacheSpec):
    paths.catalog.unlink()
    for node in (A, B):
        paths.manifest(node, "b/c", 1).unlink()
    report = repair_catalog(paths)
    assert report.incomplete == [("b/c", 1, "none of its manifests can be read")]
    sweep(paths)
    assert paths.version(A, "b/c", 1).exists()


def test_caches_of_before_get_manifests(paths: Paths, cache: CacheSpec):
    for path in paths.nodes.rglob("manifest.json"):
        path.unlink()
    report = repair_catalog(paths)
    assert len(report.manifests_written) == 5 and report.complete
    stored = Catalog(paths).stored()
    paths.catalog.unlink()
    repair_catalog(paths)
    assert Catalog(paths).stored() == stored


def test_the_id_of_a_store_comes_back_from_its_manifests(paths: Paths, cache: CacheSpec):
    before = read_stores(paths)
    paths.store_id(A).unlink()
    paths.store_id(B).write_text("?")
    report = repair_catalog(paths)
    assert report.stores_identified == [A, B] and read_stores(paths) == before


def test_manifests_of_another_store_are_named(paths: Paths, cache: CacheSpec):
    path = paths.manifest(C, "a", 2)
    path.write_bytes(seal({**unseal(path.read_bytes()), "store": "0" * 32}))
    report = repair_catalog(paths)
    assert any(f"names the store {'0' * 32}" in problem for problem in report.problems)
    assert read_manifest(path).store == read_stores(paths)[C]


def test_a_copy_of_a_disk_is_refused(paths: Paths, cache: CacheSpec):
    shutil.copytree(paths.node(A), paths.node("node-9"))
    with pytest.raises(GridError, match="node-0 and node-9, so one is a copy"):
        repair_catalog(paths)


def test_nothing_is_no_problem(paths: Paths):
    report = repair_catalog(paths)
    assert report.complete and not report.restored and not paths.catalog.exists()


@pytest.fixture
def hosts(paths: Paths, tmp_path: Path) -> Iterator[StoreHosts]:
    """Three hosts with a cache `h` on them; each partition is on two."""
    np.save(tmp_path / "h.npy", np.arange(3000))
    paths.home.mkdir(mode=0o700, exist_ok=True)
    with contextlib.closing(StoreHosts(tmp_path, "a", "b", "c")) as found:
        source = [str(tmp_path / "h.npy")]
        import_cache(paths, "h", source, partitions=6, backups=1, remote=found.remote())
        yield found


def test_a_lost_catalogue_is_put_together_from_the_manifests_of_agents(
    paths: Paths, hosts: StoreHosts
) -> None:
    cache = Catalog(paths).get("h")
    stores = Catalog(paths).stores()
    paths.catalog.unlink()
    # What was fetched for a job is no owner's copy.
    (index,) = (p.index for p in cache.partitions[:2] if "c" not in p.owners)
    hosts.remote().fetch(cache, {NodeId("c"): [index]})
    hosts.stop("a")
    report = repair_catalog(paths, dry_run=True, remote=hosts.remote())
    assert report.complete and not paths.catalog.exists()
    report = repair_catalog(paths, remote=hosts.remote())
    assert report.complete and not report.problems
    found = Catalog(paths).get("h")
    for old, new in zip(cache.partitions, found.partitions, strict=True):
        assert new == replace(old, owners=tuple(node for node in old.owners if node != "a"))
    assert Catalog(paths).stores() == {store: node for store, node in stores.items() if node != "a"}
    assert load_topology(paths) == Topology()


def test_an_import_does_not_replace_what_a_lost_catalogue_had(
    paths: Paths, hosts: StoreHosts, tmp_path: Path
) -> None:
    source = [str(tmp_path / "h.npy")]
    paths.catalog.unlink()
    import_cache(paths, "other", source, remote=hosts.remote())
    with pytest.raises(CacheExists, match="hold h version 1, which the catalogue has lost"):
        import_cache(paths, "h", source, remote=hosts.remote())
    assert repair_catalog(paths, remote=hosts.remote()).complete and Catalog(paths).get("h").version == 1
    paths.catalog.unlink()
    assert import_cache(paths, "h", source, overwrite=True, remote=hosts.remote())[0].version == 2
    # What was deleted isn't lost, also where a store still has it.
    Catalog(paths).delete("h")
    assert import_cache(paths, "h", source, remote=hosts.remote())[0].version == 3


def test_what_no_agent_has_is_left_out_until_it_is_back(paths: Paths, hosts: StoreHosts) -> None:
    cache = Catalog(paths).get("h")
    paths.catalog.unlink()
    addresses = [hosts.stop(name) for name in ("a", "b")]
    report = repair_catalog(paths, remote=hosts.remote())
    assert [(name, version) for name, version, _ in report.incomplete] == [("h", 1)]
    assert "2 partitions are missing" in report.incomplete[0][2] and Catalog(paths).find("h") is None
    assert len(addresses) == 2
    hosts.start("a")
    assert repair_catalog(paths, remote=hosts.remote()).complete
    assert Catalog(paths).get("h").rows == cache.rows


def test_a_damaged_manifest_on_a_host_is_written_again_from_what_lies_beside_it(
    paths: Paths, hosts: StoreHosts
) -> None:
    cache = Catalog(paths).get("h")
    b = hosts.paths[NodeId("b")]
    manifest = b.manifest("b", "h", 1)
    held, *_ = before = read_manifest(manifest).held
    manifest.write_bytes(b"x")
    # Nothing of it is trusted before it is verified.
    file = b.partition("b", "h", 1, held)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    for is_lost in (False, True):
        if is_lost:
            paths.catalog.unlink()
            manifest.write_bytes(b"x")
        dry = repair_catalog(paths, dry_run=True, remote=hosts.remote())
        assert len(dry.manifests_written) == 1 and manifest.read_bytes() == b"x"
        report = repair_catalog(paths, remote=hosts.remote())
        assert report.complete and "h version 1 on b: " in report.problems[0]
        assert "is corrupt" in report.problems[1]
        found = read_manifest(manifest)
        assert (found.held, found.state) == (tuple(i for i in before if i != held), "committed")
        assert not repair_catalog(paths, dry_run=True, remote=hosts.remote()).manifests_written
    owners = {p.index: p.owners for p in Catalog(paths).get("h").partitions}
    lost = {p.index: tuple(o for o in p.owners if (o, p.index) != ("b", held)) for p in cache.partitions}
    assert {i: set(o) for i, o in owners.items()} == {i: set(o) for i, o in lost.items()}
