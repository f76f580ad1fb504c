"""The store in etcd: beside the conformance suite, lost answers and an etcd that isn't as it should be."""

from __future__ import annotations

import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import Etcd, add_users, make_certificates, needs_etcd

from insitu.base.errors import InputError, MetadataRefused, RevisionCompacted, StorageFull, StoreUnavailable
from insitu.base.net.certificates import make_certificate
from insitu.metadata import MAX_VALUE_BYTES, Compare, Delete, Put, open_store
from insitu.metadata.etcd import EtcdStore
from insitu.metadata.etcd_gateway import Unanswered

pytestmark = needs_etcd


@pytest.fixture
def store(etcd: Etcd, cluster: str) -> Iterator[EtcdStore]:
    made = open_store(etcd.url, cluster, create=True)
    assert isinstance(made, EtcdStore)
    yield made
    made.close()


def new_id() -> str:
    return secrets.token_hex(16)


def text(data: bytes) -> str:
    return b64encode(data).decode()


def delay_first(store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have the first transaction reach etcd only when the test says so, as one in a stopped process does."""
    call, delayed = store._gateway.call, []

    def call_later(path: str, body: Any, deadline: float) -> Any:
        if path == "kv/txn" and "failure" in body and not delayed:
            delayed.append(body)
            raise StoreUnavailable("lost")
        return call(path, body, deadline)

    monkeypatch.setattr(store._gateway, "call", call_later)
    return delayed


def test_a_try_that_arrives_late_makes_nothing_that_was_refused(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
):
    store.transact([], [Put("a", b"there")], new_id())
    asked, delayed = new_id(), delay_first(store, monkeypatch)
    with pytest.raises(StoreUnavailable):
        store.transact([Compare("a", 0)], [Put("a", b"late")], asked)
    assert not store.transact([Compare("a", 0)], [Put("a", b"late")], asked).succeeded
    store.transact([], [Delete("a")], new_id())
    # Its comparison would hold now. Whoever asked has heard that it wasn't made.
    store._gateway.call("kv/txn", delayed[0], time.monotonic() + 5)
    assert store.get(["a"])[0] == {}


def test_a_try_that_arrives_after_another_is_made_once(store: EtcdStore, monkeypatch: pytest.MonkeyPatch):
    asked, delayed = new_id(), delay_first(store, monkeypatch)
    with pytest.raises(StoreUnavailable):
        store.transact([], [Put("a", b"1")], asked)
    made = store.transact([], [Put("a", b"1")], asked)
    store.transact([], [Put("a", b"2")], new_id())
    store._gateway.call("kv/txn", delayed[0], time.monotonic() + 5)
    assert store.get(["a"])[0]["a"].value == b"2"
    assert store.transact([], [Put("a", b"1")], asked) == made


def test_ids_go_with_a_lease_of_ten_minutes(store: EtcdStore, etcd: Etcd):
    store.transact([], [Put("a", b"1")], new_id())
    prefix = store._prefix + b"ids/"
    found = etcd.ask(0, "kv/range", {"key": text(prefix), "rangeEnd": text(prefix[:-1] + b"0")})["kvs"]
    (lease,) = {kv["lease"] for kv in found}
    assert 600 <= int(etcd.ask(0, "lease/timetolive", {"ID": lease})["TTL"]) <= 660
    # Somebody ends it: the next transaction takes another.
    etcd.ask(0, "lease/revoke", {"ID": lease})
    assert store.transact([], [Put("a", b"2")], new_id()).succeeded


def test_keys_of_clusters_are_apart(store: EtcdStore, etcd: Etcd, cluster: str):
    store.transact([], [Put("a", b"1")], new_id())
    other = open_store(etcd.url, f"{cluster}-2", create=True)
    assert other.range("")[0] == []
    other.close()
    key = b64decode(store._encode(b"a"))
    assert key == f"/insitu/{cluster}/keys/a".encode()


def test_an_etcd_without_this_cluster_names_those_that_it_has(store: EtcdStore, etcd: Etcd, tmp_path: Path):
    with pytest.raises(InputError, match=r"none of another, but of \w+"):
        open_store(etcd.url, "another")
    with pytest.raises(InputError, match="letters"):
        open_store(etcd.url, "a/b", create=True)


def test_a_newer_format_is_refused(store: EtcdStore, etcd: Etcd, cluster: str):
    etcd.ask(0, "kv/put", {"key": text(store._prefix + b"format"), "value": text(b'{"format": 99}')})
    with pytest.raises(MetadataRefused, match="Received: 99"):
        open_store(etcd.url, cluster)


def test_an_older_etcd_is_refused(
    store: EtcdStore, etcd: Etcd, cluster: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        EtcdStore, "_call", lambda *arguments: {"etcdserver": "3.3.0", "etcdcluster": "3.3.0"}
    )
    with pytest.raises(MetadataRefused, match=r"3\.4 or newer. Received: '3\.3\.0'"):
        open_store(etcd.url, cluster)


def test_what_etcd_has_compacted_is_to_be_read_again(store: EtcdStore, etcd: Etcd):
    first = store.transact([], [Put("a", b"1")], new_id()).revision
    last = store.transact([], [Put("a", b"2")], new_id()).revision
    etcd.ask(0, "kv/compaction", {"revision": str(last)})
    with pytest.raises(RevisionCompacted, match="Read all again"):
        next(store.watch("", first - 1))


def test_large_values_are_read_by_answers_that_begin_soon(store: EtcdStore, monkeypatch: pytest.MonkeyPatch):
    for index in range(45):
        store.transact([], [Put(f"large/{index:03}", bytes(MAX_VALUE_BYTES))], new_id())
    small = [Put(f"small/{index:03}", b"") for index in range(99)]
    store.transact([], small, new_id())
    ask, sizes = store._gateway._exchange, []

    def measure(*arguments: Any) -> Any:
        answer = ask(*arguments)
        sizes.append(len(str(answer)))
        return answer

    monkeypatch.setattr(store._gateway, "_exchange", measure)
    found = store.range("large/", "", 1000)[0]
    assert len(found) == len(store.get([each.key for each in found])[0]) == 45
    assert max(sizes) < 20 * 1024 * 1024  # MAX_VALUE_BYTES as base64, 20 at a time
    del sizes[:]
    assert len(store.range("small/", "", 1000)[0]) == 99 and len(sizes) == 2


def test_a_full_etcd_is_read(tmp_path: Path):
    server = Etcd(tmp_path / "etcd", options=["--quota-backend-bytes", str(1 << 20)]).wait()
    try:
        store = open_store(server.url, "c", create=True)
        store.transact([], [Put("a", b"1")], new_id())
        with pytest.raises(StorageFull, match="alarm disarm"):
            for _ in range(10):
                store.transact([], [Put("b", b"x" * 400_000)], new_id())
        assert store.get(["a"])[0]["a"].value == b"1"
        store.close()
    finally:
        server.close()


def test_what_was_made_before_etcd_was_full_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = Etcd(tmp_path / "etcd", options=["--quota-backend-bytes", str(1 << 20)]).wait()
    try:
        store = open_store(server.url, "c", create=True)
        assert isinstance(store, EtcdStore)
        exchange = store._gateway._exchange

        def lose(endpoint: Any, path: str, data: bytes, *further: Any) -> Any:
            answer = exchange(endpoint, path, data, *further)
            if path == "kv/txn":
                monkeypatch.setattr(store._gateway, "_exchange", exchange)
                with pytest.raises(StorageFull, match="alarm disarm"):
                    for _ in range(10):
                        store.transact([], [Put("b", b"x" * 400_000)], new_id())
                raise Unanswered("the answer was lost")
            return answer

        monkeypatch.setattr(store._gateway, "_exchange", lose)
        made = store.transact([], [Put("a", b"1")], new_id())
        assert made.succeeded and store.get(["a"])[0]["a"].revision == made.revision
        store.close()
    finally:
        server.close()


def test_users_and_passwords(tmp_path: Path):
    server = Etcd(tmp_path / "etcd").wait()
    try:
        password = tmp_path / "password"
        password.write_text("sesame")
        password.chmod(0o600)
        add_users(server, {"me": b"/insitu/", "other": b"/other/"}, "sesame")
        with pytest.raises(MetadataRefused, match="USER@"):
            open_store(server.url, "c", create=True)
        with pytest.raises(MetadataRefused, match="permission denied"):
            open_store(f"etcd://other@{server.clients[0]}?password={password}", "c", create=True)
        store = open_store(f"etcd://me@{server.clients[0]}?password={password}", "c", create=True)
        told = store.watch("", store.get([])[1])
        lease = store.grant(60)
        store.transact([], [Put("a", b"1", lease)], new_id())
        assert next(told)[0].value == b"1"
        assert next(told) == []
        assert store.keep(lease)
        store.close()
        password.write_text("wrong")
        with pytest.raises(MetadataRefused, match="invalid user ID or password") as refused:
            open_store(f"etcd://me@{server.clients[0]}?password={password}", "c")
        assert "wrong" not in str(refused.value)
    finally:
        server.close()


def test_certificates(tmp_path: Path):
    make_certificates(tmp_path)
    options = ["--cert-file", "server.pem", "--key-file", "server.key", "--trusted-ca-file", "ca.pem"]
    options = [str(tmp_path / each) if "." in each else each for each in options]
    server = Etcd(tmp_path / "etcd", options=[*options, "--client-cert-auth"], scheme="https")
    try:
        own = f"certificate={tmp_path}/client.pem&key={tmp_path}/client.key"
        store = open_soon(f"{server.url}?ca={tmp_path}/ca.pem&{own}")
        told = store.watch("", store.get([])[1])
        store.transact([], [Put("a", b"1")], new_id())
        assert next(told)[0].value == b"1"
        store.close()
        (tmp_path / "other.pem").write_text(make_certificate().pem)
        for query in (f"?ca={tmp_path}/other.pem&{own}", f"?ca={tmp_path}/ca.pem"):
            with pytest.raises(MetadataRefused, match="as this etcd wants them"):
                open_store(f"{server.url}{query}", "c")
        with pytest.raises(StoreUnavailable, match="TLS"):
            open_store(server.url, "c")
    finally:
        server.close()


def open_soon(url: str) -> EtcdStore:
    """Open a store as soon as etcd has started."""
    deadline = time.monotonic() + 60
    while True:
        try:
            made = open_store(url, "c", create=True)
            assert isinstance(made, EtcdStore)
            return made
        except StoreUnavailable:
            assert time.monotonic() < deadline
