"""What an agent does that watches the key of the head."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_hosts import wait_until

from insitu.base.errors import ClusterError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.failover import head_watch
from insitu.cluster.failover.head_watch import HeadWatch
from insitu.cluster.leases.followed_head import FollowedHead
from insitu.cluster.leases.leading import Lead, Won, parse_won, win
from insitu.cluster.wire.records import change_head, read_agent, read_head, take_process_lock
from insitu.grid import Catalog, is_catalog_copy
from insitu.metadata import (
    HEAD_KEY,
    MetadataSettings,
    embedded,
    encode_settings,
    read_leader,
    read_settings,
    write_settings,
)
from insitu.metadata.embedded import EmbeddedStore

NODE = NodeId("a")
SETTINGS = MetadataSettings("c", "etcd://h:1")
WELCOME = {"do": "welcome", "metadata": encode_settings(SETTINGS)}


class Watched:
    """An agent's home, and what its watch does."""

    def __init__(self, folder: Path) -> None:
        self.paths = Paths(folder)
        self.paths.node(NODE).mkdir(parents=True)
        self.file = folder / "etcd.sqlite"
        self.store = self.open()
        self.followed = FollowedHead(self.paths, NODE)
        self.followed.record_joined({"cluster": "c", "epoch": 3, "instance": "old"}, "h:1")
        self.followed.record_lost()
        self.host = "10.0.0.1"
        self.watch = HeadWatch(self.paths, NODE, self.followed, lambda: self.host)
        #: What heads were started with here, and why none can be.
        self.started: list[Won | None] = []
        self.why = ""
        self.leads: list[Lead] = []

    def open(self, settings: object = None) -> EmbeddedStore:
        return EmbeddedStore(self.file, "c", create=True)

    def start(self, paths: Paths, host: str, won: str) -> str:
        self.started.append(parse_won(won))
        if self.why:
            raise ClusterError(self.why)
        (self.lead_elsewhere if self.started[-1] is None else self.take)(self.started[-1])  # type: ignore[operator]
        return "10.0.0.1:7"

    def take(self, won: Won) -> None:
        self.leads.append(Lead(self.store, won))
        self.leads[-1].announce("10.0.0.1:7")

    def lead_elsewhere(self, address: str) -> Lead:
        self.leads.append(Lead(self.store, win(self.store, 3)))
        self.leads[-1].announce(address)
        return self.leads[-1]

    def read_head(self) -> str:
        record = read_agent(self.paths, NODE)
        assert record is not None
        return record.head


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched(tmp_path)
    monkeypatch.setattr(head_watch, "open_etcd", made.open)
    monkeypatch.setattr(head_watch, "_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(embedded, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(head_watch, "start_elected_head", made.start)
    yield made
    made.watch.close()
    for lead in made.leads:
        lead.close()
    if made.watch._thread is not None:
        made.watch._thread.join()


def test_an_agent_lets_go_of_an_etcd_that_was_moved_from(agent: Watched) -> None:
    agent.watch.take_settings(WELCOME)
    change_head(agent.paths, cluster="c", epoch=2)  # a head was elected here, and has ended
    agent.watch.take_settings({"do": "welcome", "metadata": None})
    assert read_settings(agent.paths) is None and read_head(agent.paths) is None
    lock = take_process_lock(agent.paths.head_lock)  # else the watch may give the home up
    assert lock is not None
    # The home of a head that `insitu up` has started keeps what it was told.
    write_settings(agent.paths, SETTINGS)
    change_head(agent.paths, cluster="c", epoch=2, hosts={"h": "stop"})
    agent.watch.take_settings({"do": "welcome", "metadata": None})
    assert read_settings(agent.paths) == SETTINGS
    # So does one in which metadata is being moved.
    change_head(agent.paths, hosts=None)
    agent.watch.take_settings({"do": "welcome", "metadata": None})
    kept = read_settings(agent.paths)
    os.close(lock)
    assert kept == SETTINGS


def test_a_cluster_without_etcd_has_no_watch(agent: Watched) -> None:
    agent.watch.start()
    agent.watch.take_settings({"do": "welcome", "metadata": None})
    assert agent.watch._thread is None and read_settings(agent.paths) is None
    with pytest.raises(ClusterError, match="A head says which etcd"):
        agent.watch.take_settings({"do": "welcome", "metadata": {"url": "file"}})


def test_an_agent_follows_the_head_that_etcd_names(agent: Watched) -> None:
    agent.lead_elsewhere("10.0.0.2:7")
    agent.watch.take_settings(WELCOME)
    assert read_settings(agent.paths) == SETTINGS
    wait_until(lambda: agent.read_head() == "10.0.0.2:7", "the head")
    agent.leads[0].resign()
    agent.host = ""  # nothing is started here
    agent.lead_elsewhere("10.0.0.3:7")
    wait_until(lambda: agent.read_head() == "10.0.0.3:7", "the next head")
    assert not agent.started


def test_the_home_of_a_head_that_was_killed_is_given_up_also_if_the_agent_heard_elsewhere_of_the_next(
    agent: Watched,
) -> None:
    Catalog(agent.paths).publish([])
    change_head(agent.paths, cluster="c", address="h:1", epoch=3, hosts={"h": "insitu agent --stop"})
    won = agent.lead_elsewhere("10.0.0.2:7").won
    agent.followed.accept({"address": "10.0.0.2:7", "epoch": won.epoch, "instance": won.instance})
    agent.watch.take_settings(WELCOME)
    wait_until(lambda: is_catalog_copy(agent.paths), "the catalogue to be a copy")
    record = read_head(agent.paths)
    assert record is not None and record.replaced_by == "10.0.0.2:7"


def test_an_agent_starts_a_head_if_there_is_none_and_follows_it(agent: Watched) -> None:
    agent.watch.take_settings(WELCOME)
    wait_until(lambda: agent.read_head() == "10.0.0.1:7", "a head")
    assert len(agent.started) == 1


def test_an_agent_that_cannot_start_one_leaves_it_to_others(agent: Watched) -> None:
    agent.why = "no port is left"
    agent.watch.take_settings(WELCOME)
    wait_until(lambda: agent.started and not agent.store.get([HEAD_KEY])[0], "the key to be free again")
    agent.lead_elsewhere("10.0.0.2:7")
    wait_until(lambda: agent.read_head() == "10.0.0.2:7", "the head")
    assert len(agent.started) == 1


def test_nobody_is_elected_after_down(agent: Watched) -> None:
    lead = agent.lead_elsewhere("10.0.0.2:7")
    lead.resign(down=True)
    agent.watch.take_settings(WELCOME)
    agent.watch._closing.wait(0.5)
    assert not agent.started
    leader = read_leader(agent.store.get([HEAD_KEY])[0][HEAD_KEY])
    assert leader is not None and leader.is_down


def test_an_agent_of_another_cluster_takes_no_part(agent: Watched) -> None:
    agent.followed.record_joined({"cluster": "d", "epoch": 4, "instance": "x"}, "h:1")
    agent.watch.take_settings(WELCOME)
    agent.watch._closing.wait(0.5)
    assert not agent.started and agent.read_head() == "h:1"


def test_two_agents_start_one_head(agent: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Watched(tmp_path / "other")
    other.file = agent.file
    other.host = "10.0.0.9"
    for each in (agent, other):
        each.watch.take_settings(WELCOME)
    wait_until(lambda: agent.read_head() == other.read_head() == "10.0.0.1:7", "one head")
    assert len(agent.started) + len(other.started) == 1
    other.watch.close()
    with contextlib.suppress(AttributeError):
        other.watch._thread.join()  # type: ignore[union-attr]
