"""A home of its own for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.context import Context
from insitu.grid.reads import READS
from insitu.paths import Paths


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    home = tmp_path / "home"
    monkeypatch.setenv("INSITU_HOME", str(home))
    return Paths(home)


@pytest.fixture(autouse=True)
def no_reads_written_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test names as the target of this process's counts is forgotten after it."""
    monkeypatch.setattr(READS, "_target", None)


@pytest.fixture
def alone(paths: Paths) -> Context:
    """The context outside any job."""
    return Context(paths=paths)
