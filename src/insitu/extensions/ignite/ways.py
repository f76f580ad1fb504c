"""Pure: the address by which a node reaches the servers of Ignite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from insitu.base.errors import SourceError
from insitu.base.net.unauthenticated import is_loopback
from insitu.base.spec import NodeId
from insitu.extensions.ignite.address import Address, HostPort
from insitu.grid.layout import Endpoint, HostPlaces, normalize_address


def find_way(address: Address, endpoints: Mapping[str, Endpoint], node: NodeId, places: HostPlaces) -> str:
    """Return the address by which a node reads the cache. Raises SourceError if its servers listen on the
    loopback interface of another host alone.

    What the user has named is used where it means the same on the node's host: certificates are for these
    names. Else the servers' own addresses are, those on the node's host first.
    """

    def is_usable(host: str) -> bool:
        return places.hosts.is_here(node) or not is_loopback(normalize_address(host))

    found: list[HostPort] = [server for server in address.servers if is_usable(server[0])]
    if not found:
        near, known = places.near[node], places.hosts.nodes[node]
        for server in sorted(endpoints, key=lambda server: (server not in near, server)):
            endpoint = endpoints[server]
            usable = [host for host in endpoint.hosts if "%" not in host and is_usable(host)]
            usable.sort(key=lambda host: normalize_address(host) not in known)
            found += [(host, endpoint.port) for host in usable]
    if not found:
        raise SourceError(
            f"Servers of Ignite must listen where the nodes that read them reach them. Received: {address}, "
            f"whose servers name addresses of the loopback interface alone, and {node} on another host. Have "
            f"them listen on an address of the network (`localHost` or `clientConnectorConfiguration.host` "
            f"of their configuration), or read them on this machine: insitu start --engine local"
        )
    return str(replace(address, servers=tuple(dict.fromkeys(found))))
