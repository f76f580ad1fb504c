from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from insitu.cluster.agents import job_lease
from insitu.cluster.agents.job_lease import JobLease
from insitu.cluster.agents.records import change_head
from insitu.errors import ClusterError
from insitu.paths import JobPaths, Paths

AWAY = ["b"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(job_lease.time, "monotonic", lambda: found.now)
    monkeypatch.setattr(job_lease.time, "sleep", lambda seconds: None)
    return found


def make_lease(
    home: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Paths], float | None], choice: str = "resume"
) -> JobLease:
    spec = type("Spec", (), {"on_take_over": choice})
    monkeypatch.setattr(job_lease, "read_spec", lambda job: spec)
    return JobLease(Paths(home), JobPaths(home / "jobs" / "digits-1"), ask)


def ask_and_wait(lease: JobLease) -> None:
    """Check, and wait until the head has been asked."""
    lease.check(AWAY)
    if lease._asking is not None:
        lease._asking.join(30)


def never(paths: Paths) -> float | None:
    raise ClusterError("no head answers")


def test_a_job_ends_before_another_node_may_take_over(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_head(Paths(tmp_path), take_over_after=30.0)
    lease = make_lease(tmp_path, monkeypatch, never)
    clock.now += 1000
    lease.check([])  # it reaches all copies, so nobody goes on from one
    clock.now += 14
    ask_and_wait(lease)
    clock.now += 2
    with pytest.raises(ClusterError, match=r"Received: b away, and too few agents for 15 s.*resume digits-1"):
        lease.check(AWAY)


def test_a_job_whose_head_hears_most_agents_goes_on_without_some_copies(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_head(Paths(tmp_path), take_over_after=30.0)
    heard: list[float | None] = [clock.now]
    lease = make_lease(tmp_path, monkeypatch, lambda paths: heard[-1])
    for _ in range(20):
        clock.now += 5
        heard.append(clock.now - 1)
        ask_and_wait(lease)
    heard.append(None)  # most of them have never spoken to this head
    ask_and_wait(lease)
    clock.now += 16
    with pytest.raises(ClusterError, match="too few agents"):
        lease.check(AWAY)


@pytest.mark.parametrize("later", [600.0, None])
def test_a_longer_time_of_which_agents_may_not_have_heard_does_not_count(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, later: float | None
) -> None:
    change_head(Paths(tmp_path), take_over_after=30.0)
    lease = make_lease(tmp_path, monkeypatch, never)
    ask_and_wait(lease)
    change_head(Paths(tmp_path), take_over_after=later)
    clock.now += 16
    with pytest.raises(ClusterError, match="too few agents for 15 s"):
        lease.check(AWAY)


@pytest.mark.parametrize(("choice", "after"), [("wait", 30.0), ("resume", None)])
def test_a_job_that_goes_on_nowhere_else_does_not_end(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, choice: str, after: float | None
) -> None:
    change_head(Paths(tmp_path), take_over_after=after)
    lease = make_lease(tmp_path, monkeypatch, never, choice)
    clock.now += 1e6
    lease.check(AWAY)
