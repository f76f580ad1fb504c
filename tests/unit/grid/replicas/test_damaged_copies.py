"""Copies that can't be used are replaced by those of other hosts, in the middle of reading, too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from store_hosts import StoreHosts

from insitu.base.context import Context
from insitu.base.errors import CorruptPartition, GridError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid import Catalog, dataset, import_cache, rebalance_cache, set_store_finder
from insitu.grid.partitions import Partition
from insitu.grid.replicas import elsewhere
from insitu.grid.replicas.damaged_copies import restore_copy

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
ROWS = 3000


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreHosts]:
    monkeypatch.setattr(elsewhere, "_finders", [])
    with contextlib.closing(StoreHosts(tmp_path, "a", "b", "c")) as found:
        set_store_finder(lambda paths: found.remote())
        yield found


@pytest.fixture
def cache(paths: Paths, hosts: StoreHosts, tmp_path: Path) -> CacheSpec:
    """A cache whose two partitions are on a and b, in several blocks each."""
    np.save(tmp_path / "m.npy", np.arange(ROWS * 256).reshape(ROWS, 256))
    paths.home.mkdir(mode=0o700)
    hosts.stop("c")
    source = [str(tmp_path / "m.npy")]
    (cache,) = import_cache(paths, "m", source, partitions=2, backups=1, remote=hosts.remote())
    hosts.start("c")
    hosts.copy_catalog(paths)
    return cache


def change_unnoticed(path: Path, cache: CacheSpec) -> None:
    before = path.stat()
    partition = Partition.of_cache(path, cache, cache.partitions[0])
    place = partition.places[-1]
    with path.open("r+b") as file:
        file.seek(int(place["offset"] + place["metadata_bytes"]) + 64)
        file.write(b"damage")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(path: Path, cache: CacheSpec) -> None:
    os.truncate(path, path.stat().st_size - 8)


def remove(path: Path, cache: CacheSpec) -> None:
    path.unlink()


def remove_folder(path: Path, cache: CacheSpec) -> None:
    for each in path.parent.iterdir():
        each.unlink()
    path.parent.rmdir()


DAMAGES = {
    change_unnoticed: "column 'x' of its block",
    cut: "bytes, expected",
    remove: "it can't be found",
    remove_folder: "it can't be found",
}
Damage = Callable[[Path, CacheSpec], None]


def read(hosts: StoreHosts, order: str, node: NodeId | None = A) -> list[int]:
    """Return the first numbers of all rows, as a task on host a or a script there reads them."""
    ds = dataset("m", context=Context(paths=hosts.paths[A], node=node))
    if order == "sample":
        return sorted(ds.sample(ROWS)[:, 0].tolist())
    if order != "as they are":
        ds = ds.shuffle(1, exact=order == "whole")
    return sorted(np.concatenate(list(ds.batch(100)))[:, 0].tolist())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("order", ["as they are", "whole", "windows", "sample"])
def test_a_damaged_copy_is_replaced_by_that_of_another_host(
    hosts: StoreHosts, cache: CacheSpec, damage: Damage, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, other = (hosts.paths[node].partition(node, "m", 1, 0) for node in (A, B))
    damage(path, cache)
    for _ in range(2):
        assert read(hosts, order) == list(range(0, ROWS * 256, 256))
    said = [record.getMessage() for record in caplog.records if "partition 0 " in record.getMessage()]
    assert len(said) == 1 and DAMAGES[damage] in said[0], caplog.text
    assert said[0].startswith("The copy of partition 0 of m version 1 on a couldn't be used: ")
    assert said[0].endswith("It was replaced by that of b")
    assert path.read_bytes() == other.read_bytes()


def test_a_script_outside_a_job_reads_it_too(hosts: StoreHosts, cache: CacheSpec) -> None:
    change_unnoticed(hosts.paths[A].partition(A, "m", 1, 0), cache)
    assert read(hosts, "as they are", None) == list(range(0, ROWS * 256, 256))


def test_the_error_says_why_no_other_host_helps(hosts: StoreHosts, cache: CacheSpec) -> None:
    path, other = (hosts.paths[node].partition(node, "m", 1, 0) for node in (A, B))
    for each in (path, other):
        change_unnoticed(each, cache)
    before = path.read_bytes()
    with pytest.raises(
        CorruptPartition, match=r"'x' of its block.*on a isn't replaced.*has other bytes than"
    ):
        read(hosts, "as they are")
    address = hosts.stop("b")
    set_store_finder(lambda paths: hosts.remote(b=address))
    with pytest.raises(CorruptPartition, match=r"'x' of its block.*on a isn't replaced.*can't be fetched"):
        read(hosts, "windows")
    assert path.read_bytes() == before


def test_a_store_whose_disk_is_away_gets_nothing(hosts: StoreHosts, cache: CacheSpec) -> None:
    """Else the file would be in the folder that the disk is mounted at."""
    store = hosts.paths[A].node(A)
    store.rename(store.with_name(".away"))
    store.mkdir()
    with pytest.raises(CorruptPartition, match="can't be found"):
        read(hosts, "as they are")
    assert not list(store.iterdir())


def test_a_good_copy_stays(hosts: StoreHosts, cache: CacheSpec) -> None:
    path = hosts.paths[A].partition(A, "m", 1, 0)
    inode = path.stat().st_ino
    assert restore_copy(hosts.paths[A], cache, 0, A) == "a" and path.stat().st_ino == inode
    set_store_finder(lambda paths: None)
    path.unlink()
    with pytest.raises(GridError, match="no other copy of partition 0 of m version 1 is known"):
        restore_copy(hosts.paths[A], cache, 0, A)


def test_rebalancing_takes_rows_of_a_damaged_copy_from_the_other(
    paths: Paths, hosts: StoreHosts, cache: CacheSpec, caplog: pytest.LogCaptureFixture
) -> None:
    for index in range(2):
        path = hosts.paths[A].partition(A, "m", 1, index)
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    (report,) = rebalance_cache(paths, "m", hosts.remote())
    assert report.plan.moves and not report.failed
    for info in Catalog(paths).get("m").partitions:
        if C in info.owners:
            there = hosts.paths[C].partition(C, "m", 1, info.index)
            assert there.read_bytes() == hosts.paths[B].partition(B, "m", 1, info.index).read_bytes()
    assert "of m version 1 has other bytes at" in caplog.text
