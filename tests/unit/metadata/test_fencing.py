"""Who may change a cluster's metadata in etcd."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from pathlib import Path

import pytest

from insitu.base.errors import CorruptMetadata, HeadReplaced
from insitu.base.paths import Paths
from insitu.metadata import (
    HEAD_KEY,
    Compare,
    FencedStore,
    LeaderKey,
    MetadataSettings,
    MetadataStore,
    Put,
    fencing,
    open_fenced,
    open_store,
    read_leader,
    write_fence,
    write_settings,
)


def put(store: MetadataStore | FencedStore, key: str, value: bytes, *compare: Compare) -> int:
    outcome = store.transact(compare, [Put(key, value)], secrets.token_hex(16))
    assert outcome.succeeded
    return outcome.revision


def lead(store: MetadataStore, key: LeaderKey) -> FencedStore:
    put(store, HEAD_KEY, key.encode())
    return FencedStore(store, key.encode())


def test_a_replaced_head_changes_nothing_in_an_etcd_that_was_restored(tmp_path: Path) -> None:
    """Its key was written after the copy was made, so the restored etcd gives its revision again."""
    open_store(tmp_path / "first", "c", create=True).close()
    shutil.copy(tmp_path / "first", tmp_path / "restored")
    with contextlib.closing(open_store(tmp_path / "first", "c")) as store:
        first = lead(store, LeaderKey("h:1", 1, "x"))
        revision = store.get([HEAD_KEY])[1]
    with contextlib.closing(open_store(tmp_path / "restored", "c")) as store:
        lead(store, LeaderKey("h:2", 1, "y"))
        assert store.get([HEAD_KEY])[1] == revision
        with pytest.raises(HeadReplaced, match="h:2"):
            put(FencedStore(store, first.fence), "a", b"1")


def test_only_who_has_the_key_changes_something(store: MetadataStore) -> None:
    first = lead(store, LeaderKey("h:1", 1, "x"))
    made = put(first, "a", b"1")
    id = secrets.token_hex(16)
    refused = first.transact([Compare("a", made + 100)], [Put("a", b"2")], id)
    assert not refused.succeeded and [record.key for record in refused.found] == ["a"]
    assert first.transact([Compare("a", made)], [Put("a", b"2")], id).succeeded
    second = lead(store, LeaderKey("h:2", 2, "y"))
    late = secrets.token_hex(16)
    for _ in range(2):
        with pytest.raises(HeadReplaced, match="leads is the one at h:2"):
            first.transact([], [Put("a", b"3")], late)
    put(second, "b", b"1")
    store.transact([], [Put(HEAD_KEY, LeaderKey("", 3, "z").encode())], secrets.token_hex(16))
    with pytest.raises(HeadReplaced, match="one that is being started"):
        put(second, "b", b"2")
    found, _ = first.get(["a", "b"])
    assert {key: record.value for key, record in found.items()} == {"a": b"2", "b": b"1"}


def test_nobody_changes_something_once_the_lease_has_ended(store: MetadataStore) -> None:
    lease, key = store.grant(10.0), LeaderKey("h:1", 1, "x").encode()
    store.transact([], [Put(HEAD_KEY, key, lease)], "1" * 32)
    head = FencedStore(store, key)
    put(head, "a", b"1")
    store.revoke(lease)
    with pytest.raises(HeadReplaced, match="the lease of the one here has ended"):
        put(head, "a", b"2")


def test_a_home_changes_by_the_right_of_its_head(
    store: MetadataStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = Paths(tmp_path)
    assert open_fenced(paths) is None
    write_settings(paths, MetadataSettings("c", "etcd://h:1"))
    with pytest.raises(HeadReplaced):
        open_fenced(paths)
    monkeypatch.setattr(fencing, "open_etcd", lambda settings: store)
    write_fence(paths, lead(store, LeaderKey("h:1", 1, "x")).fence)
    assert paths.fence.stat().st_mode & 0o777 == 0o600
    home = open_fenced(paths)
    assert home is not None
    put(home, "a", b"1")
    put(store, HEAD_KEY, LeaderKey("h:2", 2, "y").encode())
    with pytest.raises(HeadReplaced):
        put(home, "a", b"2")


@pytest.mark.parametrize(
    "value", [b"", b"[]", b"{}", b'{"address": 1, "epoch": 1, "instance": "", "down": 0}']
)
def test_a_key_that_names_no_head_is_named(store: MetadataStore, value: bytes) -> None:
    put(store, HEAD_KEY, value)
    with pytest.raises(CorruptMetadata, match="must say which head leads"):
        read_leader(store.get([HEAD_KEY])[0][HEAD_KEY])
