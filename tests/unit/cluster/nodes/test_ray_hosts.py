"""Bringing up and down on Ray, without Ray. tests/fault/test_hosts_ray.py does it on hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from insitu.base.errors import ClusterError
from insitu.base.paths import Paths
from insitu.cluster.nodes import ray_hosts
from insitu.cluster.nodes.hosts import DownReport
from insitu.cluster.nodes.ray_hosts import NodeReport, collect_outcomes, take_down_cluster
from insitu.cluster.wire.launching import Outcome
from insitu.cluster.wire.records import change_head, read_head

JOINED = {"node": "a", "address": "h:1", "host": "h"}


def report(node: str, state: Any, problem: str = "") -> NodeReport:
    joined = JOINED if state == "joined" else None
    return NodeReport(node, f"host-{node}", "10.0.0.1", state, joined, problem)


def collect(*answers: tuple[int, list[NodeReport]], seconds: float = 60) -> list[Outcome]:
    left, said = list(answers), list[Outcome]()
    found = collect_outcomes(lambda: left.pop(0) if len(left) > 1 else left[0], 2, said.append, seconds)
    assert sorted(said, key=str) == sorted(found, key=str)
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_hosts, "_POLL_SECONDS", 0.001)


def test_what_was_before_the_question_is_not_believed() -> None:
    old = [report("1", "failed", "old")]
    assert collect((1, old), (2, [report("1", "starting")]), (3, [report("1", "joined")])) == [
        Outcome("host-1", JOINED)
    ]


def test_nodes_that_fail_are_named_beside_those_that_join() -> None:
    nodes = [report("1", "joined"), report("2", "failed", "no room"), report("3", "ended")]
    assert collect((2, nodes)) == [
        Outcome("host-1", JOINED),
        Outcome("host-2", None, "no room"),
        Outcome("host-3", None, "its agent has ended"),
    ]


def test_a_node_that_says_nothing_is_named_at_the_end() -> None:
    (outcome,) = collect((2, [report("1", "starting")]), seconds=0.01)
    assert outcome.silent and "such as a free processor" in outcome.problem


class FakeRay:
    def __init__(self, calls: list[str], stays: set[str]) -> None:
        self.calls, self.stays = calls, stays

    def end_controller(self) -> None:
        self.calls.append("controller")

    def end_all(self) -> set[str]:
        self.calls.append("holders")
        return self.stays

    def list_nodes(self) -> list[Any]:
        return []


@pytest.fixture
def calls(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in its order."""
    done: list[str] = []

    def end_hosts(paths: Paths, *, delete: bool, report: Any) -> DownReport:
        done.append(f"hosts delete={delete}")
        return DownReport(("a",), {})

    monkeypatch.setattr(ray_hosts, "take_down_hosts", end_hosts)
    monkeypatch.setattr(ray_hosts, "find_gcs_obstacle", lambda address: None)
    change_head(Paths(home), ray="10.0.0.1:6379")
    return done


def let_connect(monkeypatch: pytest.MonkeyPatch, ray: FakeRay | Exception) -> None:
    @contextlib.contextmanager
    def connect(address: str, namespace: str) -> Iterator[FakeRay]:
        assert address == "10.0.0.1:6379" and namespace.startswith("insitu-")
        if isinstance(ray, Exception):
            raise ray
        yield ray

    monkeypatch.setattr(ray_hosts, "connect_to_ray", connect)


def take_down(home: Path) -> DownReport:
    return take_down_cluster(Paths(home), delete=True, report=lambda outcome: None)


def ray_of(home: Path) -> str:
    record = read_head(Paths(home))
    assert record is not None
    return record.ray


def test_what_starts_agents_ends_before_them(
    home: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_connect(monkeypatch, FakeRay(calls, set()))
    assert take_down(home) == DownReport(("a",), {})
    assert calls == ["controller", "hosts delete=True", "holders"] and ray_of(home) == ""


def test_an_actor_that_stays_is_named(home: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    let_connect(monkeypatch, FakeRay(calls, {"agent-1"}))
    assert list(take_down(home).left) == ["agent-1 in Ray"] and ray_of(home)


def test_ray_that_cannot_be_reached_is_named_and_nothing_is_deleted(
    home: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_connect(monkeypatch, ClusterError("no answer"))
    left = take_down(home).left
    assert list(left) == ["Ray at 10.0.0.1:6379"] and "no answer" in left["Ray at 10.0.0.1:6379"]
    assert calls == ["hosts delete=False"] and ray_of(home)


def test_ray_that_has_ended_needs_nothing(
    home: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_connect(monkeypatch, ClusterError("never called"))
    monkeypatch.setattr(ray_hosts, "find_gcs_obstacle", lambda address: ConnectionRefusedError())
    assert take_down(home) == DownReport(("a",), {})
    assert calls == ["hosts delete=True"] and ray_of(home) == ""
