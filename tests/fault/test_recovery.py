"""A worker dies somewhere: the others keep their processes, another takes its place, nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recovering_jobs import RecoveringJob, make_cache

from insitu.base.context import Context
from insitu.base.paths import Paths
from insitu.grid import Catalog, audit, dataset, read_ledgers
from insitu.grid.reading.shards import read_shard_map

pytestmark = pytest.mark.timeout(300)

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
    # The chief, then the next one in the middle of writing a checkpoint.
    "chief-validating": [
        ["worker:0.1", "tested", 1, 1],
        ["worker:0.2", "writing", "epoch-00002.step-00000000"],
        ["worker:1.1", "epoch end", 2],
    ],
    "between-calls": [["worker:1.1", "between"], ["worker:0.1", "gradient", 0, 0, 1]],
}


@pytest.mark.parametrize(
    "name",
    ["chief-validating", *(pytest.param(n, marks=pytest.mark.slow) for n in ("in-turn", "between-calls"))],
)
@pytest.mark.long
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
    assert_who_lives_went_on(job)
    assert_rows_counted_themselves(paths, results)
    assert (job.out / "log.csv").read_text() == (root / "undisturbed" / "log.csv").read_text()
    assert_ledger_clean(job, paths)


@pytest.mark.slow
def test_all_go_on_from_memory_when_the_disk_is_lost(undisturbed: World):
    root, paths, expected = undisturbed
    deaths = [["worker:0.1", "exchange", 2, 3], ["worker:1.1", "exchange", 2, 3]]
    job = RecoveringJob(root, paths, "memory", 2, deaths, disk_lost=True)
    assert job.run() == expected
    assert len(list(job.out.glob("injected-*"))) == 2
    # Worker 0 had the disk; what it continued with came out of worker 1's memory, so it did no step of epoch
    # 0.
    assert "Training continues from" in job.told()


@pytest.mark.torch
def test_nothing_changes_on_torch_either(tmp_path: Path):
    paths = Paths(tmp_path / "home")
    make_cache(paths, tmp_path)
    expected = RecoveringJob(tmp_path, paths, "undisturbed", 2, backend="torch").run()
    deaths = [["worker:1.1", "gradient", 1, 3], ["worker:0.1", "tested", 1, 1]]
    job = RecoveringJob(tmp_path, paths, "killed", 2, deaths, backend="torch")
    assert job.run() == expected
    assert len(list(job.out.glob("injected-*"))) == 2
    assert len(list(job.out.glob("began-*"))) == 4
    assert_who_lives_went_on(job)
    assert_ledger_clean(job, paths)


def assert_who_lives_went_on(job: RecoveringJob) -> None:
    for ended in job.out.glob("ended-*"):
        life, pid = ended.read_text().split()
        assert (job.out / f"began-{life}").read_text() == pid


def assert_rows_counted_themselves(paths: Paths, results: list[dict[str, Any]]) -> None:
    """The model has summed up numbers that rows carry; the same is summed here over the cache."""
    batches = dataset("images/train", context=Context(paths)).batch(64)
    ids = np.concatenate([x[:, 0, 0].astype(int) * 32 + x[:, 0, 1] for x, _ in batches])
    assert len(set(ids.tolist())) == len(ids)
    for result in results:
        for history, epochs in ((result["history"], 3), (result["second"], 2)):
            assert history["ids"] == [float(ids.sum())] * epochs
            assert history["squares"] == [float((ids * ids % 1009).sum())] * epochs


def assert_ledger_clean(job: RecoveringJob, paths: Paths) -> None:
    found = read_shard_map(job.job.shard_map("images/train"))
    assert found is not None
    audits = audit(Catalog(paths).get("images/train"), found[0], read_ledgers(job.job))
    assert [epoch.epoch for epoch in audits] == [0, 1, 2]
    assert all(epoch.complete and epoch.clean for epoch in audits)
