"""The head's connections. What it decides is tested in decide/test_membership.py, the process elsewhere."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from agent_facts import LOAD, VERSIONS, facts
from memory_metadata import MemoryMetadata

from insitu.base.errors import ClusterError, GridError
from insitu.base.paths import Paths
from insitu.cluster.decide import Membership
from insitu.cluster.engines import Channel
from insitu.cluster.nodes import head as module
from insitu.cluster.nodes.head import Head, _Caller
from insitu.cluster.nodes.head_files import HeadFiles
from insitu.cluster.wire.messages import CatalogParts
from insitu.cluster.wire.records import HeadRecord, read_head


class NobodyCalls:
    """An acceptor without callers."""

    def list_late(self) -> Iterator[int]:
        yield from ()


@pytest.fixture
def head(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    home.mkdir(mode=0o700)
    monkeypatch.setattr(module, "Wakeup", lambda *signals: None)  # it would take over those of the tests
    files = HeadFiles(MemoryMetadata(), "t" * 32)
    made = Head(Paths(home), NobodyCalls(), HeadRecord("c" * 32, address="h:1"), files)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("role", ["client", "agent"])
def test_a_head_ends_when_another_one_has_replaced_it(head: Head, role: str) -> None:
    """Also one that an agent tells so which hasn't joined."""
    caller, there = connect(head, role)
    message = {"do": "replaced", "cluster": "c" * 32, "epoch": (1 << 20) + 1, "address": "h:2"}
    for wrong in ({"epoch": 1000}, {"epoch": "high"}, {"cluster": "d" * 32}, {"address": None}):
        with pytest.raises(ClusterError, match="A head is replaced "):
            head._handle(caller, {**message, **wrong})
    assert not head._stopping
    head._handle(caller, message)
    assert head._stopping
    if role == "client":
        caller.channel.flush()
        assert json.loads(there.recv(1 << 16)) == {"do": "replaced"}
    record = read_head(head._paths)
    assert record is not None and record.replaced_by == "h:2"
    there.close()


class SilentLead:
    """The lease of a head whose etcd is silent."""

    is_etcd_answering, ended = False, ""

    def may_lead(self) -> bool:
        return True


def test_agents_stay_while_nobody_knows_which_imports_have_ended(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, there = connect(head, "agent")
    asked = []

    def ask(*_: object) -> list[object]:
        asked.append(1)
        raise GridError("etcd must answer within 5 s")

    monkeypatch.setattr(module, "find_ended_imports", ask)
    message = {"do": "imports", "imports": [["d", "token", 1]]}
    head._handle(caller, message)
    assert asked == [1] and not caller.closing
    head.lead = SilentLead()  # type: ignore[assignment]
    head._handle(caller, message)
    assert asked == [1]  # each time would take seconds
    there.close()


class ChangingCatalog:
    """A catalogue with another content at each look."""

    data = b""
    looks = 0

    def poll(self) -> bool:
        self.looks += 1
        self.data = bytes([self.looks]) * 4096 + bytes((1 << 20) - 4096)
        return True


def test_an_agent_that_reads_slowly_gets_the_newest_catalogue_and_stays(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got each, and was disconnected as these filled the memory, also when it joined again."""
    monkeypatch.setattr(module, "_MAX_UNSENT_BYTES", 1 << 16)
    head._catalog = catalog = ChangingCatalog()  # type: ignore[assignment]
    caller, there = connect(head, "agent")
    said = asdict(facts(clock=time.time()))
    join = {"do": "join", "facts": said, "load": asdict(LOAD), "waited": 0.0}
    head._tick()
    head._handle(caller, json.loads(json.dumps(join)))
    for _ in range(5):
        head._tick()
    assert caller.number in head._callers and caller.channel.unsent_bytes < 2 << 20
    parts, reader, found, sent = CatalogParts(), Channel(there), list[bytes](), list[int]()
    monkeypatch.setattr(catalog, "poll", lambda: False)
    deadline = time.monotonic() + 60
    while catalog.data not in found and time.monotonic() < deadline:
        caller.channel.flush()
        head._tick()
        for message in reader.receive():
            if message["do"] == "catalog":
                sent.append(len(base64.b64decode(message["part"])))
                if (whole := parts.add(message)) is not None:
                    found.append(whole)
    assert [whole[0] for whole in found] == [1, 6]
    assert sent == [1 << 20, 4096], "only the page that differs is sent again"
    there.close()
