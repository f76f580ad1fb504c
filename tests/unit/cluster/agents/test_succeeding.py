"""Which jobs go on after a head has taken over, and who is told of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.cluster.agents import succeeding
from insitu.cluster.agents.records import change_head, write_token
from insitu.cluster.agents.succeeding import Claims, resume_jobs
from insitu.cluster.decide import CopyVersion
from insitu.errors import ClusterError
from insitu.paths import Paths
from insitu.spec import JobSpec, NodeId

A = NodeId("a")
PROGRAM = """
import os, pathlib, sys
home = pathlib.Path(os.environ["INSITU_HOME"])
(home / "jobs" / sys.argv[-1]).mkdir(parents=True, exist_ok=True)
with open(home / "resumed", "a") as file:
    file.write(f"{sys.argv[-1]} {os.environ.get('INSITU_CLUSTER')}\\n")
print("as it should", file=sys.stderr)
sys.exit(sys.argv[-1] == "broken-1")
"""


class Copies:
    """What hosts answer about jobs."""

    def __init__(self) -> None:
        #: The choice of each job that has a copy.
        self.jobs: dict[str, str] = {}
        #: What is served, in one look after another; the last one stays.
        self.served: list[set[str]] = [set()]
        self.looks = 0
        #: The hosts that have joined, in one look after another; the last one stays.
        self.joined: list[set[str]] = [{"a", "b"}]

    @property
    def nodes(self) -> set[str]:
        return self.joined.pop(0) if len(self.joined) > 1 else self.joined[0]

    def list_copies(self) -> dict[str, dict[NodeId, CopyVersion]]:
        self.looks += 1
        if self.looks == 1:
            raise ClusterError("no agent has joined yet")
        return {job: {A: CopyVersion(0, 5)} for job in self.jobs}

    def list_served(self) -> set[str]:
        return self.served.pop(0) if len(self.served) > 1 else self.served[0]

    def read_specification(self, node: NodeId, job_id: str) -> dict[str, Any]:
        spec = JobSpec(job_id, "j", "-", ("train.py",), 1, 1, engine="hosts", on_take_over="resume")
        return {**spec.to_json(), "on_take_over": self.jobs[job_id]}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    found = Copies()

    @contextlib.contextmanager
    def open_reader(paths: Paths) -> Iterator[Copies]:
        yield found

    monkeypatch.setattr(succeeding, "open_copy_reader", open_reader)
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    monkeypatch.setattr(succeeding, "time", clock)
    monkeypatch.setenv("INSITU_CLUSTER", "10.0.0.1:7000")
    return found


def go_on(home: Path) -> list[str]:
    resume_jobs(Paths(home), [A, NodeId("b")], (sys.executable, "-c", PROGRAM), 20.0)
    return (home / "resumed").read_text().splitlines() if (home / "resumed").exists() else []


def test_jobs_that_want_it_go_on_once_and_others_are_named(
    copies: Copies, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies.jobs = {"one-1": "resume", "two-2": "wait", "broken-1": "resume", "alien-1": "fly"}
    assert go_on(tmp_path) == ["broken-1 None", "one-1 None"]  # the address of the head of before isn't asked
    assert copies.looks > 5
    assert caplog.text.count("one-1 goes on here: as it should") == 1
    assert caplog.text.count("hosts keep a copy of two-2: `insitu resume two-2`") == 1
    assert caplog.text.count("the copy of alien-1 on a can't be read: --on-take-over must be") == 1
    assert "broken-1 doesn't go on here: as it should. `insitu resume broken-1`" in caplog.text


def test_a_job_waits_until_its_hosts_have_lost_its_supervisor(copies: Copies, tmp_path: Path) -> None:
    copies.jobs = {"one-1": "resume"}
    copies.served = [{"one-1"}, {"one-1"}, set()]
    assert go_on(tmp_path) == ["one-1 None"]


def test_nothing_goes_on_before_those_have_joined_that_have_promised_to_obey(
    copies: Copies, tmp_path: Path
) -> None:
    """One of them may be served by a supervisor that lives."""
    copies.jobs = {"one-1": "resume"}
    copies.looks = 1
    copies.joined = [{"a"}, {"a"}, {"a", "b", "c"}]
    copies.served = [{"one-1"}]
    assert go_on(tmp_path) == [] and copies.looks > 3
    copies.joined, copies.served = [{"a"}], [set()]
    assert go_on(tmp_path) == ["one-1 None"]  # one of them is lost, too


def test_a_job_whose_supervisor_lives_stays_with_it(
    copies: Copies, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies.jobs = {"one-1": "resume"}
    copies.served = [{"one-1"}]
    assert go_on(tmp_path) == []
    assert "one-1 goes on where it is: its supervisor serves hosts" in caplog.text


def test_a_job_that_this_home_knows_is_left_alone(copies: Copies, tmp_path: Path) -> None:
    """Somebody has brought it, or the head before this one has."""
    copies.jobs = {"one-1": "resume"}
    Paths(tmp_path).job("one-1").root.mkdir(parents=True)
    assert go_on(tmp_path) == []


def test_the_head_of_before_is_told_until_it_answers_and_again(
    copies: Copies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken = {"node": "b", "from": "10.0.0.1:7000", "at": 1.8e9, "why": "it was lost"}
    record = change_head(Paths(tmp_path), epoch=9, instance="i", address="10.0.0.2:7000", taken_over=taken)
    write_token(Paths(tmp_path), "t" * 32)
    told: list[tuple[str, dict[str, Any]]] = []

    def ask(address: str, token: str, message: dict[str, Any], *_: object, **__: object) -> dict[str, Any]:
        told.append((address, message))
        if len(told) == 1:
            raise ClusterError("nobody answers")
        return {}

    monkeypatch.setattr(succeeding, "ask_head", ask)
    monkeypatch.setattr(succeeding, "ask_for_nodes", lambda address, token: [])
    claims = Claims(Paths(tmp_path), record)
    for _ in range(40):
        claims.advance()
        succeeding.time.sleep(1.0)
    claim = {"cluster": record.cluster, "address": "10.0.0.2:7000", "epoch": 9, "instance": "i"}
    assert 3 <= len(told) <= 6 and {address for address, _ in told} == {"10.0.0.1:7000"}
    assert all(message == {"do": "succeeded", **claim} for _, message in told)
    assert "the head of before, at 10.0.0.1:7000, is there again and has ended" in caplog.text
