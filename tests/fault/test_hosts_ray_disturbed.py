"""Jobs on the nodes of a Ray cluster leave behind what one without faults does on one machine.

As test_hosts_disturbed.py; and processes of Ray are killed. Run by `make test-ray` and `make nightly`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_hosts
from disturbed_faults import (
    AGENT,
    CHIEF,
    EPOCHS,
    ON_HOSTS,
    OTHER,
    Case,
    Comparison,
    at,
    choose_cases,
    compare_with_local,
    killing,
)
from disturbed_hits import CONTROLLER
from disturbed_jobs import PATHS, Place, make_cache
from hosts_lab import HostsLab
from ray_hosts import RayLab

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1800)]

RAYLET, HOLDER, ACTOR = "raylet/raylet", "ray::AgentHolder", "ray::AgentController"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare_with_local(tmp_path_factory.mktemp("disturbed"), 3)


@pytest.fixture
def place(whole_lab: HostsLab, tmp_path: Path) -> Iterator[Place]:
    """A Ray cluster on three hosts with the cache of the scripts; commands run on the first one."""
    if obstacle := ray_hosts.find_obstacle():
        pytest.skip(obstacle)
    whole_lab.clear()
    ray = RayLab(whole_lab)
    for host in whole_lab.hosts:
        ray.start(host, PYTHONPATH=PATHS)
    first = whole_lab.hosts[0]
    assert "3 of 3 nodes up" in ray.insitu(first, "up", "--engine", "ray").stderr
    enter = ("nsenter", "-t", str(first.pid), "-m", "-p", "-u", "-i", "-n", "env", f"HOME={first.disk}")
    place = Place(first.home, enter, tuple(whole_lab.hosts))
    make_cache(place, tmp_path, "--backups", "1")
    yield place
    ray.insitu(first, "down", "--force", code=None)
    whole_lab.clear()


@pytest.mark.slow
@choose_cases(ON_HOSTS)
def test_on_ray(jobs: Comparison, place: Place, tmp_path: Path, name: str) -> None:
    ON_HOSTS[name].check(jobs, tmp_path, place)


def test_the_raylet_of_a_host_dies(jobs: Comparison, place: Place, tmp_path: Path) -> None:
    """And with it all that insitu runs there. Its task continues elsewhere."""
    faults = [*killing(RAYLET, [at(OTHER, "train_batch_end", 1, 2)], near=True), at(CHIEF, "epoch_end", 2)]
    Case(faults, backend="jax").check(jobs, tmp_path, place)


@pytest.mark.slow
def test_what_keeps_agents_and_jobs_running_dies(jobs: Comparison, place: Place, tmp_path: Path) -> None:
    """Ray starts the agents again, and the supervisor its controller. Then tasks die."""
    faults = [
        *killing(HOLDER, [at(OTHER, "epoch_end", 0)], near=True),
        *killing(ACTOR, [at(CHIEF, "train_batch_end", 1, 2)]),
        *killing(AGENT, [at(OTHER, "test_batch_end", 1, 1)]),
        *killing(CONTROLLER, [at(CHIEF, "epoch_end", 2)]),
        at(OTHER, "train_batch_end", 3, 2),
        at(CHIEF, "epoch_end", EPOCHS - 1),
    ]
    Case(faults, backend="jax").check(jobs, tmp_path, place)
