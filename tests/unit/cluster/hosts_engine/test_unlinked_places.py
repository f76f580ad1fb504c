"""The places of a job at its end: those that can't learn of it are removed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.cluster.hosts_engine.hosts_engine import HostsEngine

NODES = {"store-0", "store-1"}


class Link:
    """A link whose server ends at its first message."""

    is_lost = False

    def __init__(self, node: str) -> None:
        self.node = node
        self.messages: list[Any] = []

    def tell(self, message: Any) -> None:
        self.messages.append(message)
        self.is_lost = True


class Starter:
    removed = 0

    def remove_places(self) -> None:
        self.removed += 1
        raise ClusterError("the API server is unreachable")


def close(job: JobPaths, *linked: str) -> tuple[list[Any], int, list[str]]:
    """Close an engine that wanted servers on all nodes. Returns what those that are linked were sent, how
    often places were removed, and what was logged."""
    engine: Any = object.__new__(HostsEngine)
    links, starter, logged = [Link(node) for node in linked], Starter(), []
    engine._job, engine._starter, engine._log = job, starter, SimpleNamespace(log=logged.append)
    engine._links, engine._asked, engine._writers = {link.node: link for link in links}, {*NODES}, {}
    engine._acceptor = engine._supplies = SimpleNamespace(close=lambda: None)
    engine.close()
    return [message for link in links for message in link.messages], starter.removed, logged


def test_places_that_all_learn_of_the_end_stay(tmp_path: Path) -> None:
    assert close(JobPaths(tmp_path), *NODES) == ([{"do": "close", "code": None}] * 2, 0, [])


@pytest.mark.parametrize("linked", [(), ("store-1",)])
def test_places_are_removed_if_one_can_not_learn_of_the_end(tmp_path: Path, linked: tuple[str, ...]) -> None:
    sent, removed, logged = close(JobPaths(tmp_path), *linked)
    assert (len(sent), removed, logged) == (len(linked), 1, ["the API server is unreachable"])


def test_the_places_of_a_paused_job_stay_and_learn_of_no_end(tmp_path: Path) -> None:
    job = JobPaths(tmp_path)
    job.paused.touch()
    assert close(job, "store-0") == ([{"do": "close"}], 0, [])
