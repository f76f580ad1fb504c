"""What a server is asked for is checked field by field before anything is done."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from partition_servers import SECRET

from insitu.base.errors import InputError, InsituError, TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid.serving import PartitionServer, store_actions
from insitu.grid.serving.store_actions import MAX_BODY_BYTES, StoreActions
from insitu.grid.transfer import PartitionClient
from insitu.grid.transfer import client as client_module
from insitu.grid.transfer.authentication import derive_credentials


@pytest.fixture
def actions(paths: Paths, cache: CacheSpec) -> StoreActions:
    return StoreActions(paths, NodeId("node-0"), SECRET)


def act(actions: StoreActions, kind: str, **fields: Any) -> Any:
    return json.loads(actions.do(kind, json.dumps(fields).encode()))


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("no-such", b"{}", "A server knows open_rows, .* survey, prepare"),
        ("survey", b"[" * 100_000, "An action is JSON"),
        ("survey", b"[]", "are an object"),
        ("survey", b"{}", "caches is a list"),
        ("survey", b'{"caches": [1]}', "cache must be text"),
        ("survey", b'{"caches": ["../x"]}', "cache"),
        ("prepare", b"{}", "cache must describe a version"),
        ("end", b'{"cache": "a", "token": "../x", "published": true}', "An import's token"),
        ("end", b'{"cache": "a", "token": "x", "published": 1}', "published is true or false"),
        ("task", b'{"task": 1}', "task must be text"),
        ("manifest", b'{"cache": "a", "version": true}', "version must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused(actions: StoreActions, kind: str, body: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        actions.do(kind, body)


def test_an_action_has_a_limit(actions: StoreActions) -> None:
    with pytest.raises(InputError, match="bytes at most"):
        actions.do("survey", b" " * (MAX_BODY_BYTES + 1))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../up"},
        {"version": 0},
        {"version": "1"},
        {"partitions": []},
        {"partitions": [{"index": 0}]},
        {"columns": 3},
    ],
)
def test_a_version_is_checked(actions: StoreActions, cache: CacheSpec, change: dict[str, Any]) -> None:
    fields = {"partitions": [0], "sources": {}, "marked": True, "rate": None}
    for kind in ("fetch", "verify"):
        with pytest.raises(InsituError):
            act(actions, kind, cache={**cache.to_json(), **change}, **fields)


@pytest.mark.parametrize(
    "change",
    [
        {"partitions": [1]},
        {"partitions": [-1]},
        {"partitions": "0"},
        {"sources": []},
        {"sources": {"a": "b"}},
        {"sources": {"a": {"host": "h", "port": 0, "certificate": ""}}},
        {"marked": None},
    ],
)
def test_a_fetch_is_checked(actions: StoreActions, cache: CacheSpec, change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        fields: dict[str, Any] = {"partitions": [0], "sources": {}, "marked": True, **change}
        act(actions, "fetch", cache=cache.to_json(), **fields)


@pytest.mark.parametrize("info", [{"bytes": -1}, {"checksum": "md5:0"}, {"owners": ["../x"]}, {"rows": 1.5}])
def test_a_partition_is_checked(actions: StoreActions, cache: CacheSpec, info: dict[str, Any]) -> None:
    data = cache.to_json()
    data["partitions"] = [{**data["partitions"][0], **info}]
    with pytest.raises(InputError):
        act(actions, "verify", cache=data, partitions=[0], rate=None)


def test_a_store_says_what_it_has(actions: StoreActions, paths: Paths, cache: CacheSpec) -> None:
    found = act(actions, "survey", caches=["a/b", "other"])
    assert found["next"] == {"a/b": 2, "other": 1} and found["quota_free"] is None and found["disk_free"] > 0
    assert found["published"] == {"a/b": 1, "other": 0}
    assert act(actions, "manifests") == [["a/b", 1]]
    manifest = act(actions, "manifest", cache="a/b", version=1)
    assert manifest["held"] == [0] and CacheSpec.from_json(manifest["manifest"]["spec"]) == cache
    assert "can't be read" in act(actions, "manifest", cache="a/b", version=2)["problem"]
    assert act(actions, "task", task="x") == {"known": False}


def test_a_stranger_has_nothing_done(server: PartitionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger, member = derive_credentials(b"x" * 16), derive_credentials(SECRET)
    for credentials, words in {stranger: "failed: ", member: "refuses this cluster's secret"}.items():
        with monkeypatch.context() as patch:  # in TLS, and by the token
            patch.setattr(client_module, "derive_credentials", lambda secret, found=credentials: found)
            with (
                PartitionClient(server.address, b"x" * 16) as client,
                pytest.raises(TransferError, match=words),
            ):
                client.act("manifests", {})
    with PartitionClient(server.address, SECRET) as client:
        assert client.act("manifests", {}) == [["a/b", 1]]
        with pytest.raises(TransferError, match=r"refuses: A server knows .* survey.*'x'$"):
            client.act("x", {})


def test_what_is_remembered_of_imports_and_fetches_is_bounded(
    actions: StoreActions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_actions, "_MOST_ENDED", 3)
    for number in range(5):
        actions.end_import("people", f"token-{number}", published=False)
    assert list(actions._ended) == [("people", f"token-{n}") for n in (2, 3, 4)]
    inside, most, guard = [0], [0], threading.Lock()

    def fetch() -> None:
        with actions._fetch_alone(("people", 1, 0)):
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            with guard:
                inside[0] -= 1

    with ThreadPoolExecutor(8) as threads:
        for each in [threads.submit(fetch) for _ in range(200)]:
            each.result()
    with pytest.raises(ZeroDivisionError), actions._fetch_alone(("people", 1, 0)):
        raise ZeroDivisionError
    assert most[0] == 1 and not actions._fetching
