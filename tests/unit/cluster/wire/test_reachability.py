"""Agents that can't be reached are named, with the reason."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from agent_facts import LOAD, facts
from partition_servers import SECRET, certificate

from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.decide import Member
from insitu.cluster.wire import reachability
from insitu.grid.serving import PartitionServer


def member(node: str, port: int, pem: str) -> Member:
    made = facts(node, address="127.0.0.1", port=port, certificate=pem)
    return Member(made, LOAD, "alive", 0.0, 0.0, 1, 0.0)


def test_each_agent_is_asked_for_its_own_certificate(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "CONNECT_SECONDS", 0.5)
    server = PartitionServer(Paths(home), NodeId("a"), SECRET, certificate())
    pem, port = server.address.certificate, server.address.port
    from insitu.base.net.certificates import make_certificate

    try:
        with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            found = {
                NodeId("good"): member("good", port, pem),
                NodeId("other"): member("other", port, make_certificate().pem),
                NodeId("silent"): member("silent", silent.getsockname()[1], pem),
                NodeId("closed"): member("closed", closed.getsockname()[1], pem),
                NodeId("lost"): replace(member("lost", closed.getsockname()[1], pem), state="lost"),
                NodeId("own"): member("own", closed.getsockname()[1], pem),
            }
            reasons = reachability.find_unreachable(found, without="own")
    finally:
        server.stop()
    assert reasons.keys() == {"other", "silent", "closed"}
    ports = {node: found[NodeId(node)].facts.port for node in reasons}
    assert reasons["other"] == f"127.0.0.1:{ports['other']}: another program answers there"
    assert reasons["closed"] == f"127.0.0.1:{ports['closed']}: Connection refused"
    assert "timed out" in reasons["silent"]


def test_without_others_there_is_nothing_to_ask() -> None:
    assert reachability.find_unreachable({}) == {}
