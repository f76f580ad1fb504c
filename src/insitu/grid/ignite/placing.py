"""Pure: which node of insitu holds the rows of which server of Ignite.

Servers of this machine are spread over its simulated nodes in a stable order: that of their addresses, which
stay when a server is started again, where the UUIDs of its node don't.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insitu.grid.ignite.address import format_server
from insitu.grid.ignite.protocol import Endpoint
from insitu.spec import NodeId


@dataclass(frozen=True, slots=True)
class ServerPlaces:
    """Which server was primary for each partition of a cache of Ignite."""

    #: Servers that are primary for any partition, by address, in a stable order.
    servers: tuple[str, ...]
    #: `primaries[p]`: the index of partition p's server in `servers`.
    primaries: tuple[int, ...]

    def owners(self, nodes: Sequence[NodeId]) -> tuple[NodeId, ...]:
        """Return the node of insitu that holds each partition."""
        return tuple(nodes[server % len(nodes)] for server in self.primaries)


def find_places(primaries: Sequence[str], endpoints: Mapping[str, Endpoint]) -> ServerPlaces:
    """Return the servers of a map of partitions. `primaries[p]` is the UUID of a node of Ignite.

    A node whose address isn't known is named by its UUID.
    """
    names = {node: _name(node, endpoints) for node in set(primaries)}
    order = sorted(names, key=lambda node: (names[node], node))
    numbers = {node: number for number, node in enumerate(order)}
    return ServerPlaces(tuple(names[node] for node in order), tuple(numbers[node] for node in primaries))


def _name(node: str, endpoints: Mapping[str, Endpoint]) -> str:
    endpoint = endpoints.get(node)
    return format_server((min(endpoint.hosts), endpoint.port)) if endpoint and endpoint.hosts else node


def count_moved(before: ServerPlaces, after: ServerPlaces) -> int:
    """Return how many partitions have another primary server, of those that both know."""
    pairs = zip(before.primaries, after.primaries, strict=False)
    return sum(1 for one, other in pairs if before.servers[one] != after.servers[other])
