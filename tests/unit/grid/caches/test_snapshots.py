"""Snapshots of caches of Ignite, from servers that speak the protocol in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from grid_jobs import job_context, write_own_map
from ignite_wire import (
    FakeCache,
    FakeServer,
    binary_object,
    binary_type,
    cluster_of,
    drawings,
    number,
)

from insitu.base.context import Context
from insitu.base.errors import InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.extensions.ignite import cluster as cluster_module
from insitu.extensions.ignite import debounce
from insitu.extensions.ignite.connector import CONNECTOR
from insitu.extensions.ignite.protocol import NEXT_PAGE, SCAN
from insitu.extensions.ignite.source import IgniteSource
from insitu.extensions.ignite.wire import pack_int, pack_string
from insitu.grid import Catalog, bring_up, dataset, import_cache
from insitu.grid.caches import snapshots
from insitu.grid.caches.snapshots import read_snapshot, read_snapshot_again
from insitu.grid.catalog.orphaned_imports import list_staged_imports
from insitu.grid.intake import import_plan
from insitu.grid.partitions import PartitionWriter, verify_file
from insitu.grid.sources import ColumnOptions, describe_moves

NO_OPTIONS = ColumnOptions()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "2")
    monkeypatch.setattr(cluster_module, "_PAUSES", (0.01,))
    monkeypatch.setattr(snapshots, "_read", {})
    monkeypatch.setattr(debounce, "STABLE_SECONDS", 0.01)


def test_each_node_holds_the_partitions_of_its_server(paths: Paths) -> None:
    bring_up(paths, 2)
    with cluster_of(3, drawings(200, 7)) as cluster:
        cache = read_snapshot(paths, cluster.address(), NO_OPTIONS)
        for number, server in enumerate(cluster.servers[1:], start=1):
            assert set(server.scanned) <= {p for p in range(7) if p % 3 == number}
        ports = [server.port for server in cluster.servers]
    order = sorted(range(3), key=lambda number: f"127.0.0.1:{ports[number]}")
    beside = {number: f"node-{place % 2}" for place, number in enumerate(order)}
    assert [p.owners for p in cache.partitions] == [(beside[p % 3],) for p in range(7)]
    assert [p.rows for p in cache.partitions] == [29, 29, 29, 29, 28, 28, 28]
    origin = dict(cache.origin or {})
    assert origin["remote_bytes"] == 0 and origin["local_bytes"] > 0
    assert origin["primaries"] == [order.index(p % 3) for p in range(7)]
    batch = dataset(cache.name, paths=paths, context=Context(paths), label=None).sample(200)
    np.testing.assert_array_equal(np.sort(batch["key"]), range(200))


def test_the_same_rows_make_the_same_partitions_beside_any_number_of_servers(paths: Paths) -> None:
    made = []
    for servers in (1, 2, 3):
        bring_up(paths, servers)
        with cluster_of(servers, drawings(300, 8)) as cluster:
            made.append(read_snapshot(paths, cluster.address(), NO_OPTIONS))
    assert len({tuple(p.checksum for p in cache.partitions) for cache in made}) == 1
    assert len({dict(cache.origin or {})["digest"] for cache in made}) == 1


def test_partitions_without_rows_are_empty(paths: Paths) -> None:
    cache = drawings(5, 5)
    cache.partitions[2] = []
    with cluster_of(2, cache) as cluster:
        made = read_snapshot(paths, cluster.address(), NO_OPTIONS)
    assert [p.rows for p in made.partitions] == [1, 1, 0, 1, 1]


def test_what_another_server_gives_is_remote(paths: Paths) -> None:
    """A server dies in the middle of a scan; the next primary gives its partitions, whole."""
    cluster = cluster_of(2, drawings(400))

    def die(server: FakeServer, operation: int, count: int) -> bytes | None:
        if operation != NEXT_PAGE or count < 4:
            return None
        server.alive = False
        cluster.primaries, cluster.topology = [1] * 5, (2, 0)
        server.stop()
        return b""

    cluster.servers[0]._behave = die
    cluster.page_rows = 10
    with cluster:
        cache = read_snapshot(paths, cluster.address(), NO_OPTIONS)
        origin = dict(cache.origin or {})
        now = describe_moves(origin, 1.0)
    assert cache.rows == 400 and origin["remote_bytes"] > 0 and origin["local_bytes"] > 0
    assert now["topology"] == [2, 0] and now["moved"] == 3 and now["problem"] is None
    gone = describe_moves(origin, 0.2)
    assert gone["moved"] is None and "can't be reached" in gone["problem"]


def test_a_script_reads_a_cache_once(paths: Paths, alone: Context) -> None:
    with cluster_of(2, drawings(60)) as cluster:
        address = cluster.address()
        first = dataset(address, tensor="image=uint8[3,4]", without=["key"], paths=paths, context=alone)
        scans = sum(server.requests[SCAN] for server in cluster.servers)
        again = dataset(address, tensor=["image=uint8[3,4]"], without="key", paths=paths, context=alone)
        assert again.cache == first.cache
        assert sum(server.requests[SCAN] for server in cluster.servers) == scans
        with pytest.raises(InputError, match=r"Received: .* with no options, after .*--tensor image=uint8"):
            dataset(address, paths=paths, context=alone)
    (batch, label), *_ = first.batch(60)
    assert batch.shape == (60, 3, 4) and label.shape == (60,)


def test_a_job_trains_on_the_snapshot_that_it_was_started_on(paths: Paths) -> None:
    with cluster_of(2, drawings(60)) as cluster:
        address = cluster.address()
        cache = read_snapshot(paths, address, ColumnOptions(without=frozenset(["key"])))
        scans = sum(server.requests[SCAN] for server in cluster.servers)
        Catalog(paths).pin(cache.name, 1, "job-1")
        write_own_map(paths, ("node-0",), ((0, 1, 2, 3, 4),), cache.name)
        context = replace(job_context(paths), cache=cache.name)
        assert dataset(address, context=context).cache == cache
        assert dataset(address, without="key", context=context).cache == cache
        assert dataset(context=context).cache == cache
        assert sum(server.requests[SCAN] for server in cluster.servers) == scans
        with pytest.raises(InputError, match=r"Received: --without label in the script, --without key at"):
            dataset(address, without="label", context=context)
        with pytest.raises(InputError, match=r"insitu start ignite://.*/OTHER JOB_DIR"):
            dataset(address.replace("CACHE", "OTHER"), context=context)


def test_processes_that_train_together_must_import_before(paths: Paths) -> None:
    context = replace(Context(paths), by_hand=True)
    with pytest.raises(InputError, match=r"one of several processes. Import it before: insitu import NAME"):
        dataset("ignite://localhost/CACHE", context=context)


def test_options_of_ignite_are_for_ignite_alone(paths: Paths, cache: str, alone: Context) -> None:
    with pytest.raises(InputError, match=r"without are said of .*Received: cache a"):
        dataset(cache, without="x", paths=paths, context=alone)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colour'"):
        dataset(cache, colour="x", paths=paths, context=alone)


def test_a_replicated_cache_is_spread_over_the_nodes(paths: Paths) -> None:
    bring_up(paths, 2)
    rows = drawings(100)
    rows.replicated = True
    with cluster_of(2, rows) as cluster:
        cache = read_snapshot(paths, cluster.address(), NO_OPTIONS)
    assert {p.owners[0] for p in cache.partitions} == {"node-0", "node-1"} and cache.rows == 100
    assert "primaries" not in dict(cache.origin or {})


def test_a_snapshot_that_fails_leaves_the_one_before(paths: Paths) -> None:
    with cluster_of(1, drawings(50)) as cluster:
        address = cluster.address()
        read_snapshot(paths, address, NO_OPTIONS)
    with pytest.raises(SourceError, match="can't be reached"):
        read_snapshot(paths, address, NO_OPTIONS)
    assert [cache.version for cache in Catalog(paths).caches()] == [1]


TEXTS = ColumnOptions(fills={"text": "?"})


def texts(rows: int) -> FakeCache:
    """Rows with a text, in four partitions, of which one is empty."""
    kind = binary_type("example.Texts", [("n", 3), ("text", 9)])

    def row(key: int) -> tuple[bytes, bytes]:
        fields = [("n", number(3, "i", key)), ("text", pack_string("x" * (key % 7)))]
        return number(4, "q", key), binary_object(kind, fields)

    return FakeCache([[row(key) for key in range(p, rows, 3)] for p in range(3)] + [[]], [kind])


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of all blocks that are written."""
    found: list[int] = []
    write = PartitionWriter.write

    def count(self: PartitionWriter, rows: int, values: Any) -> None:
        found.append(rows)
        write(self, rows, values)

    monkeypatch.setattr(PartitionWriter, "write", count)
    return found


def files_of(paths: Paths, cache: CacheSpec) -> list[Path]:
    places = [(info.owners[0], cache.name, cache.version, info.index) for info in cache.partitions]
    return [paths.partition(*place) for place in places]


def inodes(paths: Paths, cache: CacheSpec) -> list[int]:
    return [path.stat().st_ino for path in files_of(paths, cache)]


def shared(before: list[int], paths: Paths, cache: CacheSpec) -> list[bool]:
    """Whether each partition has the file that it had before."""
    return [one == other for one, other in zip(before, inodes(paths, cache), strict=True)]


def test_a_start_writes_the_partitions_alone_that_have_changed(
    paths: Paths, tmp_path: Path, written: list[int]
) -> None:
    rows, fresh = texts(300), Paths(tmp_path / "fresh")
    bring_up(paths, 2)
    bring_up(fresh, 2)
    with cluster_of(2, rows) as cluster:
        address = cluster.address()
        first = read_snapshot(paths, address, TEXTS)
        before = inodes(paths, first)
        written.clear()
        for server in cluster.servers:
            server.scanned.clear()
        same = read_snapshot(paths, address, TEXTS)
        assert not written and shared(before, paths, same) == [True] * 4
        # Ignite has no mark by which to know what has changed: the servers send all rows.
        assert {p for server in cluster.servers for p in server.scanned} == set(range(4))
        rows.partitions[1][5] = texts(600).partitions[1][150]
        changed = read_snapshot(paths, address, TEXTS)
        assert written == [100] and shared(before, paths, changed) == [True, False, True, True]
        expected = read_snapshot(fresh, address, TEXTS)
    assert (same.version, changed.version, changed.rows) == (2, 3, 300)
    assert changed.partitions == expected.partitions and changed.columns == expected.columns
    for here, there in zip(files_of(paths, changed), files_of(fresh, expected), strict=True):
        assert here.read_bytes() == there.read_bytes()
    origins = [dict(cache.origin or {}) for cache in (changed, expected)]
    assert origins[0]["digest"] == origins[1]["digest"] != dict(first.origin or {})["digest"]
    assert list_staged_imports(paths) == []
    assert verify_all(paths, changed) == 4


def lists(words: int) -> FakeCache:
    """Rows with a list of numbers and one of as many words."""
    kind = binary_type("example.Lists", [("numbers", 24), ("words", 24)])

    def collection(*values: bytes) -> bytes:
        return bytes([24]) + pack_int(len(values)) + b"\1" + b"".join(values)

    def row(key: int) -> tuple[bytes, bytes]:
        numbers = collection(number(6, "d", key / 2), number(6, "d", key))
        named = collection(*[pack_string(f"w{key}")] * words)
        return number(4, "q", key), binary_object(kind, [("numbers", numbers), ("words", named)])

    return FakeCache([[row(key) for key in range(p, 40, 4)] for p in range(4)], [kind])


def test_lists_are_read_again_with_the_options_of_before(paths: Paths, alone: Context) -> None:
    with cluster_of(2, lists(2)) as cluster:
        address = cluster.address()
        with pytest.raises(SourceError, match=r"words is Collection, not of numbers.*--dtype words=json"):
            read_snapshot(paths, address, NO_OPTIONS)
        with pytest.raises(InputError, match=r"keeps its types; --dtype COLUMN=json.*--dtype words=str for"):
            read_snapshot(paths, address, ColumnOptions(dtypes={"words": "str"}))
        found = dataset(address, dtype="words=json", paths=paths, context=alone)
        again = read_snapshot_again(paths, found.cache)
        assert [(p.rows, p.checksum) for p in again.partitions] == [
            (p.rows, p.checksum) for p in found.cache.partitions
        ]
        with pytest.raises(InputError, match="after it was read with --dtype words=json"):
            dataset(address, without="words", paths=paths, context=alone)
    batch = dataset(found.cache.name, paths=paths, context=Context(paths), label=None).sample(40)
    order = np.argsort(batch["key"])
    np.testing.assert_array_equal(batch["numbers"][order], [[key / 2, key] for key in range(40)])
    words = np.asarray(batch["words"])[order].tolist()
    assert words == [f'["w{key}", "w{key}"]' for key in range(40)]


def verify_all(paths: Paths, cache: CacheSpec) -> int:
    for path, info in zip(files_of(paths, cache), cache.partitions, strict=True):
        verify_file(path, info, path.with_suffix(".none"))
    return len(cache.partitions)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lose(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    moved = path.with_suffix(".moved")
    path.rename(moved)
    path.symlink_to(moved)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize("spoil", [damage, lose, link, cut_short])
def test_a_file_that_isnt_right_is_written_again(
    paths: Paths, spoil: Callable[[Path], None], written: list[int]
) -> None:
    bring_up(paths, 2)
    with cluster_of(2, texts(300)) as cluster:
        first = read_snapshot(paths, cluster.address(), TEXTS)
        before = inodes(paths, first)
        spoil(files_of(paths, first)[2])
        written.clear()
        second = read_snapshot(paths, cluster.address(), TEXTS)
    assert written == [100] and shared(before, paths, second) == [True, True, False, True]
    assert verify_all(paths, second) == 4 and second.partitions == first.partitions


def test_files_are_shared_only_if_all_that_shapes_them_is_the_same(
    paths: Paths, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster_of(2, texts(300)) as cluster:
        address = cluster.address()

        def count(options: ColumnOptions) -> int:
            written.clear()
            return read_snapshot(paths, address, options).rows - sum(written)

        assert count(TEXTS) == 0
        assert count(ColumnOptions(fills={"text": "none"})) == 0, "other options"
        assert count(ColumnOptions(without=frozenset(["n"]))) == 0, "other columns"
        assert count(TEXTS) == 0
        assert count(TEXTS) == 300
        monkeypatch.setattr(pa, "__version__", "1.0")
        assert count(TEXTS) == 0, "another version of pyarrow"
        monkeypatch.setattr(import_plan, "rows_per_block", lambda *sizes, **limits: 16)
        assert count(TEXTS) == 0, "other blocks"
        assert count(TEXTS) == 300
        monkeypatch.setattr(IgniteSource, "partitions", property(lambda self: range(3)))
        cluster.cache.partitions = cluster.cache.partitions[:3]
        cluster.primaries = cluster.primaries[:3]
        assert count(TEXTS) == 0, "another number of partitions"


def test_what_is_imported_under_a_name_is_never_shared(paths: Paths, written: list[int]) -> None:
    """Partitions of an import aren't those of Ignite: which rows they have says no digest."""
    for _ in range(2):
        written.clear()
        with cluster_of(2, texts(300)) as cluster:
            import_cache(paths, "texts", [cluster.address()], overwrite=True, fill=["text=?"])
        assert sum(written) == 300


def test_rows_that_leave_a_partition_empty_are_gone(paths: Paths) -> None:
    with cluster_of(2, texts(300)) as cluster:
        first = read_snapshot(paths, cluster.address(), TEXTS)
        before = inodes(paths, first)
        cluster.cache.partitions[0] = []
        second = read_snapshot(paths, cluster.address(), TEXTS)
        assert [info.rows for info in second.partitions] == [0, 100, 100, 0]
        assert shared(before, paths, second) == [False, True, True, True]
        cluster.cache.partitions[0] = texts(300).partitions[0]
        third = read_snapshot(paths, cluster.address(), TEXTS)
    assert third.partitions == first.partitions and verify_all(paths, third) == 4


def test_texts_that_become_too_long_for_blocks_begin_again(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, written: list[int]
) -> None:
    rows = texts(3000)
    with cluster_of(1, rows) as cluster:
        first = read_snapshot(paths, cluster.address(), TEXTS)
        before = inodes(paths, first)
        (kind,) = rows.types
        for index in range(1000):
            key = number(4, "q", 2 + 3 * index)
            fields = [("n", number(3, "i", 1)), ("text", pack_string("y" * 400))]
            rows.partitions[2][index] = key, binary_object(kind, fields)
        monkeypatch.setattr("insitu.grid.intake.partition_builder.MOST_TEXT_BYTES", 200_000)
        second = read_snapshot(paths, cluster.address(), TEXTS)
    assert second.block_rows < first.block_rows and second.rows == 3000
    assert shared(before, paths, second) == [False] * 4 and verify_all(paths, second) == 4


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("ignite://grid-1/DIGITS", "ignite/grid-1-10800/DIGITS"),
        ("ignite://grid-1:7,grid-2/PUBLIC.CITY", "ignite/grid-1-7/PUBLIC.CITY"),
    ],
)
def test_a_snapshot_is_named_by_its_address(address: str, name: str) -> None:
    assert CONNECTOR.name_cache(address) == name


def test_names_that_differ_in_other_signs_stay_apart(tmp_path: Path) -> None:
    addresses = ["ignite://[::1]/A", "ignite://[::2]/A", "ignite://h/A/B", "ignite://h/A B", "ignite://h/A_B"]
    names: list[Any] = [CONNECTOR.name_cache(address) for address in addresses]
    assert len(set(names)) == len(names)
