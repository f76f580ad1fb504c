"""The embedded store: beside the conformance suite, time, files and processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linearizability import find_order
from metadata_histories import make_history, register
from metadata_model import MetadataModel

from insitu.base.errors import (
    CorruptMetadata,
    InputError,
    LeaseEnded,
    MetadataRefused,
    RevisionCompacted,
    StorageFull,
    StoreUnavailable,
)
from insitu.metadata import Change, Compare, Delete, Put, embedded, end_calls_by
from insitu.metadata.embedded import EmbeddedStore

KEYS = ["a", "b", "c", "d/\u00e9"]
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("transact"),
            st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), max_size=2, unique_by=lambda c: c[0]),
            st.lists(
                st.tuples(
                    st.sampled_from(KEYS), st.one_of(st.none(), st.binary(max_size=3)), st.integers(0, 3)
                ),
                max_size=3,
                unique_by=lambda o: o[0],
            ),
            st.booleans(),
        ),
        st.tuples(st.just("grant"), st.integers(1, 5)),
        st.tuples(st.just("keep"), st.integers(0, 3)),
        st.tuples(st.just("revoke"), st.integers(0, 3)),
        st.tuples(st.just("pass"), st.sampled_from([0.5, 1, 2, 400])),
        st.tuples(st.just("open again")),
    ),
    max_size=25,
)


class Twins:
    """A store on simulated time, and the model of it."""

    def __init__(self, path: Path) -> None:
        self.path, self.model = path, MetadataModel()
        self.store = self.open()
        self.start = self.store.get([])[1]
        self.leases = [0, 0, 0, 0]
        self.ids: list[str] = []

    def open(self) -> EmbeddedStore:
        return EmbeddedStore(self.path, "c", create=True, clock=lambda: self.model.now, boot="b")

    def transact(self, compared: Any, changed: Any, is_again: bool) -> None:
        id = self.ids[-1] if is_again and self.ids else secrets.token_hex(16)
        self.ids.append(id)
        numbers = [(key, self.model.number_of(key) if holds else 10**6) for key, holds in compared]
        self.model.expire()
        compare = [Compare(key, number and self.start + number) for key, number in numbers]
        operations = [
            Delete(key) if value is None else Put(key, value, self.leases[lease])
            for key, value, lease in changed
        ]
        self.model.expire()
        try:
            made: bool | None = self.store.transact(compare, operations, id).succeeded
        except LeaseEnded:
            made = None
        assert made == self.model.transact(numbers, operations, id)

    def run(self, step: Any) -> None:
        match step:
            case ("transact", compared, changed, is_again):
                self.transact(compared, changed, is_again)
            case ("grant", seconds):
                self.model.expire()
                lease = self.store.grant(seconds)
                self.leases = [0, *self.leases[2:], lease]
                self.model.grant(lease, seconds)
            case ("keep", which):
                assert self.store.keep(self.leases[which]) == self.model.keep(self.leases[which])
            case ("revoke", which):
                self.model.expire()
                self.store.revoke(self.leases[which])
                self.model.revoke(self.leases[which])
            case ("pass", seconds):
                self.model.now += seconds
            case _:
                self.store.close()
                self.store = self.open()
        assert {record.key: record.value for record in self.store.range("")[0]} == self.model.values()


@settings(max_examples=60)
@given(steps)
def test_a_store_does_what_the_model_does(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]):
    twins = Twins(tmp_path_factory.mktemp("twins") / "metadata.sqlite")
    for step in steps:
        if step == ("pass", 400):
            twins.ids.clear()  # its transactions may be forgotten
        twins.run(step)
    told = twins.store.watch("", twins.start)
    wanted = [sorted(changes) for changes in twins.model.log if changes]
    found = [sorted((change.key, change.value) for change in next(told)) for _ in wanted]
    assert found == wanted
    twins.store.close()


def check_histories(
    path: Path, seeds: range, break_store: Callable[[EmbeddedStore], None] | None = None
) -> int:
    """Return how many histories no order explains."""
    store = EmbeddedStore(path, "c", create=True)
    if break_store is not None:
        break_store(store)
    wrong = 0
    for seed in seeds:
        store.transact([], [Delete("k")], secrets.token_hex(16))
        history = make_history(store, seed)
        wrong += find_order(history, None, register) is None
    store.close()
    return wrong


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what makes changes survive a power cut."""
    connect = sqlite3.connect

    def connect_fast(*arguments: Any, **named: Any) -> sqlite3.Connection:
        database = connect(*arguments, **named, factory=Fast)
        return database

    class Fast(sqlite3.Connection):
        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            return super().execute(sql.replace("synchronous=FULL", "synchronous=OFF"), *parameters)

    monkeypatch.setattr(sqlite3, "connect", connect_fast)


@pytest.mark.parametrize("seeds", [range(500), pytest.param(range(500, 6000), marks=pytest.mark.long)])
def test_histories_with_lost_answers_are_linearizable(tmp_path: Path, fast_disk: None, seeds: range):
    assert check_histories(tmp_path / "m", seeds) == 0


def test_a_store_that_makes_transactions_twice_is_found(tmp_path: Path, fast_disk: None):
    def forget_ids(store: EmbeddedStore) -> None:
        transact = store.transact
        store.transact = lambda compare, operations, id: transact(  # type: ignore[method-assign]
            compare, operations, secrets.token_hex(16)
        )

    assert check_histories(tmp_path / "m", range(300), forget_ids) > 0


def new_id() -> str:
    return secrets.token_hex(16)


def put(store: EmbeddedStore, key: str, value: bytes, lease: int = 0) -> int:
    return store.transact([], [Put(key, value, lease)], new_id()).revision


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metadata.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[EmbeddedStore]:
    made = EmbeddedStore(path, "c", create=True)
    yield made
    made.close()


def test_an_id_is_known_for_ten_minutes(path: Path):
    now = [0.0]
    store = EmbeddedStore(path, "c", create=True, clock=lambda: now[0])
    asked = new_id()
    made = store.transact([], [Put("a", b"1")], asked)
    now[0] = 599.9
    assert store.transact([], [Put("a", b"1")], asked) == made
    now[0] = 600.1
    assert store.transact([], [Put("a", b"1")], asked).revision > made.revision
    store.close()


def test_after_a_restart_of_the_machine_leases_have_their_whole_time(path: Path):
    now = [1000.0]
    before = EmbeddedStore(path, "c", create=True, clock=lambda: now[0], boot="one")
    lease, asked = before.grant(10), new_id()
    made = before.transact([], [Put("a", b"1", lease)], asked)
    before.close()
    now[0] = 5.0
    after = EmbeddedStore(path, "c", clock=lambda: now[0], boot="two")
    assert after.transact([], [Put("a", b"1", lease)], asked) == made
    now[0] = 14.9
    assert list(after.get(["a"])[0]) == ["a"]
    now[0] = 15.0
    assert list(after.get(["a"])[0]) == []
    after.close()


def test_leases_end_also_while_the_machine_is_suspended(path: Path, monkeypatch: pytest.MonkeyPatch):
    suspended, read = [0.0], time.clock_gettime
    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: read(clock) + suspended[0] * (clock == time.CLOCK_BOOTTIME)
    )
    store = EmbeddedStore(path, "c", create=True)
    lease = store.grant(60.0)
    assert store.keep(lease)
    suspended[0] = 61.0
    assert not store.keep(lease)
    store.close()


def test_what_the_log_has_dropped_is_to_be_read_again(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "_LOG_BYTES", 10_000)
    revisions = [put(store, "a", b"x" * 1000) for _ in range(20)]
    with pytest.raises(RevisionCompacted, match="Read all again"):
        next(store.watch("", revisions[0]))
    told = store.watch("", revisions[-3])
    assert [next(told)[0].revision for _ in range(2)] == revisions[-2:]
    with contextlib.closing(sqlite3.connect(store._path)) as database:
        assert database.execute("SELECT COUNT(*) FROM changes").fetchone()[0] < 6


def test_a_watch_of_the_same_store_is_woken_at_once(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "_POLL_SECONDS", 3600.0)
    told = store.watch("", store.get([])[1])
    writer = threading.Timer(0.2, put, (store, "a", b"1"))
    writer.start()
    assert next(told)[0].value == b"1"
    writer.join()


def test_changes_are_synced_before_they_are_acknowledged(store: EmbeddedStore):
    with store._changing() as database:
        assert database.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
        assert database.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def count_up(path: Path, count: int) -> None:
    store = EmbeddedStore(path, "c", create=True)
    for _ in range(count):
        while True:
            record = store.get(["n"])[0].get("n")
            value = int(record.value) + 1 if record else 1
            compare = [Compare("n", record.revision if record else 0)]
            if store.transact(compare, [Put("n", b"%d" % value)], new_id()).succeeded:
                break
    store.close()


def test_processes_make_one_file_and_count_without_loss(path: Path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=count_up, args=(path, 20)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    store = EmbeddedStore(path, "c")
    assert store.get(["n"])[0]["n"].value == b"60"
    told = store.watch("n", store.get([])[1] - 60)
    assert [int(next(told)[0].value or b"") for _ in range(60)] == list(range(1, 61))
    assert sorted(each.name for each in path.parent.iterdir() if each.name.startswith(".")) == []
    store.close()


def write_until_killed(path: Path, ready: Any) -> None:
    store = EmbeddedStore(path, "c")
    for number in range(10**6):
        store.transact([], [Put("a", b"%d" % number), Put("b", b"%d" % number)], new_id())
        ready.send(number)


def test_what_was_acknowledged_outlives_a_killed_process(path: Path, store: EmbeddedStore):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=write_until_killed, args=(path, there))
    process.start()
    there.close()
    acknowledged = -1
    while acknowledged < 20:
        acknowledged = here.recv()
    process.kill()
    with contextlib.suppress(EOFError):
        while True:
            acknowledged = here.recv()
    process.join()
    found = store.get(["a", "b"])[0]
    assert found["a"].value == found["b"].value
    assert int(found["a"].value) >= acknowledged
    here.close()


def test_a_forked_process_has_connections_of_its_own(store: EmbeddedStore):
    put(store, "a", b"1")
    child = os.fork()
    if child == 0:
        try:
            put(store, "b", b"2")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    put(store, "c", b"3")
    assert list(store.get(["a", "b", "c"])[0]) == ["a", "b", "c"]


def test_a_file_that_is_not_there_is_no_empty_store(path: Path):
    with pytest.raises(InputError, match="no such file"):
        EmbeddedStore(path, "c")
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"not a database" * 100], ids=["empty", "other"])
def test_a_file_of_something_else_is_refused(path: Path, content: bytes):
    path.write_bytes(content)
    for create in (False, True):
        with pytest.raises(CorruptMetadata, match="insitu repair"):
            EmbeddedStore(path, "c", create=create)
    assert path.read_bytes() == content


def test_a_damaged_value_is_found(path: Path, store: EmbeddedStore):
    revision = put(store, "a", b"precious" * 20)
    store.close()
    data = path.read_bytes()
    assert data.count(b"precious" * 20) == 2  # in the records and in the log
    path.write_bytes(data.replace(b"precious" * 20, b"previous" * 20))
    damaged = EmbeddedStore(path, "c")
    for read in (
        lambda: damaged.get(["a"]),
        lambda: damaged.range(""),
        lambda: next(damaged.watch("", revision - 1)),
    ):
        with pytest.raises(CorruptMetadata, match="checksum"):
            read()
    damaged.close()


def test_a_damaged_page_is_found(path: Path, store: EmbeddedStore):
    for number in range(200):
        put(store, f"{number}", b"x" * 200)
    store.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * (size - 8192))
    with pytest.raises(CorruptMetadata):
        EmbeddedStore(path, "c").range("")


def test_a_newer_format_is_refused(path: Path, store: EmbeddedStore):
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(MetadataRefused, match="Update insitu"):
        EmbeddedStore(path, "c")


def limit_connections(store: EmbeddedStore, pragma: str) -> None:
    for database in store._idle:
        database.execute(pragma).fetchall()


def test_a_store_that_takes_the_place_of_another_has_other_revisions(path: Path, store: EmbeddedStore):
    """A client that has seen a version in the store before takes none of this one for it."""
    seen = [put(store, "a", b"%d" % number) for number in range(100)]
    other = EmbeddedStore(path.with_name("other"), "c", create=True)
    assert put(other, "a", b"1") > seen[-1]
    other.close()


def test_a_full_disk_is_no_damage(store: EmbeddedStore):
    put(store, "a", b"1")
    limit_connections(store, "PRAGMA max_page_count = 1")
    with pytest.raises(StorageFull, match="Make room"):
        for _ in range(100):
            put(store, "b", b"x" * 100_000)
    assert list(store.get(["a", "b"])[0]) == ["a"]
    put(store, "b", b"2")


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY])
def test_a_disk_that_takes_no_change_hides_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, code: int):
    """Ending a lease, and forgetting an id, is a change that a question would make first."""
    now = [0.0]
    store = EmbeddedStore(path, "c", create=True, clock=lambda: now[0])
    store.grant(10.0)
    asked = new_id()
    made = store.transact([], [Put("a", b"1")], asked)

    def refuse(*arguments: Any) -> None:
        error = sqlite3.OperationalError("no change is taken")
        error.sqlite_errorcode = code
        raise error

    now[0] = 20.0
    monkeypatch.setattr(embedded, "end_what_is_over", refuse)
    assert store.transact([], [Put("a", b"1")], asked) == made
    assert store.get(["a"])[0]["a"].value == b"1" and len(store.range("")[0]) == 1
    with pytest.raises((StorageFull, MetadataRefused)):
        store.transact([], [Put("a", b"2")], new_id())
    store.close()


def test_a_read_only_file_is_read(store: EmbeddedStore):
    put(store, "a", b"1")
    limit_connections(store, "PRAGMA query_only = 1")
    assert store.get(["a"])[0]["a"].value == b"1"
    with pytest.raises(MetadataRefused, match="read-only"):
        put(store, "b", b"2")


def test_a_folder_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(MetadataRefused, match="No such file"):
        EmbeddedStore(tmp_path / "none" / "m", "c", create=True)


def test_another_process_that_holds_the_file_is_waited_for_until_the_deadline(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("insitu.metadata.embedded.BUSY_SECONDS", 0.1)
    store = EmbeddedStore(path, "c", create=True)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="try again"):
            put(store, "a", b"1")
        assert store.get(["a"])[0] == {}  # reads don't wait
        # Who is waited for itself gives it less time.
        monkeypatch.setattr("insitu.metadata.embedded.BUSY_SECONDS", 1e5)
        with (
            contextlib.closing(EmbeddedStore(path, "c")) as patient,
            end_calls_by(time.monotonic() + 0.1),
            pytest.raises(StoreUnavailable, match="try again"),
        ):
            put(patient, "a", b"1")
        other.execute("ROLLBACK")
    put(store, "a", b"1")
    store.close()


def test_a_file_that_was_replaced_is_not_written_to(path: Path, store: EmbeddedStore):
    put(store, "a", b"1")
    path.rename(path.with_name("moved"))
    with pytest.raises(CorruptMetadata, match="removed or replaced"):
        put(store, "b", b"2")


def test_a_change_of_a_key_that_is_watched_tells_the_lease_end_too(path: Path):
    now = [0.0]
    store = EmbeddedStore(path, "c", create=True, clock=lambda: now[0])
    lease = store.grant(5)
    start = put(store, "a", b"1", lease)
    told = store.watch("", start)
    now[0] = 5.0
    assert next(told) == [Change("a", start + 1, None)]
    store.close()
