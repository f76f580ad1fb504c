"""Stores are known by a file on their disk."""

from __future__ import annotations

import shutil
import stat
import threading
from pathlib import Path

import pytest

from insitu.base.errors import GridError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.grid import Catalog, bring_up, import_cache
from insitu.grid.catalog.store_identity import find_moved, make_store_id, read_store_id, read_stores

A, B = NodeId("node-0"), NodeId("node-1")


def test_an_id_is_made_once_and_is_its_owners_alone(paths: Paths):
    assert read_store_id(paths, A) is None
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.append(make_store_id(paths, A))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert made == [read_store_id(paths, A)] * 8 and make_store_id(paths, B) not in made
    assert stat.S_IMODE(paths.store_id(A).stat().st_mode) == 0o600
    assert [p.name for p in paths.node(A).iterdir()] == ["store-id"]


def test_a_damaged_id_is_named(paths: Paths):
    make_store_id(paths, A)
    paths.store_id(A).write_bytes(b"\xff\x00")
    with pytest.raises(GridError, match=r"store-id must hold.*32 hex digits.*Received.*insitu repair"):
        make_store_id(paths, A)


def test_a_copy_of_a_disk_is_named(paths: Paths, source: Path):
    bring_up(paths, 2)
    shutil.copy(paths.store_id(A), paths.store_id(B))
    for act in (lambda: bring_up(paths, 2), lambda: import_cache(paths, "a", [str(source)])):
        with pytest.raises(GridError, match="on node-0 and node-1, so one is a copy of the other"):
            act()
    paths.store_id(B).unlink()
    bring_up(paths, 2)
    assert len(set(read_stores(paths).values())) == 2


def test_a_store_that_comes_back_under_another_name_keeps_its_partitions(paths: Paths, source: Path):
    bring_up(paths, 2)
    import_cache(paths, "a", [str(source)], partitions=4)
    paths.node(B).rename(paths.node("node-2"))
    bring_up(paths, 3)
    owners = [p.owners for p in Catalog(paths).get("a").partitions]
    assert owners == [(A,), ("node-2",), (A,), ("node-2",)]
    for info in Catalog(paths).get("a").partitions:
        assert paths.partition(info.owners[0], "a", 1, info.index).stat().st_size == info.bytes


def test_stores_that_are_new_or_where_they_were_have_not_moved():
    assert find_moved({"1": A}, {A: "1", B: "2"}) == {}
    assert find_moved({"1": A, "2": B}, {B: "1"}) == {A: B}
