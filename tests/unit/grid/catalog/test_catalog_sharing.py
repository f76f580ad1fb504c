"""The catalogue of heads that follow one another, with etcd as a store in this process."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import sqlite3
import threading
import time
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import Etcd, needs_etcd
from memory_metadata import LosingMetadata

from insitu.base.errors import GridError, InputError, StorageFull, StoreUnavailable
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column, NodeId, PartitionInfo, PlacedCopy
from insitu.grid import disown_catalog
from insitu.grid.catalog import catalog, catalog_records, catalog_sharing
from insitu.grid.catalog.catalog import Catalog
from insitu.grid.importing import import_targets
from insitu.metadata import (
    HEAD_KEY,
    FencedStore,
    LeaderKey,
    MetadataSettings,
    Operation,
    Put,
    open_etcd,
    write_fence,
)
from insitu.metadata.etcd import EtcdStore

NODES = [NodeId(f"node-{i}") for i in range(3)]


def spec(name: str = "digits", version: int = 1, partitions: int = 5) -> CacheSpec:
    parts = tuple(
        PartitionInfo(i, 10, 100, f"crc32:{i:08x}", (NODES[i % 3], NODES[(i + 1) % 3]))
        for i in range(partitions)
    )
    return CacheSpec(name, version, (Column("x", "uint8", (28, 28)),), parts, 1, "x", 1.5, ())


class Cluster:
    """Homes of heads, of which one leads."""

    def __init__(self, folder: Path) -> None:
        self.store = LosingMetadata()
        self.folder = folder
        self.count = 0
        self.terms = 0
        self.is_away = False
        self.asked = 0

    def lead(self, paths: Paths | None = None) -> Paths:
        """Let a home lead; None: a new one, which has a copy of another catalogue."""
        if paths is None:
            self.count += 1
            paths = Paths(self.folder / f"home-{self.count}")
            paths.home.mkdir()
            if self.count > 1:
                Catalog(paths).publish([spec("before")])
                disown_catalog(paths)
            paths.metadata_settings.write_text("{}")
        self.terms += 1
        key = LeaderKey("h:1", self.terms, "x").encode()
        self.store.transact([], [Put(HEAD_KEY, key)], new_id())
        write_fence(paths, key)
        Catalog(paths).take_over()
        return paths

    def open(self, paths: Paths) -> FencedStore:
        self.asked += 1
        if self.is_away:
            raise StoreUnavailable("nobody answers")
        return FencedStore(self.store, paths.fence.read_bytes())

    def fall_silent(self, after: int) -> list[str]:
        """Have etcd answer no more after some changes of the catalogue. Returns the ids of all that it is
        asked for."""
        make, asked = self.store.transact, list[str]()

        def make_some(compare: Any, operations: Sequence[Operation], id: str) -> Any:
            if any(each.key == "catalog/changes" for each in operations):
                asked.append(id)
                if len(asked) > after:
                    raise StoreUnavailable("nobody answers")
            return make(compare, operations, id)

        self.store.transact = make_some  # type: ignore[method-assign]
        return asked

    def answer_again(self) -> None:
        """Have etcd answer as before `fall_silent`."""
        del self.store.__dict__["transact"]


def new_id() -> str:
    return secrets.token_hex(16)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(tmp_path)
    monkeypatch.setattr(catalog_sharing, "open_fenced", made.open)
    return made


def read_rows(paths: Paths) -> dict[str, list[Any]]:
    """Return all that a catalogue says. Of positions only the order counts."""
    with contextlib.closing(sqlite3.connect(paths.catalog)) as database:
        found = {
            table: database.execute(f"SELECT * FROM {table} ORDER BY 1, 2, 3").fetchall()
            for table in ("versions", "pins")
        }
        found |= {t: sorted(database.execute(f"SELECT * FROM {t}")) for t in ("stores", "deleted")}
        placement = "SELECT cache, version, partition, node, state FROM placement ORDER BY 1, 2, 3, position"
        return found | {"placement": database.execute(placement).fetchall()}


def change_at_random(home: Catalog, chosen: random.Random) -> None:
    """Make one change of those that commands make."""
    stored = home.stored()
    kind = chosen.choice(("publish", "publish", "delete", "pin", "unpin", "move", "stores", "restore"))
    name = chosen.choice(("a", "b/train", "b/eval"))
    version = 1 + max([s.version for s in stored if s.name == name] + [home.deleted().get(name, 0)])
    if kind == "publish":
        home.publish([spec(name, version, chosen.randint(1, 9))], overwrite=True)
    elif kind == "restore":
        home.restore([spec(name, version), spec(name, version + 1)])
    elif kind == "stores":
        moved = {chosen.choice(NODES): NodeId("node-9")} if chosen.random() < 0.3 else {}
        home.record_stores({f"store-{chosen.randint(0, 2)}": chosen.choice(NODES)}, moved)
    elif kind == "unpin":
        home.unpin("job")
    elif stored:
        cache = chosen.choice(stored)
        if kind == "pin":
            home.pin(cache.name, cache.version, "job")
        elif kind == "delete" and not home.pinned_by(cache.name):
            home.delete(cache.name)
        elif kind == "move":
            number, new = chosen.randrange(len(cache.partitions)), NodeId(f"node-{chosen.randint(3, 5)}")

            def move(copies: list[PlacedCopy]) -> Sequence[PlacedCopy]:
                kept = [copy for copy in copies if copy.node != new or copy.partition != number]
                return [PlacedCopy(number, new, "live"), *kept]

            home.change_placement(cache.name, cache.version, move)


@pytest.mark.parametrize("seed", range(6))
def test_the_next_head_has_the_catalogue_of_the_one_before(
    cluster: Cluster, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_records, "_GROUP", 2)
    monkeypatch.setattr(catalog_records, "_PIECE_BYTES", 60)
    monkeypatch.setattr(catalog_sharing, "_AT_ONCE", 7)
    chosen, paths = random.Random(seed), cluster.lead()
    for _ in range(40):
        change_at_random(Catalog(paths), chosen)
        if chosen.random() < 0.1:
            before, paths = paths, cluster.lead()
            assert read_rows(paths) == read_rows(before)
    before, paths = paths, cluster.lead()
    assert read_rows(paths) == read_rows(before)
    assert Catalog(paths).stored() == Catalog(before).stored()
    # Nothing is left in etcd of what has gone.
    names = {f"{cache.name}@{cache.version}" for cache in Catalog(paths).stored()}
    kinds = [key.removeprefix("catalog/").split("/", 1) for key in cluster.store.records if "catalog/" in key]
    of_versions = [(kind[0], kind[1]) for kind in kinds if len(kind) == 2]
    left = {name if kind == "versions" else name.rpartition("/")[0] for kind, name in of_versions}
    assert left == names


def test_a_head_of_before_changes_nothing(cluster: Cluster) -> None:
    first = cluster.lead()
    Catalog(first).publish([spec()])
    second, revision = cluster.lead(), cluster.store.revision
    for change in (
        lambda: Catalog(first).publish([spec("more")]),
        lambda: Catalog(first).delete("digits"),
        lambda: Catalog(first).pin("digits", 1, "job"),
    ):
        with pytest.raises(GridError, match="the head that leads is the one at h:1"):
            change()
    assert cluster.store.revision == revision
    assert (
        [c.name for c in Catalog(first).caches()] == ["digits"] == [c.name for c in Catalog(second).caches()]
    )
    third = cluster.lead(first)  # which leads again
    Catalog(third).delete("digits")
    assert Catalog(third).caches() == []


def test_what_a_home_has_goes_to_an_etcd_that_has_no_catalogue(cluster: Cluster, tmp_path: Path) -> None:
    paths = Paths(tmp_path / "old")
    paths.home.mkdir()
    Catalog(paths).publish([spec("a"), spec("b")])
    Catalog(paths).delete("b")
    paths.metadata_settings.write_text("{}")
    cluster.lead(paths)
    assert read_rows(cluster.lead()) == read_rows(paths)


@pytest.mark.parametrize("was_made", [True, False])
def test_a_change_whose_answer_is_lost_is_found_by_who_reads_next(
    cluster: Cluster, *, was_made: bool
) -> None:
    paths = cluster.lead()
    Catalog(paths).publish([spec("a")])
    make, withheld = cluster.store.transact, []

    def lose(compare: Any, operations: Sequence[Operation], id: str) -> Any:
        if any(isinstance(each, Put) and each.key == "catalog/changes" for each in operations):
            if was_made:
                make(compare, operations, id)
            withheld.append((compare, operations, id))
            raise StoreUnavailable("the answer was lost")
        return make(compare, operations, id)

    cluster.store.transact = lose  # type: ignore[method-assign]
    with pytest.raises(GridError, match="it may have been made, `insitu caches` says so then"):
        Catalog(paths).publish([spec("b")])
    cluster.is_away = True
    with pytest.raises(GridError, match="nobody answers"):
        Catalog(paths).caches()  # nobody knows
    cluster.is_away = False
    cluster.store.transact = make  # type: ignore[method-assign]
    assert [c.name for c in Catalog(paths).caches()] == (["a", "b"] if was_made else ["a"])
    assert not paths.catalog_pending.exists()
    asked = cluster.asked
    Catalog(paths).caches()
    assert cluster.asked == asked  # no reader asks etcd otherwise
    assert read_rows(cluster.lead()) == read_rows(paths)


def test_a_process_that_dies_between_etcd_and_its_own_disk_leaves_what_etcd_has(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = cluster.lead()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(catalog_sharing, "_record_change", die)
        Catalog(paths).publish([spec("a")])
    assert [c.name for c in Catalog(paths).caches()] == ["a"]


def test_nobody_reads_an_empty_catalogue_while_a_home_begins_to_lead(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    Catalog(cluster.lead()).publish([spec("a")])
    load, readers = catalog_sharing._load, []

    def load_slowly(paths: Paths, *arguments: Any) -> int:
        readers.append(threading.Thread(target=lambda: found.append(Catalog(paths).caches())))
        readers[0].start()
        readers[0].join(0.2)
        return load(paths, *arguments)

    found: list[list[CacheSpec]] = []
    monkeypatch.setattr(catalog_sharing, "_load", load_slowly)
    paths = cluster.lead()
    readers[0].join()
    assert found == [[spec("a")]] and not paths.catalog_pending.exists()


def test_without_an_answer_nothing_is_changed(cluster: Cluster) -> None:
    paths = cluster.lead()
    Catalog(paths).publish([spec("a")])
    cluster.is_away = True
    with pytest.raises(GridError, match="Received: nobody answers"):
        Catalog(paths).publish([spec("b")])
    assert [c.name for c in Catalog(paths).caches()] == ["a"]  # what was acknowledged is read on


def test_a_catalogue_whose_etcd_is_full_is_read(cluster: Cluster) -> None:
    paths = cluster.lead()
    Catalog(paths).publish([spec("a")])

    def refuse(*_: object) -> Any:
        raise StorageFull("etcd must have room")

    cluster.store.transact = refuse  # type: ignore[method-assign]
    with pytest.raises(StorageFull, match="etcd must have room"):
        Catalog(paths).delete("a")
    assert [c.name for c in Catalog(paths).caches()] == ["a"]


def test_the_catalogue_of_an_etcd_that_was_restored_is_taken(cluster: Cluster) -> None:
    """It has reached the revision at which the home that leads again has seen another change."""
    first, second = cluster.lead(), cluster.lead()
    snapshot, revision = dict(cluster.store.records), cluster.store.revision
    cluster.lead(first)
    Catalog(first).publish([spec("a")])
    reached = cluster.store.records["catalog/changes"].revision
    cluster.store.records, cluster.store.revision = snapshot, revision
    cluster.store._keys = sorted(snapshot)
    cluster.lead(second)
    cluster.store.revision = reached - 2  # the specification is one change, too
    Catalog(second).publish([spec("b")])
    assert cluster.store.records["catalog/changes"].revision == reached
    assert [c.name for c in Catalog(cluster.lead(first)).caches()] == ["b"]


def test_what_etcd_cannot_take_at_once_is_refused_whole(cluster: Cluster) -> None:
    paths = cluster.lead()

    make = cluster.store.transact

    def refuse(compare: Any, operations: Sequence[Operation], id: str) -> Any:
        if any(each.key == "catalog/changes" for each in operations):
            raise InputError("A transaction has up to 3 bytes")
        return make(compare, operations, id)

    cluster.store.transact = refuse  # type: ignore[method-assign]
    with pytest.raises(GridError, match="A transaction has up to"):
        Catalog(paths).publish([spec("a")])
    cluster.store.transact = make  # type: ignore[method-assign]
    assert Catalog(paths).caches() == []


def test_a_catalogue_in_etcd_that_cannot_be_read_is_named(cluster: Cluster) -> None:
    Catalog(cluster.lead()).publish([spec("a")])
    cluster.store.transact([], [Put("catalog/specs/a@1/0", b"damaged")], new_id())
    with pytest.raises(GridError, match="etcd must hold the catalogue as insitu writes it"):
        cluster.lead()


@pytest.mark.parametrize("kind", ["publish", "delete"])
@pytest.mark.parametrize("after", range(5))
def test_a_change_of_several_transactions_that_is_cut_off_leaves_versions_whole(
    cluster: Cluster, kind: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_records, "_GROUP", 2)
    paths = cluster.lead()
    Catalog(paths).publish([spec("a")])
    monkeypatch.setattr(catalog_sharing, "_AT_ONCE", 1)
    asked = cluster.fall_silent(after)
    change = (
        Catalog(paths).delete if kind == "delete" else lambda name: Catalog(paths).publish([spec("b", 2)])
    )
    with contextlib.suppress(GridError):
        change("a")
    assert len(asked) > min(after, 3)
    cluster.answer_again()
    found = Catalog(cluster.lead()).stored()
    assert all(each in (spec("a"), spec("b", 2)) for each in found)
    # What was left of it is no part of a version that gets its number.
    last = cluster.lead()
    if spec("b", 2) not in found:
        Catalog(last).publish([spec("b", 2, partitions=1)])
        found.append(spec("b", 2, partitions=1))
    assert Catalog(cluster.lead()).stored() == found


def test_an_import_publishes_nothing_once_another_head_has_led_in_between(cluster: Cluster) -> None:
    """The agents have removed its partitions as that said."""
    paths = cluster.lead()
    begun = Catalog(paths, of_one_head=True)
    begun.publish([spec("a")])
    cluster.lead()
    cluster.lead(paths)
    with pytest.raises(GridError, match="while the head leads under which it was begun"):
        begun.publish([spec("b")])
    Catalog(paths, of_one_head=True).publish([spec("c")])
    assert [each.name for each in Catalog(paths).caches()] == ["a", "c"]


def test_an_import_whose_answer_is_lost_with_the_lease_removes_nothing(cluster: Cluster) -> None:
    """The head of the home has given it up before the import asks what became of its version."""
    paths, made = cluster.lead(), spec("b")
    files = [paths.version(node, "b", 1) for node in NODES]
    for each in files:
        each.mkdir(parents=True)
    cluster.store.is_losing = lambda id: any(
        each.key == "catalog/changes" for each in cluster.store.transactions[-1]
    )
    with pytest.raises(GridError, match="it may have been made"):
        Catalog(paths).publish([made])
    cluster.store.is_losing = lambda id: False
    other = cluster.lead()
    paths.fence.unlink()
    disown_catalog(paths)
    import_targets.remove_unpublished(Catalog(paths), [made])
    assert Catalog(other).stored() == [made] and all(each.exists() for each in files)
    asked: list[bool] = []
    owners = import_targets.ClusterOwners(paths, Agents(asked))  # type: ignore[arg-type]
    owners.end(Catalog(paths), "token", ["b"], [made], kept=False)
    assert not asked  # the head that leads has agents end it


class Agents:
    """Agents that note how they are to end an import."""

    nodes, here, leaving = ("node-0",), (), frozenset[str]()

    def __init__(self, asked: list[bool]) -> None:
        self.asked = asked

    def end_import(self, nodes: object, name: str, token: str, *, published: bool) -> dict[str, str]:
        self.asked.append(published)
        return {}


@pytest.mark.parametrize("limit", [("_AT_ONCE", 3), ("_BYTES_AT_ONCE", 200)])
@pytest.mark.parametrize("after", range(5))
def test_a_version_that_is_replaced_stays_until_the_new_one_is_there(
    cluster: Cluster, after: int, limit: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of several transactions is cut off after some of them."""
    monkeypatch.setattr(catalog_records, "_GROUP", 2)
    paths = cluster.lead()
    Catalog(paths).publish([spec("a", partitions=9)])
    monkeypatch.setattr(catalog_sharing, *limit)
    asked = cluster.fall_silent(after)
    with contextlib.suppress(GridError):
        Catalog(paths).publish([spec("a", 2, partitions=9)], overwrite=True)
    assert len(asked) > min(after, 3)
    cluster.answer_again()
    assert Catalog(cluster.lead()).caches() in ([spec("a", partitions=9)], [spec("a", 2, partitions=9)])


@needs_etcd
def test_a_change_that_reaches_etcd_after_it_was_given_up_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a member which stood still had taken."""
    etcd = Etcd(tmp_path / "etcd").wait()
    store = open_etcd(MetadataSettings("c", etcd.url), create=True)
    assert isinstance(store, EtcdStore)
    call, late = store._gateway.call, []

    def withhold(path: str, body: Any, deadline: float) -> Any:
        changes = f'"requestPut": {{"key": "{b64encode(b"/insitu/c/keys/catalog/changes").decode()}"'
        if changes in json.dumps(body) and not late:
            late.append(body)
            raise StoreUnavailable("lost")
        return call(path, body, deadline)

    try:
        cluster = Cluster(tmp_path)
        cluster.store = store  # type: ignore[assignment]
        monkeypatch.setattr(catalog_sharing, "open_fenced", lambda paths: KeptOpen(cluster.open(paths)))
        paths = cluster.lead()
        monkeypatch.setattr(store._gateway, "call", withhold)
        with pytest.raises(GridError, match="may have been made"):
            Catalog(paths).publish([spec("a")])
        assert Catalog(paths).caches() == []
        call("kv/txn", late[0], time.monotonic() + 5)
        assert Catalog(paths).caches() == [] == Catalog(cluster.lead()).caches()
        Catalog(paths := cluster.lead()).publish([spec("b")])
        assert [c.name for c in Catalog(paths).caches()] == ["b"]
    finally:
        store.close()
        etcd.close()


class KeptOpen:
    """A store that stays open for the next one who uses it."""

    def __init__(self, store: FencedStore) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def close(self) -> None:
        pass


def test_who_commits_late_hides_nothing_of_the_change_after_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process stands still after its commit, while another one's answer is lost."""
    paths = cluster.lead()
    note, make = catalog.record_committed, cluster.store.transact

    def lose(compare: Any, operations: Sequence[Operation], id: str) -> Any:
        outcome = make(compare, operations, id)
        if any(each.key == "catalog/changes" for each in operations):
            raise StoreUnavailable("the answer was lost")
        return outcome

    def stand_still(*arguments: Any) -> None:
        monkeypatch.setattr(catalog, "record_committed", note)
        cluster.store.transact = lose  # type: ignore[method-assign]
        with pytest.raises(GridError, match="it may have been made"):
            Catalog(paths).publish([spec("b")])
        cluster.store.transact = make  # type: ignore[method-assign]
        note(*arguments)

    monkeypatch.setattr(catalog, "record_committed", stand_still)
    Catalog(paths).publish([spec("a")])
    assert Catalog(paths).find("b") is not None  # as etcd says: else its partitions would be removed


def test_who_makes_the_file_hides_nothing_of_a_change_under_way(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = cluster.lead()
    paths.catalog.unlink()
    paths.catalog_pending.write_text("1" * 32)  # of a process that was faster
    catalog_sharing.begin_file(paths)
    assert paths.catalog_pending.read_text() == "1" * 32
    assert [each.name for each in paths.home.glob("*pending*")] == ["catalog-pending"]
