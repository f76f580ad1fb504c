"""Partitions arrive although the process that serves them is killed, or stops, in the middle."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from partition_servers import SECRET, ServerProcess

from insitu.base.errors import TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid import bring_up, import_cache
from insitu.grid.partitions import file_checksum
from insitu.grid.transfer import fetch_partition, fetching

HERE = NodeId("node-2")


@pytest.fixture
def paths(home: Path) -> Paths:
    return Paths(home)


@pytest.fixture
def cache(paths: Paths, tmp_path: Path) -> CacheSpec:
    """40 MiB in one partition, on node-0 and node-1."""
    rows = np.random.default_rng(0).integers(0, 255, (40 << 10, 1 << 10), dtype=np.uint8)
    np.save(tmp_path / "a.npy", rows)
    bring_up(paths, 3)
    (cache,) = import_cache(paths, "a", [str(tmp_path / "a.npy")], partitions=1, backups=1)
    return cache


def once_after(size: int, act: Callable[[], None]) -> tuple[Callable[[int, int], None], list[int]]:
    """Return a progress that calls `act` once `size` bytes are there, and how many were there then."""
    done: list[int] = []

    def progress(have: int, _: int) -> None:
        if have >= size and not done:
            done.append(have)
            act()

    return progress, done


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_node_goes_on(number: int, paths: Paths, cache: CacheSpec):
    with ServerProcess(paths, "node-0") as first, ServerProcess(paths, "node-1") as second:
        progress, done = once_after(8 << 20, lambda: first.signal(number))
        sources = [first.address, second.address]
        path = fetch_partition(paths, HERE, cache, 0, sources, SECRET, silence=2, progress=progress)
    assert done and file_checksum(path) == cache.partitions[0].checksum


def test_the_next_attempt_goes_on(paths: Paths, cache: CacheSpec, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetching, "_PAUSE_SECONDS", 0.0)
    with ServerProcess(paths, "node-0") as server:
        progress, done = once_after(8 << 20, server.kill)
        with pytest.raises(TransferError, match="bytes are here; the next attempt continues with them"):
            fetch_partition(paths, HERE, cache, 0, [server.address], SECRET, progress=progress)
    kept = paths.partial(HERE, "a", 1, 0).stat().st_size
    assert kept >= done[0] >= 8 << 20 and not paths.partition(HERE, "a", 1, 0).exists()
    sizes: list[int] = []
    with ServerProcess(paths, "node-0") as server:
        address = [server.address]
        path = fetch_partition(
            paths, HERE, cache, 0, address, SECRET, progress=lambda have, _: sizes.append(have)
        )
    assert sizes[0] == kept and file_checksum(path) == cache.partitions[0].checksum
