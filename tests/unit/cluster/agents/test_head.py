"""The head's connections. What it decides is tested in decide/test_membership.py, the process elsewhere."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from agent_facts import LOAD, VERSIONS, facts

from insitu.cluster.agents import head as module
from insitu.cluster.agents.head import Head, _Caller
from insitu.cluster.agents.records import HeadRecord
from insitu.cluster.decide import Membership
from insitu.cluster.engines import Channel
from insitu.paths import Paths


class NobodyCalls:
    """An acceptor without callers."""

    def list_late(self) -> Iterator[int]:
        yield from ()


@pytest.fixture
def head(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    home.mkdir(mode=0o700)
    monkeypatch.setattr(module, "Wakeup", lambda *signals: None)  # it would take over those of the tests
    made = Head(Paths(home), NobodyCalls(), HeadRecord("c" * 32, address="h:1"))  # type: ignore[arg-type]
    made._membership = Membership(VERSIONS)
    yield made
    for caller in made._callers.values():
        caller.channel.close()


def connect(head: Head, role: str) -> tuple[_Caller, socket.socket]:
    here, there = socket.socketpair()
    there.settimeout(30)
    number = len(head._callers) + 1
    head._callers[number] = _Caller(number, Channel(here), role)
    return head._callers[number], there


def test_who_takes_no_part_is_disconnected_after_a_while(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, member = connect(head, "agent")
    asking, waiting = connect(head, "client")
    others = [connect(head, "agent")[1], connect(head, "client")[1]]
    said = asdict(facts(clock=time.time()))
    join = {"do": "join", "facts": said, "load": asdict(LOAD), "waited": 0.0}
    head._handle(joined, json.loads(json.dumps(join)))
    head._handle(asking, {"do": "check"})
    head._end_idle()
    assert len(head._callers) == 4
    began = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: began + module.JOINED_SECONDS + 1)
    head._end_idle()
    assert sorted(head._callers) == [joined.number, asking.number]
    assert [other.recv(1) for other in others] == [b"", b""]
    for end in (member, waiting, *others):
        end.close()


def test_a_refused_agent_that_reads_nothing_is_disconnected(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, there = connect(head, "agent")
    caller.closing = True
    began = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: began + module.JOINED_SECONDS + 1)
    head._end_idle()
    assert not head._callers and there.recv(1) == b""
    there.close()
