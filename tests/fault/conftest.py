"""Hosts that tests of a file share, each test with a cluster of its own on them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_hosts import insitu
from host_cluster import Cluster
from hosts_lab import HostsLab, find_obstacle


@pytest.fixture(scope="module")
def whole_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsLab]:
    """Three hosts, as tests have left them."""
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    with HostsLab(tmp_path_factory.mktemp("lab"), 3) as lab:
        yield lab


@pytest.fixture
def cluster(whole_lab: HostsLab, tmp_path: Path) -> Iterator[Cluster]:
    """Three hosts on which nothing runs, and a home for a head beside them."""
    whole_lab.clear()
    found = Cluster(whole_lab, tmp_path / "head")
    yield found
    for host in whole_lab.hosts:
        host.heal()
    if found.head.exists():
        insitu(found.head, "down", code=None)
    whole_lab.clear()
    for host in whole_lab.hosts:
        shutil.rmtree(host.disk / "agent", ignore_errors=True)
