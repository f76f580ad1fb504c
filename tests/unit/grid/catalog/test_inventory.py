"""What a store holds, and what becomes of the catalogue when it was away."""

from __future__ import annotations

from pathlib import Path

from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.grid import import_cache
from insitu.grid.catalog.catalog import Catalog
from insitu.grid.catalog.inventory import list_held, reconcile_store
from insitu.grid.replicas.topology import bring_up

NODE = NodeId("node-1")


def states(paths: Paths) -> list[tuple[int, str]]:
    return [(c.partition, c.state) for c in Catalog(paths).placement("a", 1) if c.node == NODE]


def test_files_that_are_there_are_listed_by_the_manifest(paths: Paths, source: Path) -> None:
    bring_up(paths, 2)
    (cache,) = import_cache(paths, "a", [str(source)], partitions=4)
    own = [p for p in cache.partitions if p.owners == (NODE,)]
    assert list_held(paths, NODE) == {("a", 1): {p.index: (p.bytes, p.checksum) for p in own}}
    first, second = own
    paths.partition(NODE, "a", 1, first.index).unlink()
    with paths.partition(NODE, "a", 1, second.index).open("ab") as file:
        file.write(b"x")
    assert list_held(paths, NODE) == {("a", 1): {}}
    paths.manifest(NODE, "a", 1).write_bytes(b"damaged")
    assert list_held(paths, NODE) == {} and list_held(paths, NodeId("none")) == {}


def test_copies_are_lost_and_come_back(paths: Paths, source: Path) -> None:
    bring_up(paths, 2)
    (cache,) = import_cache(paths, "a", [str(source)], partitions=2, backups=1)
    held = list_held(paths, NODE)
    assert reconcile_store(Catalog(paths), NODE, held) == []
    missing = {key: {0: partitions[0]} for key, partitions in held.items()}
    assert reconcile_store(Catalog(paths), NODE, missing) == ["a version 1: 1 copies lost, 0 back"]
    assert states(paths) == [(0, "live"), (1, "lost")]
    # An empty disk in the place of the former one.
    assert reconcile_store(Catalog(paths), NODE, {}) == ["a version 1: 1 copies lost, 0 back"]
    assert states(paths) == [(0, "lost"), (1, "lost")]
    # Old data under the same name isn't taken for these.
    other = {key: {i: (size, "crc32:ffffffff") for i, (size, _) in p.items()} for key, p in held.items()}
    assert reconcile_store(Catalog(paths), NODE, other) == []
    assert reconcile_store(Catalog(paths), NODE, held) == ["a version 1: 0 copies lost, 2 back"]
    assert states(paths) == [(0, "live"), (1, "live")]
    # Who owns what first is as before.
    assert [p.owners for p in Catalog(paths).get("a").partitions] == [p.owners for p in cache.partitions]


def test_nodes_without_copies_change_nothing(paths: Paths, source: Path) -> None:
    import_cache(paths, "a", [str(source)])
    before = Catalog(paths).placement("a", 1)
    assert reconcile_store(Catalog(paths), NODE, {("a", 1): {0: (1, "crc32:00000000")}}) == []
    assert Catalog(paths).placement("a", 1) == before
