"""A store with a cache, and servers for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from partition_servers import SECRET, certificate

from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid import bring_up, import_cache
from insitu.grid.serving import PartitionServer


@pytest.fixture
def paths(home: Path) -> Paths:
    return Paths(home)


@pytest.fixture
def cache(paths: Paths, tmp_path: Path) -> CacheSpec:
    """A cache of 9 MiB in one partition on node-0, with a copy on node-1; node-2 has none."""
    rows = np.random.default_rng(0).integers(0, 255, (9 << 10, 1 << 10), dtype=np.uint8)
    np.save(tmp_path / "a.npy", rows)
    bring_up(paths, 3)
    (cache,) = import_cache(paths, "a/b", [str(tmp_path / "a.npy")], partitions=1, backups=1)
    return cache


@pytest.fixture
def server(paths: Paths, cache: CacheSpec) -> Iterator[PartitionServer]:
    """A server of node-0."""
    server = PartitionServer(paths, NodeId("node-0"), SECRET, certificate())
    yield server
    server.stop()
