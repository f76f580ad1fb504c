"""The catalogue: versions, pins, and what it says when it can't be trusted."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from insitu.base.errors import CacheExists, CorruptCatalog, GridError, StorageFull, UnknownCache
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column, NodeId, PartitionInfo
from insitu.grid.catalog.catalog import Catalog


def spec(name: str = "digits", version: int = 1) -> CacheSpec:
    partition = PartitionInfo(0, 10, 100, "crc32:00000000", (NodeId("node-0"), NodeId("node-1")))
    columns = (Column("x", "uint8", (28, 28)), Column("name", "str"))
    return CacheSpec(name, version, columns, (partition,), 1, "name", 1.5, ("cat", "dog"))


def stored(paths: Paths, cache: CacheSpec) -> Path:
    """A folder for a version, as an import would have made."""
    folder = paths.version("node-0", cache.name, cache.version)
    folder.mkdir(parents=True)
    return folder


def test_what_is_published_comes_back_equal(paths: Paths) -> None:
    catalog = Catalog(paths)
    assert catalog.caches() == [] and not paths.catalog.exists()
    catalog.publish([spec("b"), spec("a")])
    assert catalog.caches() == [spec("a"), spec("b")]
    assert catalog.get("a") == spec("a") == catalog.get("a", 1)


def test_unknown_caches_are_told_with_the_nearest(paths: Paths) -> None:
    catalog = Catalog(paths)
    with pytest.raises(UnknownCache, match="none yet"):
        catalog.get("digits")
    catalog.publish([spec("digits/train"), spec("quickdraw")])
    with pytest.raises(UnknownCache, match="Did you mean quickdraw"):
        catalog.get("quickdrow")
    with pytest.raises(UnknownCache, match="Did you mean digits/train"):
        catalog.get("digits")
    with pytest.raises(UnknownCache, match=r"which has version 1\. Name quickdraw@1, or"):
        catalog.get("quickdraw", 3)


def test_publishing_all_or_nothing(paths: Paths) -> None:
    catalog = Catalog(paths)
    catalog.publish([spec("b")])
    with pytest.raises(CacheExists, match="--overwrite"):
        catalog.publish([spec("a"), spec("b", 2)])
    assert [c.name for c in catalog.caches()] == ["b"]


def test_changes_are_synced_before_they_are_acknowledged(paths: Paths) -> None:
    with Catalog(paths)._transaction() as database:
        assert database.execute("PRAGMA synchronous").fetchone()[0] == 3  # EXTRA: the end of the journal, too
        assert database.execute("PRAGMA journal_mode").fetchone()[0] == "delete"


def test_an_old_version_goes_at_once_unless_a_job_holds_it(paths: Paths) -> None:
    catalog = Catalog(paths)
    first = stored(paths, spec(version=1))
    catalog.publish([spec(version=1)])
    catalog.pin("digits", 1, "job-a")
    catalog.pin("digits", 1, "job-b")
    assert catalog.publish([spec(version=2)], overwrite=True) == []
    assert catalog.get("digits").version == 2 and catalog.get("digits", 1) == spec(version=1)
    assert catalog.pinned_by("digits") == ["job-a", "job-b"] == catalog.pinned_by("digits", 1)
    assert catalog.pinned_by("digits", 2) == []
    catalog.unpin("job-a")
    assert first.exists() and catalog.find("digits", 1)
    catalog.unpin("job-b")
    assert not first.exists() and catalog.find("digits", 1) is None
    assert catalog.publish([spec(version=3)], overwrite=True) == [spec(version=2)]


def test_the_latest_version_stays_when_unpinned(paths: Paths) -> None:
    catalog = Catalog(paths)
    folder = stored(paths, spec())
    catalog.publish([spec()])
    catalog.pin("digits", 1, "job")
    catalog.unpin("job")
    assert folder.exists() and catalog.get("digits")


def test_pinning_what_is_gone_is_refused(paths: Paths) -> None:
    with pytest.raises(UnknownCache, match="no version 1"):
        Catalog(paths).pin("digits", 1, "job")


def test_unpin_without_a_catalogue_does_nothing(paths: Paths) -> None:
    Catalog(paths).unpin("job")
    assert not paths.catalog.exists()


@pytest.mark.parametrize("damage", ["garbage", "truncated", "flipped", "newer"])
def test_a_damaged_catalogue_is_named(damage: str, paths: Paths) -> None:
    Catalog(paths).publish([spec()])
    data = bytearray(paths.catalog.read_bytes())
    if damage == "garbage":
        data[:100] = bytes(100)
    elif damage == "truncated":
        data = data[:5000]
    elif damage == "flipped":
        data[data.index(b'"crc32:0') + 2] ^= 1
    if damage == "newer":
        with sqlite3.connect(paths.catalog) as database:
            database.execute("PRAGMA user_version = 99")
        database.close()
    else:
        paths.catalog.write_bytes(data)
    with pytest.raises(CorruptCatalog, match=str(paths.catalog)):
        Catalog(paths).caches()


def test_a_full_disk_is_told_and_changes_nothing(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    Catalog(paths).publish([spec()])
    connect = sqlite3.connect

    def small(*arguments: object, **options: object) -> sqlite3.Connection:
        database = connect(*arguments, **options)  # type: ignore[call-overload]
        database.execute("PRAGMA max_page_count = 1")  # SQLite makes it the present size
        return database  # type: ignore[no-any-return]

    monkeypatch.setattr(sqlite3, "connect", small)
    large = [spec(f"cache-{i:0180}") for i in range(100)]
    with pytest.raises(StorageFull, match="No room"):
        Catalog(paths).publish(large)
    monkeypatch.undo()
    assert Catalog(paths).caches() == [spec()]


@pytest.mark.parametrize(("number", "kind"), [(errno.EROFS, GridError), (errno.ENOSPC, StorageFull)])
def test_a_catalogue_that_cannot_be_made_is_named(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[GridError]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("insitu.grid.catalog.catalog.make_file", refuse)
    with pytest.raises(kind, match=r"catalog\.sqlite can't be opened"):
        Catalog(paths).pin("a", 1, "j")


@pytest.mark.parametrize("damaged", [b"\xffqlite_autoindex", b"sqlite_autoinde\xff"])
def test_a_catalogue_with_a_damaged_name_is_named(paths: Paths, damaged: bytes) -> None:
    """SQLite says which index is damaged, in bytes that are no text: it ended in a UnicodeDecodeError."""
    Catalog(paths).publish([spec()])
    paths.catalog.write_bytes(paths.catalog.read_bytes().replace(b"sqlite_autoindex", damaged))
    with pytest.raises(CorruptCatalog, match="can't be read"):
        Catalog(paths).stored()
