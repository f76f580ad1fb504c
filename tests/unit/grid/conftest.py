"""What the tests of the grid share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from grid_jobs import ROWS

from insitu.base.context import Context
from insitu.base.paths import Paths
from insitu.grid import import_cache
from insitu.grid.reading.reads import READS


@pytest.fixture
def paths(home: Path) -> Paths:
    return Paths(home)


@pytest.fixture
def head(paths: Paths) -> Paths:
    """The home of a head."""
    paths.home.mkdir(mode=0o700)
    paths.head.write_text("{}")
    return paths


@pytest.fixture(autouse=True)
def no_reads_written_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test names as the target of this process's counts is forgotten after it."""
    monkeypatch.setattr(READS, "_target", None)


@pytest.fixture
def alone(paths: Paths) -> Context:
    """The context outside any job."""
    return Context(paths=paths)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of `ROWS` rows with columns of several types."""
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "a.npz",
        x=rng.integers(0, 255, (ROWS, 3, 2), dtype=np.uint8),
        id=np.arange(ROWS),
        name=np.array([f"row {i}" for i in range(ROWS)]),
        label=(np.arange(ROWS) % 10).astype(np.int32),
    )
    return tmp_path / "a.npz"


@pytest.fixture
def cache(paths: Paths, source: Path) -> str:
    """The name of a cache with the rows of `source` in 6 partitions."""
    import_cache(paths, "a", [str(source)], partitions=6)
    return "a"
