"""Jobs on hosts of their own leave behind what one without faults does on one machine, whatever is killed.

As test_disturbed_jobs.py; and hosts lose their power or their links. Run by `make nightly`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from disturbed_faults import (
    AGENT,
    CHIEF,
    EPOCHS,
    HEAD,
    ON_HOSTS,
    OTHER,
    Case,
    Comparison,
    at,
    choose_cases,
    compare_with_local,
    killing,
)
from disturbed_hits import LINK, POWER
from disturbed_jobs import PATHS, Place, make_cache
from host_cluster import Cluster

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare_with_local(tmp_path_factory.mktemp("disturbed"), 3)


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Three hosts with the cache of the scripts, a head beside them."""
    # Of paths, a task on a host has those of its agent.
    monkeypatch.setenv("PYTHONPATH", PATHS)
    cluster.up()
    place = Place(cluster.head, hosts=tuple(cluster.lab.hosts))
    make_cache(place, tmp_path, "--backups", "1")
    return place


@choose_cases(ON_HOSTS)
def test_on_hosts(jobs: Comparison, place: Place, tmp_path: Path, name: str) -> None:
    ON_HOSTS[name].check(jobs, tmp_path, place)


def test_agents_and_the_head_die(jobs: Comparison, place: Place, tmp_path: Path) -> None:
    """Nobody starts them again, and tasks die later."""
    faults = [
        *killing(AGENT, [at(CHIEF, "epoch_end", 0)], near=True),
        *killing(HEAD, [at(OTHER, "train_batch_end", 1, 2)]),
        *killing(AGENT, [at(CHIEF, "test_batch_end", 1, 1)]),
        at(OTHER, "train_batch_end", 2, 2),
        at(CHIEF, "epoch_end", EPOCHS - 1),
    ]
    Case(faults, backend="jax").check(jobs, tmp_path, place)


@pytest.mark.parametrize("what", [POWER, LINK])
@pytest.mark.parametrize(
    "fault",
    [at(CHIEF, "epoch_end", 1), at(OTHER, "train_batch_end", 1, 2), at(CHIEF, "train_end")],
    ids=["chief", "other", "end"],
)
def test_a_host_vanishes(jobs: Comparison, place: Place, tmp_path: Path, fault: dict, what: str) -> None:
    faults = [*killing(what, [fault]), at(OTHER, "test_batch_end", 0, 1)]
    Case(faults, backend="jax").check(jobs, tmp_path, place)
