"""Catalogues of before are read as they are, and brought up to date by the next change."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import zlib

import pytest

from insitu.base.errors import CorruptCatalog, GridError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column, NodeId, PartitionInfo, PlacedCopy
from insitu.grid import Catalog
from insitu.grid.catalog.catalog_schema import owners_by_partition
from insitu.grid.layout import flip_copies

A, B, C = (NodeId(name) for name in "abc")


def spec(name: str, version: int = 1) -> CacheSpec:
    partitions = (PartitionInfo(0, 10, 100, "crc32:0", (B, A)), PartitionInfo(1, 5, 50, "crc32:1", (A,)))
    return CacheSpec(name, version, (Column("x", "int64"),), partitions, 1, None, 1.5, ("cat",), 7)


def write_first_format(paths: Paths, *caches: tuple[CacheSpec, bool], damage: bool = False) -> None:
    """Make the catalogue that the first insitu made."""
    paths.home.mkdir(mode=0o700, exist_ok=True)
    database = sqlite3.connect(paths.catalog)
    database.executescript(
        "CREATE TABLE versions (cache TEXT NOT NULL, version INTEGER NOT NULL, latest INTEGER NOT NULL, "
        "spec TEXT NOT NULL, crc32 INTEGER NOT NULL, PRIMARY KEY (cache, version));"
        "CREATE TABLE pins (cache TEXT NOT NULL, version INTEGER NOT NULL, job TEXT NOT NULL, "
        "PRIMARY KEY (cache, version, job)); PRAGMA user_version = 1;"
    )
    for cache, latest in caches:
        text = json.dumps(cache.to_json())
        row = (cache.name, cache.version, latest, text, zlib.crc32(text.encode()) ^ damage)
        database.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?)", row)
    database.execute("INSERT INTO pins VALUES ('a', 1, 'job')")
    database.commit()
    database.close()


def test_a_catalogue_of_before_is_read_and_brought_up_to_date(paths: Paths):
    write_first_format(paths, (spec("a", 1), False), (spec("a", 2), True), (spec("b"), True))
    before = paths.catalog.read_bytes()
    catalog = Catalog(paths)
    everything = [spec("a", 1), spec("a", 2), spec("b")]
    assert catalog.stored() == everything and catalog.caches() == everything[1:]
    assert catalog.placement("a", 2) == [PlacedCopy(0, B), PlacedCopy(0, A), PlacedCopy(1, A)]
    assert catalog.stores() == {} and paths.catalog.read_bytes() == before, "reading changes nothing"
    catalog.pin("b", 1, "job-2")
    assert paths.catalog.read_bytes() != before
    assert catalog.stored() == everything and catalog.caches() == everything[1:]
    assert catalog.pinned_by("a") == ["job"] and catalog.get("a").partitions[0].owners == (B, A)


def test_a_damaged_entry_stops_the_change_and_stays(paths: Paths):
    write_first_format(paths, (spec("a"), True), damage=True)
    before = paths.catalog.read_bytes()
    with pytest.raises(CorruptCatalog, match=r"checksum differs.*`insitu repair`"):
        Catalog(paths).publish([spec("b")])
    assert paths.catalog.read_bytes() == before


def test_owners_follow_the_placement_and_the_specification_stays(paths: Paths):
    catalog = Catalog(paths)
    catalog.publish([spec("a")])
    catalog.change_placement("a", 1, lambda copies: [*copies, PlacedCopy(0, C, "copying")])
    assert catalog.get("a") == spec("a"), "bytes on the way are no owner's"
    catalog.change_placement("a", 1, lambda copies: flip_copies(copies, [(0, B, C)]))
    first, second = catalog.get("a").partitions
    assert (first.owners, second.owners) == ((C, A), (A,)) and first.checksum == "crc32:0"
    catalog.change_placement("a", 1, lambda copies: [PlacedCopy(c.partition, c.node, "lost") for c in copies])
    assert catalog.get("a").partitions[1].owners == (A,), "an error then names the node"
    with pytest.raises(GridError, match=r"keeps an owner.*partition 1 of a version 1"):
        catalog.change_placement("a", 1, lambda copies: copies[:2])
    assert len(catalog.placement("a", 1)) == 3


def test_what_is_dropped_leaves_no_placement(paths: Paths):
    catalog = Catalog(paths)
    catalog.publish([spec("a")])
    catalog.publish([spec("a", 2)], overwrite=True)
    assert catalog.placement("a", 1) == [] and len(catalog.placement("a", 2)) == 3
    catalog.clear()
    assert catalog.placement("a", 2) == [] and catalog.stored() == []


def test_copies_follow_stores_that_swap_their_nodes(paths: Paths):
    catalog = Catalog(paths)
    catalog.publish([spec("a")])
    catalog.record_stores({"1": A, "2": B}, {})
    catalog.record_stores({"1": B, "2": A}, {A: B, B: A})
    assert [p.owners for p in catalog.get("a").partitions] == [(A, B), (B,)]
    assert catalog.stores() == {"1": B, "2": A}
    # The disk of a is put into b, whose own is gone.
    catalog.record_stores({"2": B}, {A: B})
    assert [p.owners for p in catalog.get("a").partitions] == [(B,), (B,)] and catalog.stores() == {"2": B}


def test_the_highest_version_that_is_restored_is_the_latest(paths: Paths):
    catalog = Catalog(paths)
    catalog.publish([spec("a", 2)])
    catalog.restore([spec("a", 1), spec("b", 3), spec("b", 4)])
    assert catalog.caches() == [spec("a", 2), spec("b", 4)] and len(catalog.stored()) == 4


def test_owners_are_live_and_lost_ones_stand_in_for_them():
    copies = [PlacedCopy(0, B), PlacedCopy(0, A, "lost"), PlacedCopy(0, C), PlacedCopy(1, A, "lost")]
    assert owners_by_partition([*copies, PlacedCopy(1, B, "copying")]) == {0: (B, C), 1: (A,)}


def test_there_are_three_states():
    with pytest.raises(ValueError, match=r"live, copying, lost.*'gone'"):
        PlacedCopy(0, A, "gone")  # type: ignore[arg-type]


def test_reading_the_catalogue_loads_nothing_heavy():
    """Commands and controllers read it, and start fast."""
    program = "import sys; from insitu.grid import Catalog; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
