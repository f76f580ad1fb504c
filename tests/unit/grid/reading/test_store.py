"""Copies that can't be trusted: found before a row is read, passed over where another copy is whole."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from grid_jobs import wait_for_repairs

from insitu.base.context import Context
from insitu.base.errors import CorruptPartition
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid import Catalog, bring_up, dataset, import_cache, verify_copies
from insitu.grid.partitions import AddressSpace, Partition
from insitu.grid.reading.store import announce_opening, open_copy


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_value(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_the_footer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = {
    truncate: "bytes, expected",
    flip_a_value: "column 'x' of its block 0 is damaged",
    flip_the_footer: "it can't be read as an Arrow file",
    remove: "can't be found",
}


@pytest.fixture
def source(tmp_path: Path) -> str:
    np.save(tmp_path / "a.npy", np.arange(3000))
    return str(tmp_path / "a.npy")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_before_a_row_is_read(
    damage: Callable[[Path], None], paths: Paths, source: str, alone: Context
) -> None:
    import_cache(paths, "a", [source], partitions=1)
    path = paths.partition("node-0", "a", 1, 0)
    damage(path)
    with pytest.raises(CorruptPartition, match=f"{path}.*{DAMAGES[damage]}"):
        next(iter(dataset("a", context=alone).batch(10)))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_backup_takes_the_place_of_a_damaged_copy(
    damage: Callable[[Path], None],
    paths: Paths,
    source: str,
    alone: Context,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bring_up(paths, 2)
    import_cache(paths, "a", [source], partitions=1, backups=1)
    damage(paths.partition("node-0", "a", 1, 0))
    path, other = (paths.partition(node, "a", 1, 0) for node in ("node-0", "node-1"))
    with caplog.at_level(logging.WARNING, "insitu"):
        for _ in range(2):
            seen = np.concatenate(list(dataset("a", context=alone).batch(100)))
            assert sorted(seen.tolist()) == list(range(3000))
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.match(
        r"The copy of partition 0 of a version 1 on node-0 can't be used: .*\. That on node-1 ", said
    )
    assert re.search(DAMAGES[damage], said)
    wait_for_repairs()
    assert path.read_bytes() == other.read_bytes()
    copy = open_copy(paths, Catalog(paths).get("a"), 0, NodeId("node-0"))
    assert copy.node == "node-0" and copy.local
    assert not any(problem for _, _, problem in verify_copies(paths, Catalog(paths).get("a")))


@pytest.mark.parametrize("order", ["as they are", "whole", "windows", "sample"])
def test_damage_in_the_middle_of_an_epoch_is_passed_over(
    order: str, paths: Paths, alone: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.save(tmp_path / "a.npy", np.arange(2000 * 512).reshape(2000, 512))
    bring_up(paths, 2)
    import_cache(paths, "a", [str(tmp_path / "a.npy")], partitions=1, backups=1)
    cache = Catalog(paths).get("a")
    path = paths.partition("node-0", "a", 1, 0)
    ds = dataset("a", context=alone)
    if order == "windows":
        ds = ds.shuffle(1, exact=False, window_bytes=1)
    elif order != "as they are":
        ds = ds.shuffle(1)
    batches = iter(ds.batch(1)) if order != "sample" else iter([])
    seen = [row for _, row in zip(range(2), batches, strict=False)]
    damage_in_place(path, cache, block=len(Partition.of_cache(path, cache, cache.partitions[0]).places) - 1)
    seen += list(batches) if order != "sample" else [ds.sample(2000)]
    assert sorted(np.concatenate(seen)[:, 0].tolist()) == list(range(0, 2000 * 512, 512))
    if order != "whole" or caplog.text:  # the block may have been used before it was damaged
        assert caplog.text.count("on node-0 can't be used: column 'x' of its block 7 is damaged") == 1


def damage_in_place(path: Path, cache: CacheSpec, block: int) -> None:
    """Change a byte, but neither size, time of change, inode nor device."""
    before = path.stat()
    place = Partition.of_cache(path, cache, cache.partitions[0]).places[block]
    with path.open("r+b") as file:
        file.seek(int(place["offset"] + place["metadata_bytes"]) + 64)
        file.write(b"damage")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_copy_whose_disk_fails_is_not_replaced(
    paths: Paths,
    source: str,
    alone: Context,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bring_up(paths, 2)
    import_cache(paths, "a", [source], partitions=1, backups=1)
    path = paths.partition("node-0", "a", 1, 0)
    inode, fault_in = path.stat().st_ino, AddressSpace.fault_in
    failing = [path]

    def fail(space: AddressSpace, start: int, size: int) -> None:
        if failing.pop() if failing else False:
            raise OSError(5, "Input/output error")
        fault_in(space, start, size)

    monkeypatch.setattr(AddressSpace, "fault_in", fail)
    seen = np.concatenate(list(dataset("a", context=alone).batch(100)))
    assert sorted(seen.tolist()) == list(range(3000)) and not failing
    assert "on node-0 can't be used: its block 0 can't be read (Input/output error)" in caplog.text
    wait_for_repairs()
    assert path.stat().st_ino == inode and "repaired" not in caplog.text


def test_what_opening_looks_at_is_asked_for_at_once(
    paths: Paths, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_cache(paths, "a", [source], partitions=3)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "insitu.grid.reading.store.os.posix_fadvise",
        lambda fd, start, size, advice: asked.append((start, size)),
    )
    remove(paths.partition("node-0", "a", 1, 1))
    announce_opening(paths, Catalog(paths).get("a"), [0, 1, 2], None)
    assert len(asked) == 4 and all(start == 0 for start, _ in asked)


def test_when_all_copies_are_damaged_each_is_named(paths: Paths, source: str) -> None:
    bring_up(paths, 2)
    import_cache(paths, "a", [source], partitions=1, backups=1)
    truncate(paths.partition("node-0", "a", 1, 0))
    remove(paths.partition("node-1", "a", 1, 0))
    with pytest.raises(CorruptPartition, match=r"None of the 2 copies.*node-0.*node-1"):
        open_copy(paths, Catalog(paths).get("a"), 0, None)


def test_another_schema_or_row_count_is_found_without_the_checksum(paths: Paths, source: str) -> None:
    from insitu.base.spec import Column

    import_cache(paths, "a", [source], partitions=1)
    path = paths.partition("node-0", "a", 1, 0)
    with pytest.raises(CorruptPartition, match="its block 0 has 3000 rows, expected 2999"):
        Partition(path, (Column("x", "int64"),), 2999)
    with pytest.raises(CorruptPartition, match="unlike those expected"):
        Partition(path, (Column("x", "int32"),), 3000)
