"""Metadata moves between a home and a real etcd, and the process that moves it is killed at each step."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import ETCD, Etcd, needs_etcd

from insitu.base.errors import GridError, InputError, InsituError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column, NodeId, PartitionInfo
from insitu.cluster.failover import metadata_moving
from insitu.cluster.failover.head_metadata import begin_to_lead, end_leading
from insitu.cluster.failover.metadata_moving import EMBEDDED, MovePlan, move_metadata
from insitu.cluster.leases import leading
from insitu.cluster.nodes.head_files import open_head_files
from insitu.cluster.wire.records import change_head, read_head, take_process_lock
from insitu.grid import Catalog
from insitu.grid.shared_files import Entry, NameTree, make_block
from insitu.metadata import (
    MOVING,
    MetadataStore,
    Put,
    open_etcd,
    open_store,
    put_mark,
    read_records,
    read_settings,
)
from insitu.metadata.embedded import EmbeddedStore
from insitu.metadata.etcd import EtcdStore
from insitu.metadata.etcd_address import parse_etcd_url

pytestmark = needs_etcd
PARTITION = PartitionInfo(0, 1, 2, "crc32:00000000", (NodeId("a"),))
ORIGIN = b'{"id": "0123abcd", "generation": 1, "forgets": false}'
_KILLED = 9


def make_spec(name: str) -> CacheSpec:
    return CacheSpec(name, 1, (Column("x", "uint8", (2,)),), (PARTITION,), 0, None, 1.5, ())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    if ETCD is None:
        pytest.skip("no etcd")
    made = Etcd(tmp_path_factory.mktemp("etcd")).wait()
    yield made
    made.close()


@pytest.fixture
def etcd(server: Etcd) -> Etcd:
    clear(server)
    return server


def clear(etcd: Etcd) -> None:
    etcd.ask(0, "kv/deleterange", {"key": "AA==", "range_end": "AA=="})


def make_file(size: int) -> Entry:
    return Entry(size, 1.0, 1, (), tuple(make_block(b"x") for _ in range(size)))


def agree(plan: MovePlan) -> bool:
    return True


def put(store: MetadataStore, *names: str) -> None:
    for name in names:
        store.transact([], [Put(f"files/{name}", name.encode())], secrets.token_hex(16))


def make_home(home: Path) -> Paths:
    """Make the home of a head that keeps metadata on its disk, with 250 names and three caches."""
    home.mkdir(mode=0o700)
    paths = Paths(home)
    record = change_head(paths, has_metadata=True, epoch=5, copy_lost_after=77.0)
    with contextlib.closing(open_store(paths.metadata, record.cluster, create=True)) as store:
        store.transact([], [Put("files/origin", ORIGIN)], secrets.token_hex(16))
        for start in range(0, 250, 50):
            puts = [Put(f"files/n{i:03d}", b"x" * i) for i in range(start, start + 50)]
            store.transact([], puts, secrets.token_hex(16))
        store.transact([], [Put("files/used", b"", store.grant(1000))], secrets.token_hex(16))
    Catalog(paths).publish([make_spec(name) for name in ("c1", "c2", "c3")])
    Catalog(paths).delete("c3")
    Catalog(paths).pin("c1", 1, "job-1")
    return paths


def list_names(store: MetadataStore) -> set[str]:
    return {key for key in read_records(store) if key.startswith("files/")}


def see(paths: Paths) -> tuple[str, set[str], set[str]]:
    """Start a head in a home, as it does. Returns where its truth is, and the names and caches in there."""
    record, settings = read_head(paths), read_settings(paths)
    assert record is not None
    if settings is None:
        files = open_head_files(paths, record, "token")
        files.close()
        with contextlib.closing(open_store(paths.metadata, record.cluster)) as store:
            names = list_names(store)
        return EMBEDDED, names, {cache.name for cache in Catalog(paths).caches()}
    _, lead = begin_to_lead(paths, settings, "127.0.0.1:1", "")
    names = list_names(lead.store)
    end_leading(paths, lead, down=True)
    return "etcd", names, {cache.name for cache in Catalog(paths).caches()}


def find_truths(paths: Paths) -> set[str]:
    """Return which stores a head would begin with: that which the home uses, and one of a home from before
    that uses the other."""
    record, found = read_head(paths), set()
    assert record is not None
    settings = read_settings(paths)
    with contextlib.suppress(InsituError):
        found.add(see(paths)[0])
    if settings is not None:
        aside = paths.metadata_settings.rename(paths.home / "aside")
        with contextlib.suppress(InsituError):
            found.add(see(paths)[0])
        aside.rename(paths.metadata_settings)
    return found


def die_at(step: int, act: Callable[[], Any]) -> bool:
    """Run `act` in a process of its own, which ends without a word before or after its step of this number.
    Returns whether it did."""
    child = os.fork()
    if child == 0:
        code, count = 1, [0]

        def reach(count: list[int]) -> None:
            if count[0] == step:
                os._exit(_KILLED)
            count[0] += 1

        def patched(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                reach(count)
                found = function(*arguments, **options)
                reach(count)
                return found

            return call

        try:
            for kind in (EmbeddedStore, EtcdStore):
                kind.transact = patched(kind.transact)  # type: ignore[method-assign]
            Path.unlink = patched(Path.unlink)  # type: ignore[method-assign]
            for name in ("write_settings", "write_fence", "change_head"):
                setattr(metadata_moving, name, patched(getattr(metadata_moving, name)))
            act()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, _KILLED), code
    return code == _KILLED


NAMES = {"files/origin", "files/used", *(f"files/n{i:03d}" for i in range(250))}


@pytest.mark.long
def test_who_is_killed_at_any_step_on_the_way_to_etcd_loses_nothing(etcd: Etcd, tmp_path: Path) -> None:
    step, seen = 0, set()
    while True:
        clear(etcd)
        paths = make_home(tmp_path / f"home-{step}")
        if not die_at(step, lambda paths=paths: move_metadata(paths, etcd.url, agree)):
            break
        where, names, caches = see(paths)
        assert (names, caches) == (NAMES, {"c1", "c2"}), (step, where)
        seen.add(where)
        assert len(find_truths(paths)) == 1, step
        if where == EMBEDDED:  # it continues, and is moved as it is then
            record = read_head(paths)
            assert record is not None
            with contextlib.closing(open_store(paths.metadata, record.cluster)) as store:
                put(store, "late")
            Catalog(paths).publish([make_spec("late")])
        assert move_metadata(paths, etcd.url, agree)
        late = {"late"} if where == EMBEDDED else set()
        assert see(paths) == ("etcd", NAMES | {f"files/{n}" for n in late}, {"c1", "c2"} | late), step
        assert find_truths(paths) == {"etcd"}, step
        step += 1
    assert step > 10 and seen == {EMBEDDED, "etcd"}


@pytest.mark.long
def test_who_is_killed_at_any_step_on_the_way_back_loses_nothing(
    etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "HEAD_LEASE_SECONDS", 2.0)  # of the key that a killed one has won
    step, seen = 0, set()
    while True:
        clear(etcd)
        paths = make_home(tmp_path / f"home-{step}")
        assert move_metadata(paths, etcd.url, agree)
        see(paths)
        if not die_at(step, lambda paths=paths: move_metadata(paths, EMBEDDED, agree)):
            break
        truths = find_truths(paths)
        assert len(truths) <= 1, step
        seen |= truths or {"none"}
        late: set[str] = set()
        if truths == {"etcd"}:
            settings = read_settings(paths)
            assert settings is not None
            with contextlib.closing(open_etcd(settings)) as store:
                put(store, "late")
            late = {"files/late"}
        assert move_metadata(paths, EMBEDDED, agree)
        assert see(paths) == (EMBEDDED, NAMES | late, {"c1", "c2"}), step
        assert not paths.metadata_settings.exists() and not paths.fence.exists()
        step += 1
    assert step > 10 and seen == {EMBEDDED, "etcd", "none"}


def test_all_comes_there_and_back(etcd: Etcd, tmp_path: Path) -> None:
    paths = make_home(tmp_path / "home")
    plans: list[MovePlan] = []
    assert not move_metadata(paths, etcd.url, lambda plan: bool(plans.append(plan)))
    assert read_settings(paths) is None and see(paths)[0] == EMBEDDED
    assert (plans[0].names, plans[0].target) == (252, etcd.url) and plans[0].catalog >= 6
    assert move_metadata(paths, etcd.url, agree) and move_metadata(paths, etcd.url, agree)
    record, settings = read_head(paths), read_settings(paths)
    assert record is not None and settings is not None
    assert see(paths) == ("etcd", NAMES, {"c1", "c2"})
    after = read_head(paths)
    assert after is not None and after.epoch > record.epoch and after.copy_lost_after == 77.0
    with contextlib.closing(open_etcd(settings)) as store:
        found = read_records(store)
    assert b'"generation": 2' in found["files/origin"].value  # revisions begin anew
    assert found["files/used"].lease and found["files/n249"].value == b"x" * 249
    assert Catalog(paths).pinned_by("c1") == ["job-1"] and Catalog(paths).deleted() == {"c3": 1}
    # An old home without the settings refuses, and gets them back.
    settings_before = paths.metadata_settings.read_bytes()
    paths.metadata_settings.unlink()
    with pytest.raises(InputError, match=f"the truth is in {etcd.url}"):
        see(paths)
    with pytest.raises(InputError, match="was moved to"):
        move_metadata(paths, etcd.url.replace("127.0.0.1", "localhost"), agree)
    assert move_metadata(paths, etcd.url, agree)
    assert paths.metadata_settings.read_bytes() == settings_before
    # Back, with what has changed since; a home that still has the settings refuses.
    with contextlib.closing(open_etcd(settings)) as store:
        put(store, "more")
    assert see(paths)[0] == "etcd"
    assert move_metadata(paths, EMBEDDED, agree) and move_metadata(paths, EMBEDDED, agree)
    assert see(paths) == (EMBEDDED, NAMES | {"files/more"}, {"c1", "c2"})
    assert Catalog(paths).pinned_by("c1") == ["job-1"]
    Catalog(paths).publish([make_spec("c4")])
    last = read_head(paths)
    assert last is not None and last.epoch > after.epoch
    paths.metadata_settings.write_bytes(settings_before)
    paths.metadata_settings.chmod(0o600)
    with pytest.raises(InputError, match="which was moved: the truth is in"):
        see(paths)
    paths.metadata_settings.unlink()
    # And there again.
    assert move_metadata(paths, etcd.url, agree)
    assert see(paths) == ("etcd", NAMES | {"files/more"}, {"c1", "c2", "c4"})


def test_a_change_whose_answer_was_lost_before_a_move_is_found_after_it(etcd: Etcd, tmp_path: Path) -> None:
    """There and back, an append that was made isn't made again, and one that wasn't is made."""
    paths = make_home(tmp_path / "home")
    record = read_head(paths)
    assert record is not None
    size = 1
    with contextlib.closing(open_store(paths.metadata, record.cluster)) as store:
        version = NameTree(store).publish("v", "f", make_file(size), 0, secrets.token_hex(16))
    for target in (etcd.url, EMBEDDED):
        made, refused = secrets.token_hex(16), secrets.token_hex(16)
        settings = read_settings(paths)
        source = open_etcd(settings) if settings else open_store(paths.metadata, record.cluster)
        with contextlib.closing(source) as store:
            NameTree(store).publish("v", "f", make_file(size + 1), version, made)
        assert move_metadata(paths, target, agree)
        settings = read_settings(paths)
        moved = open_etcd(settings) if settings else open_store(paths.metadata, record.cluster)
        with contextlib.closing(moved) as store:
            names = NameTree(store)
            names.publish("v", "f", make_file(size + 1), version, made, again=True)
            found = names.look("v", "f")
            assert isinstance(found, Entry) and found.size == size + 1
            with pytest.raises(OSError, match="another process"):
                names.publish("v", "f", make_file(size + 2), version, refused, again=True)
            version = names.publish("v", "f", make_file(size + 2), found.version, secrets.token_hex(16))
        size += 2
    with contextlib.closing(open_store(paths.metadata, record.cluster)) as store:
        last = NameTree(store).look("v", "f")
    assert isinstance(last, Entry) and last.size == 5


def test_nothing_is_moved_over_something_else_or_beside_a_head(etcd: Etcd, tmp_path: Path) -> None:
    paths = make_home(tmp_path / "home")
    record = read_head(paths)
    assert record is not None
    lock = take_process_lock(paths.head_lock)
    assert lock is not None
    with pytest.raises(InputError, match="`insitu down` first"):
        move_metadata(paths, etcd.url, agree)
    os.close(lock)
    other = make_home(tmp_path / "other")
    assert move_metadata(other, etcd.url, agree)
    with pytest.raises(InputError, match="holds the metadata of one cluster"):
        move_metadata(paths, etcd.url, agree)
    clear(etcd)
    store = EtcdStore(parse_etcd_url(etcd.url), record.cluster, create=True)
    with contextlib.closing(store):
        put(store, "own")
        with pytest.raises(InputError, match="holds records of this cluster"):
            move_metadata(paths, etcd.url, agree)
        put_mark(store, MOVING, "elsewhere")
        with pytest.raises(InputError, match="to which elsewhere was being moved"):
            move_metadata(paths, etcd.url, agree)
    assert see(paths) == (EMBEDDED, NAMES, {"c1", "c2"})
    with pytest.raises(InputError, match="in the home of a head"):
        move_metadata(Paths(tmp_path / "nowhere"), etcd.url, agree)


class LateCatalog(Catalog):
    """A catalogue that says when it is opened for a change."""

    opened = threading.Event()

    def _connected(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        self.opened.set()
        return super()._connected()


def test_an_import_that_waited_for_the_move_changes_nothing_on_the_disk(
    etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_home(tmp_path / "home")
    copy = metadata_moving.copy_records
    refused: list[GridError] = []

    def publish() -> None:
        try:
            LateCatalog(paths).publish([make_spec("late")])
        except GridError as error:
            refused.append(error)

    late = threading.Thread(target=publish)

    def fill(*arguments: Any) -> None:
        copy(*arguments)
        late.start()
        assert LateCatalog.opened.wait(60)

    monkeypatch.setattr(metadata_moving, "copy_records", fill)
    assert move_metadata(paths, etcd.url, agree)
    late.join()
    assert "The head that leads changes a cluster" in str(refused[0])
    assert see(paths) == ("etcd", NAMES, {"c1", "c2"})
