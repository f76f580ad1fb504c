"""Members of a real etcd fall silent: their connections stay, and nothing comes."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import Etcd, needs_etcd
from linearizability import LOST, Call, find_order
from metadata_histories import register

from insitu.base.errors import StoreUnavailable
from insitu.metadata import Compare, MetadataStore, Put, end_calls_by, open_store
from insitu.metadata.etcd import EtcdStore

pytestmark = needs_etcd


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path / "etcd", count=3).wait()
    yield server
    server.close()


def new_id() -> str:
    return secrets.token_hex(16)


def put(store: MetadataStore, value: bytes) -> None:
    assert store.transact([], [Put("a", value)], new_id()).succeeded


@pytest.mark.parametrize("is_leader", [True, False], ids=["leader", "follower"])
def test_one_silent_member_is_asked_once(etcd: Etcd, is_leader: bool, monkeypatch: pytest.MonkeyPatch):
    leader = etcd.find_leader()
    victim = leader if is_leader else (leader + 1) % 3
    # The victim is the one that is asked first, for calls and for the watch.
    names = [etcd.clients[victim], *(each for i, each in enumerate(etcd.clients) if i != victim)]
    store = open_store(f"etcd://{','.join(names)}", "c", create=True)
    assert isinstance(store, EtcdStore)
    told = store.watch("", store.get([])[1])
    put(store, b"before")
    assert next(told)[0].value == b"before"
    lease = store.grant(120)
    asked: list[str] = []
    exchange = store._gateway._exchange

    def count(endpoint: Any, *arguments: Any) -> Any:
        asked.append(f"{endpoint[0]}:{endpoint[1]}")
        return exchange(endpoint, *arguments)

    monkeypatch.setattr(store._gateway, "_exchange", count)
    etcd.silence(victim)
    put(store, b"meanwhile")
    assert names[0] in asked
    asked.clear()
    for number in range(10):
        put(store, b"%d" % number)
        assert store.get(["a"])[0]["a"].value == b"%d" % number
    assert store.keep(lease)
    assert names[0] not in asked
    # The watch notices by itself, and has missed nothing.
    values: list[bytes | None] = []
    while values[-1:] != [b"9"]:
        values += [change.value for change in next(told)]
    assert values == [b"meanwhile", *(b"%d" % number for number in range(10))]
    told.close()
    store.close()


class Client:
    """Writes and reads one key, and notes what it was answered."""

    def __init__(self, store: MetadataStore, name: int) -> None:
        self.store, self.name = store, name
        self.history: list[Call] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        chance, number = random.Random(self.name), 0
        while not self.stopped.wait(0.02):  # a pace at which a history can be checked
            begin, number = time.monotonic(), number + 1
            value: bytes = b"%d.%d" % (self.name, number)
            try:
                record = self.store.get(["a"])[0].get("a")
                before = record.value if record else None
                self.note(("read",), before, begin)
                if chance.random() < 0.5:
                    self.write(("write", value), [], value)
                else:
                    compare = [Compare("a", record.revision if record else 0)]
                    self.write(("swap", before, value), compare, value)
            except StoreUnavailable:
                continue

    def write(self, asked: Any, compare: list[Compare], value: bytes) -> None:
        begin, id = time.monotonic(), new_id()
        for _ in range(20):
            try:
                self.note(asked, self.store.transact(compare, [Put("a", value)], id).succeeded, begin)
                return
            except StoreUnavailable:
                if self.name == 0:
                    break  # this one never looks what became of it
        self.note(asked, LOST, begin)

    def wait_for_writes(self, count: int) -> None:
        """Wait until `count` more writes were acknowledged."""
        seen, deadline = len(self.history), time.monotonic() + 60
        while sum(call.result is True for call in self.history[seen:]) < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def note(self, asked: Any, result: Any, begin: float) -> None:
        end = float("inf") if result is LOST else time.monotonic()
        self.history.append(Call(asked, result, begin, end))


@pytest.mark.long
def test_without_most_members_nothing_is_acknowledged_that_is_lost(etcd: Etcd):
    store = open_store(etcd.url, "c", create=True)
    clients = [Client(store, name) for name in range(3)]
    leader = etcd.find_leader()
    refused = 0
    for victims in ([leader, (leader + 1) % 3], [(leader + 1) % 3, (leader + 2) % 3]):
        for client in clients:
            client.wait_for_writes(5)
        for victim in victims:
            etcd.silence(victim)
        for ask in (lambda: store.get(["a"]), lambda: store.grant(60), lambda: put(store, b"none")):
            with pytest.raises(StoreUnavailable, match="Most members of etcd must answer within 5 s"):
                ask()
            refused += 1
        # Who is waited for itself gives the store less time.
        with (
            end_calls_by(time.monotonic() + 1.5),
            pytest.raises(StoreUnavailable, match=r"within 1(\.\d)? s"),
        ):
            store.get(["a"])
        for victim in victims:
            etcd.resume(victim)
    for client in clients:
        client.wait_for_writes(5)
        client.stopped.set()
    for client in clients:
        client.thread.join()
    assert refused == 6
    found = store.get(["a"])[0].get("a")
    history = [call for client in clients for call in client.history]
    now = time.monotonic()
    history.append(Call(("read",), found and found.value, now, now))
    # What this test put itself, and what may or may not have been made.
    history += [Call(("write", b"none"), LOST, 0.0, float("inf"))] * 2
    assert any(call.result is LOST for call in history)
    assert sum(call.result is True for call in history) > 30
    assert find_order(history, None, register) is not None
    store.close()
