"""A worker dies somewhere: the others keep their processes, another takes its place, nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recovering_jobs import RecoveringJob, make_cache

from insitu.paths import Paths


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any) -> tuple[Path, Paths, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("recovery")
    paths = Paths(root / "home")
    make_cache(paths, root)
    return root, paths, RecoveringJob(root, paths, "undisturbed", 2).run()


DEATHS = {
    "gradient": [["worker:1.1", "gradient", 1, 3]],
    "exchange": [["worker:1.1", "exchange", 1, 3]],
    "update": [["worker:1.1", "update", 1, 3]],
}


@pytest.mark.parametrize("name", DEATHS)
def test_nothing_changes(undisturbed, name: str):
    root, paths, expected = undisturbed
    job = RecoveringJob(root, paths, name.replace(" ", "-"), 2, DEATHS[name])
    results = job.run()
    for rule in DEATHS[name]:
        assert (job.out / f"injected-{rule[0]}").exists(), "the injection has not fired"
    for result, wanted in zip(results, expected, strict=True):
        assert result == wanted
