"""Copies that can't be trusted: found before a row is read, passed over where another copy is whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from insitu.context import Context
from insitu.errors import CorruptPartition
from insitu.grid import Catalog, bring_up, dataset, import_cache, verify_copies
from insitu.grid.store import announce_opening, open_copy
from insitu.paths import Paths
from insitu.spec import NodeId


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
    flip_a_value: "its checksum is crc32:.*expected crc32:",
    flip_the_footer: "its checksum is crc32:",
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
    with caplog.at_level(logging.WARNING, "insitu.grid"):
        seen = np.concatenate(list(dataset("a", context=alone).batch(100)))
    assert sorted(seen.tolist()) == list(range(3000))
    assert "node-0" in caplog.text and "Trying the copy on another node" in caplog.text
    copy = open_copy(paths, Catalog(paths).get("a"), 0, NodeId("node-0"))
    assert copy.node == "node-1" and not copy.local
    checks = {node: problem for _, node, problem in verify_copies(paths, Catalog(paths).get("a"))}
    assert checks["node-1"] is None and isinstance(checks["node-0"], CorruptPartition)


def test_what_opening_looks_at_is_asked_for_at_once(
    paths: Paths, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_cache(paths, "a", [source], partitions=3)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "insitu.grid.store.os.posix_fadvise", lambda fd, start, size, advice: asked.append((start, size))
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
    from insitu.grid.partitions import Partition
    from insitu.spec import Column

    import_cache(paths, "a", [source], partitions=1)
    path = paths.partition("node-0", "a", 1, 0)
    with pytest.raises(CorruptPartition, match="its block 0 has 3000 rows, expected 2999"):
        Partition(path, (Column("x", "int64"),), 2999)
    with pytest.raises(CorruptPartition, match="unlike those expected"):
        Partition(path, (Column("x", "int32"),), 3000)
