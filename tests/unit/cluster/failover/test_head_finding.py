"""What an agent does about other heads. Real agents are in process/test_agents.py."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from agent_facts import LOAD, facts

from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.decide import Member
from insitu.cluster.engines import Channel, ChannelClosed
from insitu.cluster.failover import head_finding
from insitu.cluster.failover.head_finding import HeadFinder, leave_if_replaced
from insitu.cluster.job_hosts.home import ReplacedHead
from insitu.cluster.leases.followed_head import FollowedHead
from insitu.cluster.wire.connection import HeadConnection, HeadUnreachable

NODE = NodeId("a")
OLD = {"cluster": "c", "epoch": 3, "instance": "old"}
NEW = {"cluster": "c", "epoch": (1 << 20) + 1, "instance": "new"}
VIEW = {"address": "h:2", "epoch": NEW["epoch"], "instance": "new"}


class Cluster:
    """What agents and heads answer."""

    def __init__(self) -> None:
        self.views: dict[str, dict[str, Any]] = {}
        self.heads: dict[str, dict[str, Any]] = {}
        self.asked: list[list[str]] = []
        self.told: list[socket.socket] = []

    @contextlib.contextmanager
    def open_agents(
        self, members: Mapping[NodeId, Member], cluster: str, token: str, seconds: float
    ) -> Iterator[Any]:
        self.asked.append(sorted(members))
        views = {node: self.views[node] for node in members if node in self.views}

        class Agents:
            def ask(self, kind: str) -> dict[str, dict[str, Any]]:
                return views

        yield Agents()

    def dial(self, address: str, token: str, role: str, seconds: float) -> HeadConnection:
        assert seconds <= 3  # a machine that is lost doesn't keep an agent from the next head
        if address not in self.heads:
            raise HeadUnreachable(f"nobody at {address}")
        here, there = socket.socketpair()
        there.settimeout(30)
        self.told.append(there)
        return HeadConnection(Channel(here), self.heads[address], "10.0.0.5")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    found = Cluster()
    monkeypatch.setattr(head_finding, "open_agents", found.open_agents)
    monkeypatch.setattr(head_finding, "dial_head", found.dial)
    monkeypatch.setattr(head_finding, "read_kept_members", lambda paths: members("a", "b"))
    yield found
    for there in found.told:
        there.close()


@pytest.fixture
def followed(tmp_path: Path) -> FollowedHead:
    Paths(tmp_path).node(NODE).mkdir(parents=True)
    made = FollowedHead(Paths(tmp_path), NODE)
    made.record_joined(OLD, "h:1")
    return made


@pytest.fixture
def finder(tmp_path: Path, cluster: Cluster, followed: FollowedHead) -> HeadFinder:
    return HeadFinder(Paths(tmp_path), NODE, "t" * 32, followed)


def members(*nodes: str, lost: str = "") -> dict[NodeId, Member]:
    return {
        NodeId(n): Member(
            facts(n), LOAD, "lost" if n in lost else "alive", 0.0, 0.0, None if n in lost else 1, 0.0
        )
        for n in nodes
    }


def test_an_agent_without_a_head_finds_the_one_that_others_follow(
    cluster: Cluster, finder: HeadFinder, followed: FollowedHead
) -> None:
    followed.record_lost()
    cluster.views, cluster.heads = {"b": VIEW}, {"h:2": NEW}
    found, address = finder.dial("h:1")
    assert (found.head, address) == (NEW, "h:2") and cluster.asked == [["b"]]
    found.channel.close()
    # The next agent of the store, which is started with the old address, finds it without others.
    cluster.views = {}
    again, address = finder.dial("h:1")
    assert address == "h:2" and cluster.asked == [["b"]]
    again.channel.close()


def test_nothing_is_found_where_others_know_no_more(cluster: Cluster, finder: HeadFinder) -> None:
    cluster.views = {"b": {**VIEW, "epoch": 3}}
    for _ in range(2):
        with pytest.raises(HeadUnreachable, match="nobody at h:1"):
            finder.dial("h:1")
    assert cluster.asked == [["b"]]  # not each time


def test_an_agent_with_a_head_asks_those_that_this_does_not_reach(
    cluster: Cluster, finder: HeadFinder, followed: FollowedHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it was cut off together with that head."""

    class Now:
        def __init__(self, target: Any, args: Any, **_: object) -> None:
            self.start = lambda: target(*args)

    monkeypatch.setattr(head_finding.threading, "Thread", Now)
    cluster.views = {"b": VIEW, "c": VIEW}
    finder.look_with_head(members("a", "b", "c"))
    assert cluster.asked == []
    here, there = (Channel(each) for each in socket.socketpair())
    leave_if_replaced(followed, here, "h:1")
    finder.look_with_head(members("a", "b", "c", lost="c"))
    assert cluster.asked == [["c"]]
    with pytest.raises(ChannelClosed):
        leave_if_replaced(followed, here, "h:1")
    assert there.receive() == [{"do": "replaced", "cluster": "c", "epoch": NEW["epoch"], "address": "h:2"}]
    here.close()
    there.close()


def test_a_head_of_before_hears_from_the_first_agent_that_dials_it(
    cluster: Cluster, finder: HeadFinder, followed: FollowedHead, tmp_path: Path
) -> None:
    """It has started again, in a higher epoch of its own number."""
    followed.accept(VIEW)
    again = FollowedHead(Paths(tmp_path), NODE)  # another process
    finder = HeadFinder(Paths(tmp_path), NODE, "t" * 32, again)
    cluster.heads = {"h:1": {**OLD, "epoch": 900, "instance": "again"}}
    with pytest.raises(ReplacedHead, match="the head at h:1, which the one at h:2 has replaced"):
        finder.dial("h:1")
    said = json.loads(cluster.told[0].recv(1 << 16))
    assert said == {"do": "replaced", "cluster": "c", "epoch": NEW["epoch"], "address": "h:2"}
    cluster.heads["h:2"] = NEW
    found, address = finder.dial("h:1")
    assert address == "h:2"
    found.channel.close()
