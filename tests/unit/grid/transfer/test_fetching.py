"""Partitions come from other nodes whole, with the bytes that were published, or not at all."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_addresses
from partition_servers import SECRET, certificate

from insitu.base.errors import CacheBusy, CorruptPartition, StorageFull, TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid import verify_copies
from insitu.grid.catalog.manifests import read_manifest
from insitu.grid.partitions.verification import verify_file
from insitu.grid.serving import PartitionServer
from insitu.grid.transfer import RateLimit, ServerAddress, fetch_partition, fetching
from insitu.grid.transfer.requests import ReadRequest, make_chunk

HERE = NodeId("node-2")


@pytest.fixture
def backup(paths: Paths, cache: CacheSpec) -> Iterator[PartitionServer]:
    """A server of node-1."""
    server = PartitionServer(paths, NodeId("node-1"), SECRET, certificate())
    yield server
    server.stop()


def nobody() -> ServerAddress:
    (free,) = free_addresses(1)
    port = int(free.rpartition(":")[2])
    return ServerAddress("127.0.0.1", port, certificate().pem)


@pytest.fixture
def fetch(paths: Paths, cache: CacheSpec) -> Callable[..., list[int]]:
    """Fetch the partition to node-2; return how many bytes were there, again and again."""

    def fetch(*servers: PartitionServer | ServerAddress, limit: RateLimit | None = None) -> list[int]:
        sources = [s.address if isinstance(s, PartitionServer) else s for s in servers]
        sizes: list[int] = []
        path = fetch_partition(
            paths, HERE, cache, 0, sources, SECRET, limit=limit, progress=lambda done, _: sizes.append(done)
        )
        assert path == paths.partition(HERE, "a/b", 1, 0)
        verify_file(path, cache.partitions[0], paths.verified(HERE, "a/b", 1, 0))
        names = {p.name for p in path.parent.iterdir() if p.suffix != ".verified"}
        assert names == {"part-00000.arrow", "manifest.json"}
        assert read_manifest(paths.manifest(HERE, "a/b", 1)).held == (0,)
        assert path.stat().st_mode & 0o777 == 0o600
        return sizes

    return fetch


def test_a_partition_is_fetched_once(
    fetch: Callable[..., list[int]], server: PartitionServer, cache: CacheSpec
):
    sizes = fetch(server, limit=RateLimit(1e12))
    assert sizes[0] == 0 and sizes[-1] == cache.partitions[0].bytes and len(sizes) >= 4
    assert fetch(nobody()) == [], "it is there"


@pytest.mark.parametrize("kept", [0, 1, 5 << 20])
def test_a_fetch_goes_on_where_another_ended(
    kept: int, fetch: Callable[..., list[int]], server: PartitionServer, paths: Paths
):
    partial = paths.partial(HERE, "a/b", 1, 0)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(paths.partition("node-0", "a/b", 1, 0).read_bytes()[:kept])
    assert fetch(server)[0] == kept


def test_what_was_left_is_not_trusted(fetch: Callable[..., list[int]], server: PartitionServer, paths: Paths):
    partial = paths.partial(HERE, "a/b", 1, 0)
    partial.parent.mkdir(parents=True)
    for left in (b"x" * 100, b"x" * (20 << 20)):
        partial.write_bytes(left)
        fetch(server)
        paths.partition(HERE, "a/b", 1, 0).unlink()


def test_another_source_takes_over(fetch: Callable[..., list[int]], server: PartitionServer, paths: Paths):
    fetch(nobody(), server)
    paths.partition(HERE, "a/b", 1, 0).unlink()
    empty = PartitionServer(paths, HERE, SECRET, certificate())
    try:
        fetch(empty, server)
    finally:
        empty.stop()


def test_a_source_that_sends_more_than_was_asked_for_is_cut_off(
    fetch: Callable[..., list[int]], server: PartitionServer, monkeypatch: pytest.MonkeyPatch
):
    def send(self: PartitionServer, path: Path, request: ReadRequest) -> Iterator[Any]:
        yield make_chunk(bytes(request.length + 1))

    monkeypatch.setattr(PartitionServer, "_read", send)
    with pytest.raises(TransferError, match=r"bytes were asked for\. Received: more"):
        fetch(server)


def test_a_source_with_wrong_bytes_is_passed_over(
    fetch: Callable[..., list[int]],
    server: PartitionServer,
    backup: PartitionServer,
    paths: Paths,
    cache: CacheSpec,
):
    damaged = paths.partition("node-0", "a/b", 1, 0)
    data = bytearray(damaged.read_bytes())
    data[1000] ^= 1
    damaged.write_bytes(data)
    fetch(server, backup)
    paths.partition(HERE, "a/b", 1, 0).unlink()
    with pytest.raises(CorruptPartition, match="other bytes than were published on"):
        fetch(server)
    assert not paths.partial(HERE, "a/b", 1, 0).exists()
    paths.partition("node-0", "a/b", 1, 0).write_bytes(data[:-1])
    with pytest.raises(
        TransferError, match=f"has only {len(data) - 1} bytes of Partition 0 of a/b version 1"
    ):
        fetch(server)
    assert [problem is None for _, _, problem in verify_copies(paths, cache)] == [False, True]


def test_without_a_source_all_are_named(fetch: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetching, "_PAUSE_SECONDS", 0.0)
    first, second = nobody(), nobody()
    with pytest.raises(TransferError, match=f"(?s){first}.*{second}.*0 bytes are here"):
        fetch(first, second)
    with pytest.raises(TransferError, match="no source was given"):
        fetch()


def test_two_processes_do_not_fetch_the_same(
    fetch: Callable[..., list[int]], server: PartitionServer, paths: Paths
):
    partial = paths.partial(HERE, "a/b", 1, 0)
    partial.parent.mkdir(parents=True)
    with partial.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CacheBusy, match="Another process fetches part-00000"):
            fetch(server)


def test_a_full_disk_leaves_nothing(
    fetch: Callable[..., list[int]], server: PartitionServer, paths: Paths, monkeypatch: pytest.MonkeyPatch
):
    calls = itertools.count()
    write = os.pwrite

    def full(*arguments: object) -> int:
        if next(calls) == 1:
            raise OSError(28, "No space left on device")
        return write(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageFull):
            fetch(server)
    assert not list(paths.version(HERE, "a/b", 1).iterdir())
    fetch(server)
