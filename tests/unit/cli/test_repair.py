"""`insitu repair`: what it prints and how it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_line import run

from insitu.base.errors import ClusterError
from insitu.base.paths import Paths
from insitu.base.spec import NO_CACHE, CacheSpec
from insitu.grid import Catalog, bring_up, import_cache


@pytest.fixture
def paths(home: Path, tmp_path: Path) -> Paths:
    """Two nodes with a cache, whose catalogue is lost."""
    np.save(tmp_path / "a.npy", np.arange(100))
    paths = Paths(home)
    bring_up(paths, 2)
    import_cache(paths, "a", [str(tmp_path / "a.npy")], partitions=2)
    paths.catalog.unlink()
    return paths


def test_a_dry_run_changes_nothing_and_a_repair_puts_back(paths: Paths):
    assert "a version 1" in run("caches").stderr, "lost versions are named"
    shown = run("repair", "--dry-run")
    assert "would be restored" in shown.stdout and "nothing was changed" in shown.stderr
    assert "written." not in shown.stderr
    assert shown.exit_code == 0 and not paths.catalog.exists()
    result = json.loads(run("repair", "--json").stdout)
    assert result["restored"] == [
        {"cache": "a", "version": 1, "rows": 100, "bytes": result["restored"][0]["bytes"]}
    ]
    assert result["complete"] and Catalog(paths).get("a").rows == 100
    assert "in the catalogue" in run("repair").stdout
    (listed, _) = json.loads(run("nodes", "--json").stdout)
    assert len(listed["store_id"]) == 32


def test_what_is_left_out_is_named_with_exit_code_1(paths: Paths):
    shutil.rmtree(paths.node("node-1"))
    result = run("repair")
    assert result.exit_code == 1 and "left out: 1 partition is missing: 1" in result.stdout
    assert "repair again" in result.stderr


def test_an_empty_home_has_nothing_to_repair(home: Path):
    result = run("repair")
    assert result.exit_code == 0 and "no caches" in result.stderr


def test_what_running_jobs_read_stays_pinned(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    """Who used what was in the catalogue that is lost: the next import would remove their data."""
    jobs = {"runs-1": "a", "ended-1": "a", "own-1": NO_CACHE, "broken-1": "a"}
    running = [job_id for job_id in jobs if job_id != "ended-1"]
    monkeypatch.setattr("insitu.cluster.find_running_jobs", lambda _: (running, []))
    monkeypatch.setattr("insitu.cluster.read_spec", lambda job: SimpleNamespace(cache=jobs[job.root.name]))

    def read_placement(job: Any) -> tuple[None, CacheSpec]:
        if job.root.name == "broken-1":
            raise ClusterError("no placement")
        return None, Catalog(paths).get("a")

    monkeypatch.setattr("insitu.cluster.read_placement", read_placement)
    assert "broken-1 runs, but what it reads can't be kept" in run("repair").stderr
    assert Catalog(paths).pinned_by("a", 1) == ["runs-1"]
