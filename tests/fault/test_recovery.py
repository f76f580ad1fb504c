"""A worker dies somewhere: the others keep their processes, another takes its place, nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recovering_jobs import RecoveringJob, make_cache

from insitu.grid import Catalog, audit, read_ledgers
from insitu.grid.shards import read_shard_map
from insitu.paths import Paths

World = tuple[Path, Paths, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any) -> World:
    root = tmp_path_factory.mktemp("recovery")
    paths = Paths(root / "home")
    make_cache(paths, root)
    return root, paths, RecoveringJob(root, paths, "undisturbed", 2).run()


DEATHS = {
    # The second dies while the first's replacement is on its way there; then the chief, in a later call.
    "in-turn": [
        ["worker:1.1", "exchange", 1, 3],
        ["worker:1.2", "gradient", 1, 3],
        ["worker:0.1", "update", 2, 2],
        ["worker:1.3", "tested", 2, 1],
    ],
    "chief-validating": [["worker:0.1", "tested", 1, 1], ["worker:1.1", "epoch end", 2]],
    "between-calls": [["worker:1.1", "between"], ["worker:0.1", "gradient", 0, 0, 1]],
}


@pytest.mark.parametrize(
    "name",
    ["chief-validating", *(pytest.param(n, marks=pytest.mark.slow) for n in ("in-turn", "between-calls"))],
)
def test_nothing_changes(undisturbed: World, name: str):
    root, paths, expected = undisturbed
    job = RecoveringJob(root, paths, name, 2, DEATHS[name])
    results = job.run()
    for rule in DEATHS[name]:
        assert (job.out / f"injected-{rule[0]}").exists(), f"{rule} has not fired: {job.told()}"
    for result, wanted in zip(results, expected, strict=True):
        assert result == wanted
    lives = sorted(path.name for path in job.out.glob("began-*"))
    assert len(lives) == 2 + len(DEATHS[name]), "somebody else began anew"
    assert (job.out / "log.csv").read_text() == (root / "undisturbed" / "log.csv").read_text()
    assert_ledger_clean(job, paths)


def assert_ledger_clean(job: RecoveringJob, paths: Paths) -> None:
    found = read_shard_map(job.job.shard_map("images/train"))
    assert found is not None
    audits = audit(Catalog(paths).get("images/train"), found[0], read_ledgers(job.job))
    assert [epoch.epoch for epoch in audits] == [0, 1, 2]
    assert all(epoch.complete and epoch.clean for epoch in audits)
