"""Pure: which node holds the rows of which server of another system, such as Apache Ignite.

Servers of this machine are spread over its simulated nodes in a stable order: that of their addresses, which
stay when a server is started again, where their ids needn't. On hosts of agents, the node on the host of a
server holds its rows.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insitu.base.net.ports import format_address
from insitu.base.net.unauthenticated import is_loopback
from insitu.base.spec import NodeId


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server of another system listens for clients."""

    #: Its id.
    node: str
    #: The port.
    port: int
    #: Addresses and names of its host.
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServerPlaces:
    """Which server was primary for each partition of a table."""

    #: Servers that are primary for any partition, by address, in a stable order.
    servers: tuple[str, ...]
    #: `primaries[p]`: the index of partition p's server in `servers`.
    primaries: tuple[int, ...]

    def owners(self, nodes: Sequence[NodeId]) -> tuple[NodeId, ...]:
        """Return the node of insitu that holds each partition."""
        return tuple(nodes[server % len(nodes)] for server in self.primaries)


@dataclass(frozen=True, slots=True)
class HostAddresses:
    """By which addresses and names the hosts of a cluster are known."""

    #: Of the host of each node, but for those of the loopback interface.
    nodes: Mapping[NodeId, frozenset[str]]
    #: Of the host that asks: servers that name addresses of the loopback interface alone run on it.
    here: frozenset[str]

    def is_here(self, node: NodeId) -> bool:
        """Return whether a node is on the host that asks."""
        return self.nodes[node] == self.here


@dataclass(frozen=True, slots=True)
class HostPlaces:
    """Which node of a cluster of hosts reads each partition of a table, and holds it."""

    #: The servers. One that runs on the host of no node is named once for each node that reads some of its
    #: partitions: these rows have no place of their own, so shards follow from the nodes.
    places: ServerPlaces
    #: `nodes[s]`: the node that reads the partitions of server s.
    nodes: tuple[NodeId, ...]
    #: Node -> the ids of the servers on its host.
    near: Mapping[NodeId, tuple[str, ...]]
    #: By which addresses the hosts are known.
    hosts: HostAddresses

    @property
    def owners(self) -> tuple[NodeId, ...]:
        """The node of each partition."""
        return tuple(self.nodes[server] for server in self.places.primaries)


def normalize_address(text: str) -> str:
    """Return an address or a name of a host in the one form by which it is compared."""
    plain = text.partition("%")[0].lower()
    try:
        return str(ipaddress.ip_address(plain))
    except ValueError:
        return plain


def find_places(primaries: Sequence[str], endpoints: Mapping[str, Endpoint]) -> ServerPlaces:
    """Return the servers of a map of partitions. `primaries[p]` is the id of a server.

    One whose address isn't known is named by its id.
    """
    names = {node: _name(node, endpoints) for node in set(primaries)}
    order = _order(names)
    numbers = {node: number for number, node in enumerate(order)}
    return ServerPlaces(tuple(names[node] for node in order), tuple(numbers[node] for node in primaries))


def find_host_places(
    primaries: Sequence[str],
    endpoints: Mapping[str, Endpoint],
    hosts: HostAddresses,
    kept: Sequence[NodeId] = (),
) -> HostPlaces:
    """Return which node reads which partition. `primaries[p]` is the id of a server.

    A node on the host of the partition's server reads it; several on one host share its servers, in a stable
    order. Partitions whose server is on the host of no node go round all nodes. `kept`: the nodes that read
    them whatever servers they have, for a job that trains there.
    """
    nodes = sorted(hosts.nodes)
    beside = {node: _find_nodes(endpoint, hosts) for node, endpoint in endpoints.items()}
    names = {node: _name(node, endpoints) for node in set(primaries)}
    ranks: Counter[tuple[NodeId, ...]] = Counter()
    reader: dict[str, NodeId] = {}
    for server in _order(names):
        if own := beside.get(server, ()):
            reader[server] = own[ranks[own] % len(own)]
            ranks[own] += 1
    readers = list(kept) or [reader.get(s, nodes[p % len(nodes)]) for p, s in enumerate(primaries)]
    pairs = sorted(
        set(zip(primaries, readers, strict=True)), key=lambda pair: (names[pair[0]], pair[0], pair[1])
    )
    numbers = {pair: number for number, pair in enumerate(pairs)}
    places = ServerPlaces(
        tuple(names[server] for server, _ in pairs),
        tuple(numbers[pair] for pair in zip(primaries, readers, strict=True)),
    )
    near = {node: tuple(sorted(s for s, own in beside.items() if node in own)) for node in nodes}
    return HostPlaces(places, tuple(node for _, node in pairs), near, hosts)


def _find_nodes(endpoint: Endpoint, hosts: HostAddresses) -> tuple[NodeId, ...]:
    """Return the nodes on the host of a server; empty if there are none, or it isn't known.

    An address that several hosts have, such as that of a bridge for containers, says nothing.
    """
    groups: dict[frozenset[str], list[NodeId]] = {}
    for node in sorted(hosts.nodes):
        groups.setdefault(hosts.nodes[node], []).append(node)
    named = {normalize_address(host) for host in endpoint.hosts}
    outward = {host for host in named if not is_loopback(host)}
    if not outward:
        return tuple(groups.get(hosts.here, ())) if named else ()
    counts = Counter(address for group in groups for address in group)
    found = [own for group, own in groups.items() if any(counts[host] == 1 for host in outward & group)]
    return tuple(found[0]) if len(found) == 1 else ()


def _order(names: Mapping[str, str]) -> list[str]:
    """Return servers in the stable order of their addresses."""
    return sorted(names, key=lambda node: (names[node], node))


def _name(node: str, endpoints: Mapping[str, Endpoint]) -> str:
    endpoint = endpoints.get(node)
    return format_address(min(endpoint.hosts), endpoint.port) if endpoint and endpoint.hosts else node


def count_moved(before: ServerPlaces, after: ServerPlaces) -> int:
    """Return how many partitions have another primary server, of those that both know."""
    pairs = zip(before.primaries, after.primaries, strict=False)
    return sum(1 for one, other in pairs if before.servers[one] != after.servers[other])
