"""Dials the head of an agent, and finds the one that has replaced it.

The agent asks other agents, at the addresses that its head has said last, which head they follow: all of them
while it has no head, and while it has one those that this head can't reach, since they may have another one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from insitu.base.errors import ClusterError, InsituError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.decide import Member
from insitu.cluster.engines import Channel, ChannelClosed
from insitu.cluster.job_hosts import ReplacedHead, check_home
from insitu.cluster.leases import Fields, FollowedHead
from insitu.cluster.wire import HeadConnection, dial_head, read_agent, read_kept_members

if TYPE_CHECKING:
    from insitu.cluster.files import RemotePeers, View


logger = logging.getLogger("insitu")
_ASK_SECONDS = 3.0
"""A machine that is lost answers nothing. Another head may lead meanwhile, and agents dial again anyway."""
_AGAIN_SECONDS = 30.0


class HeadFinder:
    """Looks now and then, and has the agent follow what it finds."""

    def __init__(self, paths: Paths, node: NodeId, token: str, followed: FollowedHead) -> None:
        self._paths = paths
        self._node = node
        self._token = token
        self._followed = followed
        #: When it looks again, on the monotonic clock.
        self._look_at = 0.0

    def dial(self, given: str) -> tuple[HeadConnection, str]:
        """Connect to the head at `given`, or to the one that was accepted since, if this agent may follow it.
        Returns the connection, and the address. Raises InsituError."""
        address = self._followed.take_address(given)
        try:
            found = dial_head(address, self._token, "agent", _ASK_SECONDS)
        except ClusterError as lost:
            if not (self._look_without_head() or self._followed.go_back(address)):
                raise
            address = self._followed.take_address(address)
            try:
                found = dial_head(address, self._token, "agent", _ASK_SECONDS)
            except ClusterError:
                raise lost from None
        try:
            check_home(self._paths, self._node, found.head, address)
        except InsituError as error:
            if isinstance(error, ReplacedHead):
                _tell_replaced(self._followed, found.channel)
                self._followed.go_back(address)
            found.channel.close()
            raise
        return found, address

    def _look_without_head(self) -> bool:
        """Ask all other agents, unless that was done recently. Returns whether there is another head."""
        if not self._is_due():
            return False
        members = read_kept_members(self._paths)
        return self._look({n: m for n, m in members.items() if m.state != "left"})

    def look_with_head(self, members: Mapping[NodeId, Member]) -> None:
        """Ask those of the members that their head doesn't reach, in a thread."""
        away = {n: m for n, m in members.items() if m.connection is None and m.state != "left"}
        if away and self._is_due():
            threading.Thread(target=self._look, args=(away,), name="insitu-head", daemon=True).start()

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _AGAIN_SECONDS
        return True

    def _look(self, members: Mapping[NodeId, Member]) -> bool:
        others = {node: member for node, member in members.items() if node != self._node}
        with contextlib.suppress(InsituError, OSError):
            record = read_agent(self._paths, self._node)
            if record is not None and others:
                with open_agents(others, record.cluster, self._token, _ASK_SECONDS) as agents:
                    found = max(agents.ask("head_view").values(), key=_read_epoch, default={})
                if _read_epoch(found) > record.epoch:
                    self._followed.accept(found)
                    return True
        return False


def leave_if_replaced(followed: FollowedHead, channel: Channel, address: str) -> None:
    """Raise ChannelClosed if there is another head than the one at `address`, and notify that one."""
    if followed.take_address(address) != address:
        _tell_replaced(followed, channel)
        raise ChannelClosed


def _tell_replaced(followed: FollowedHead, channel: Channel) -> None:
    """Notify a head that it was replaced. If that is lost, it learns so from another agent, or again."""
    with contextlib.suppress(ChannelClosed):
        channel.send({"do": "replaced", **followed.describe()})
        channel.flush()


def _read_epoch(answer: Fields) -> int:
    epoch = answer.get("epoch")
    return epoch if type(epoch) is int else -1


# Asks the agents of a cluster without its head, by the servers of their stores.
#
# Their addresses and certificates are those that the head has said last


_AT_ONCE = 16


class KnownAgents:
    """Some agents of a cluster, as the head has said last."""

    def __init__(self, cluster: str, peers: RemotePeers, view: View) -> None:
        self._cluster = cluster
        self._peers = peers
        self._view = view

    def ask(self, kind: str) -> dict[NodeId, Fields]:
        """Return the answers of those that give one, asked at the same time."""
        nodes = list(self._view.alive)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            found = threads.map(lambda node: self._try(node, kind), nodes)
            return {n: answer for n, answer in zip(nodes, found, strict=True) if answer is not None}

    def _try(self, node: NodeId, kind: str) -> Fields | None:
        try:
            return self.tell(node, kind)
        except (InsituError, OSError):
            return None

    def tell(self, node: NodeId, kind: str, **fields: Any) -> Fields:
        """Return the answer of one agent. Raises InsituError, OSError."""
        answer, _ = self._peers.find(node, self._view).act(kind, {"cluster": self._cluster, **fields})
        return answer


@contextlib.contextmanager
def open_agents(
    members: Mapping[NodeId, Member], cluster: str, token: str, seconds: float
) -> Iterator[KnownAgents]:
    """Open these agents. Each answers within `seconds`."""
    from insitu.cluster.files import RemotePeers, View  # loads Flight
    from insitu.grid.transfer import ServerAddress

    facts = {node: member.facts for node, member in members.items()}
    addresses = {n: ServerAddress(f.address, f.port, f.certificate) for n, f in facts.items()}
    peers = RemotePeers(token.encode(), silence=seconds)
    with contextlib.closing(peers):
        yield KnownAgents(cluster, peers, View(addresses))
