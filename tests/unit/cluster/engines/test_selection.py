"""Engines by their names. `tests/process/test_jobs_engine.py` runs both."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.cluster.engines.selection import open_engine


def test_another_name_is_refused(tmp_path: Path):
    with pytest.raises(ClusterError, match=r"as insitu\.engines: k8s\. Received: 'cloud'\. Install"):
        open_engine("cloud", JobPaths(tmp_path), wake=0)
