"""When an agent begins an attempt to take over. The attempts are in tests/fault/test_hosts_take_over.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.cluster.agents import own_taking_over
from insitu.cluster.agents.own_taking_over import OwnTakingOver
from insitu.cluster.agents.take_over import NotNow
from insitu.cluster.decide.taking_over import MOST_ATTEMPTS, Verdict
from insitu.errors import ClusterError
from insitu.paths import Paths
from insitu.spec import NodeId


class Watched:
    """An agent on a clock of its own, whose attempts end in `outcome`."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.after: float | None = 30.0
        self.lost_at: float | None = None
        self.asked: list[tuple[float, float]] = []
        self.outcome: Exception | None = None
        monkeypatch.setattr(own_taking_over, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(own_taking_over, "take_over_if_due", self.attempt)
        head: Any = SimpleNamespace(read_vacancy=lambda: (self.after, self.lost_at))
        self.watch = OwnTakingOver(Paths(home), NodeId("a"), head)

    def attempt(self, paths: Paths, after: float, overdue: float) -> str:
        self.asked.append((self.now, overdue))
        if self.outcome is not None:
            raise self.outcome
        return "10.0.0.2:7000"

    def run(self, seconds: int) -> list[float]:
        """Let time pass, and return when attempts were made meanwhile."""
        before = len(self.asked)
        for _ in range(2 * seconds):
            self.watch._advance()
            self.now += 0.5
        return [at for at, _ in self.asked[before:]]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_an_agent_without_a_head_for_the_time_tries_it(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    assert watched.run(100) == []
    watched.lost_at = watched.now
    watched.outcome = NotNow(Verdict(wait=7.0))
    assert watched.run(30) == []
    assert watched.run(15) == [230.0, 237.0, 244.0]  # others come first
    assert watched.asked[1][1] == 7.0
    watched.outcome = None
    watched.run(10)
    assert "this node has taken over: the head is at 10.0.0.2:7000" in caplog.text


def test_obstacles_are_said_once_and_failures_are_counted(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.lost_at = watched.now
    watched.outcome = NotNow(Verdict("1 of 3 agents"))
    assert len(watched.run(3600)) > 50  # the others may come back at any time
    assert caplog.text.count("this node doesn't take over: 1 of 3 agents") == 1
    watched.outcome = ClusterError("no port is free")
    assert len(watched.run(3600)) == MOST_ATTEMPTS
    watched.lost_at = None
    watched.run(1)
    watched.lost_at = watched.now
    assert len(watched.run(3600)) == MOST_ATTEMPTS  # it had a head meanwhile


@pytest.mark.parametrize("reason", ["off", "head"])
def test_a_node_tries_nothing_where_that_is_off_or_its_home_is_a_heads(
    watched: Watched, tmp_path: Path, reason: str
) -> None:
    if reason == "off":
        watched.after = None
    else:
        Paths(tmp_path).head.write_text("{}")
    watched.lost_at = watched.now
    assert watched.run(3600) == []
