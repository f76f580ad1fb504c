"""A home of its own for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.context import Context
from insitu.paths import Paths


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    home = tmp_path / "home"
    monkeypatch.setenv("INSITU_HOME", str(home))
    return Paths(home)


@pytest.fixture
def alone(paths: Paths) -> Context:
    """The context outside any job."""
    return Context(paths=paths)
