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
from insitu.cluster.agents.records import HeadRecord, change_head, read_head
from insitu.cluster.decide import Membership
from insitu.cluster.engines import Channel
from insitu.errors import ClusterError
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


def test_a_head_ends_when_another_one_has_taken_over(head: Head) -> None:
    caller, there = connect(head, "client")
    message = {"do": "succeeded", "cluster": "c" * 32, "epoch": 1 << 20, "address": "h:2", "instance": "i"}
    with pytest.raises(ClusterError, match="A head is replaced by a higher epoch than 0"):
        head._handle(caller, {**message, "epoch": 0})
    assert not head._stopping
    head._handle(caller, message)
    caller.channel.flush()
    assert head._stopping and json.loads(there.recv(1 << 16)) == {"do": "succeeded"}
    record = read_head(head._paths)
    assert record is not None and record.successor == "h:2"
    there.close()


def test_agents_hear_when_a_node_may_take_over(head: Head) -> None:
    caller, there = connect(head, "agent")
    join = {"do": "join", "facts": asdict(facts(clock=time.time())), "load": asdict(LOAD), "waited": 0.0}
    head._handle(caller, json.loads(json.dumps(join)))
    for after in (60.0, None):
        change_head(head._paths, take_over_after=after)
        head._keep_copies(changed=False)
    caller.channel.flush()
    said = [json.loads(line) for line in there.recv(1 << 16).splitlines()]
    assert [each["take_over_after"] for each in said if each["do"] == "members"] == [None, 60.0, None]
    there.close()
