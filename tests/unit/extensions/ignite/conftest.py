"""What the tests of Ignite share."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.base.paths import Paths


@pytest.fixture
def paths(home: Path) -> Paths:
    return Paths(home)
