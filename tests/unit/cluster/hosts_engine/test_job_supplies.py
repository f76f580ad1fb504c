"""Further caches that tasks on hosts ask for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from job_runs import Insitu

from insitu.cluster import submit
from insitu.cluster.client import submission
from insitu.cluster.hosts_engine.job_supplies import JobSupplies
from insitu.grid import Catalog, import_cache
from insitu.options import JobOptions


def test_a_version_of_a_cache_may_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    insitu = Insitu(tmp_path)
    insitu.script("print('greeting')")
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    np.save(tmp_path / "x.npy", np.zeros((6, 2)))
    paths, catalog = insitu.paths, Catalog(insitu.paths)
    for _ in range(2):
        import_cache(paths, "b", [str(tmp_path / "x.npy")], overwrite=True, partitions=2)
        catalog.pin("b", 1, "other")
    job = submit(paths, JobOptions("data/train", insitu.folder, ("train.py",)))
    supplies = JobSupplies(paths.job(job))
    supplies.record_wanted("b@7", None)
    supplies.record_wanted("b@1", None)
    refused, answer = supplies.answer({})
    assert (refused["do"], refused["cache"]) == ("refused", "b")
    assert "which has versions 1, 2" in refused["text"]
    assert (answer["cache"], json.loads(answer["text"])["version"]) == ("b", 1)
    assert job in catalog.pinned_by("b", 1) and not catalog.pinned_by("b", 2)
    supplies.close()
