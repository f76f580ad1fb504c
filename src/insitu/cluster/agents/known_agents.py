"""Asks the agents of a cluster without its head, by the servers of their stores.

Their addresses and certificates are those that the head has said last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from insitu.cluster.agents.messages import parse_seconds
from insitu.cluster.agents.saved_members import read_kept_members
from insitu.cluster.decide import AgentView, Member
from insitu.errors import ClusterError, InsituError
from insitu.paths import Paths
from insitu.spec import NodeId

if TYPE_CHECKING:
    from insitu.cluster.files import RemotePeers, View

_AT_ONCE = 16

Fields = dict[str, Any]


class KnownAgents:
    """The agents of the cluster that this home belongs to, as the head has said last."""

    def __init__(
        self, members: Mapping[NodeId, Member], cluster: str, peers: RemotePeers, view: View
    ) -> None:
        self.members = members
        self._cluster = cluster
        self._peers = peers
        self._view = view
        #: Why the last question to an agent failed.
        self.problems: dict[NodeId, str] = {}

    def ask(self, kind: str, **fields: Any) -> dict[NodeId, Fields]:
        """Return the answers of those that give one, asked at the same time."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            found = threads.map(lambda node: self._ask(node, kind, fields), self.members)
            return {n: answer for n, answer in zip(self.members, found, strict=True) if answer is not None}

    def _ask(self, node: NodeId, kind: str, fields: Fields) -> Fields | None:
        try:
            peer = self._peers.find(node, self._view)
            answer, _ = peer.act(kind, {"cluster": self._cluster, **fields})
        except (InsituError, OSError) as error:
            self.problems[node] = error.message if isinstance(error, InsituError) else str(error)
            return None
        self.problems.pop(node, None)
        return answer

    def look(self) -> dict[NodeId, AgentView]:
        """Return what those have seen that answer. Raises ClusterError."""
        return {
            node: AgentView(
                int(answer["epoch"]),
                answer["is_led"] is True,
                parse_seconds("without_head", answer.get("without_head")),
            )
            for node, answer in self.ask("head_view").items()
        }


@contextlib.contextmanager
def open_agents(
    paths: Paths, cluster: str, token: str, seconds: float, without: Collection[NodeId] = ()
) -> Iterator[KnownAgents]:
    """Open the agents that haven't left, but for those of `without`. Each answers within `seconds`.

    Raises ClusterError where none is known.
    """
    from insitu.cluster.files import RemotePeers, View  # loads Flight
    from insitu.grid.transfer import ServerAddress

    known = {n: m for n, m in read_kept_members(paths).items() if m.state != "left" and n not in without}
    if not known:
        raise ClusterError(
            f"An agent keeps the list of all agents, which is needed to take over. Received: none in "
            f"{paths.members}. Run the command on the host of another agent"
        )
    addresses = {
        n: ServerAddress(m.facts.address, m.facts.port, m.facts.certificate) for n, m in known.items()
    }
    peers = RemotePeers(token.encode(), silence=seconds)
    with contextlib.closing(peers):
        yield KnownAgents(known, cluster, peers, View(addresses, len(known)))
