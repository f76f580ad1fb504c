"""What the tests of the grid share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from insitu.context import Context
from insitu.grid.reads import READS
from insitu.paths import Paths

# An example may take as long as a loaded machine needs.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture
def paths(home: Path) -> Paths:
    return Paths(home)


@pytest.fixture(autouse=True)
def no_reads_written_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test names as the target of this process's counts is forgotten after it."""
    monkeypatch.setattr(READS, "_target", None)


@pytest.fixture
def alone(paths: Paths) -> Context:
    """The context outside any job."""
    return Context(paths=paths)
