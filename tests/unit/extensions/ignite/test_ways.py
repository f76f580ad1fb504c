"""The address by which a node reaches the servers of Ignite."""

from __future__ import annotations

import pytest

from insitu.base.errors import SourceError
from insitu.base.spec import NodeId
from insitu.extensions.ignite.address import parse_address
from insitu.extensions.ignite.ways import find_way
from insitu.grid.layout import Endpoint, HostAddresses, HostPlaces, find_host_places

HOSTS = {NodeId(f"host{host}-0"): frozenset({f"10.0.0.{host}", f"host{host}"}) for host in range(2)}


def place(here: frozenset[str], *endpoints: Endpoint) -> HostPlaces:
    named = {each.node: each for each in endpoints}
    return find_host_places([each.node for each in endpoints], named, HostAddresses(HOSTS, here))


def test_servers_on_the_loopback_interface_of_another_host_are_named():
    loopback = Endpoint("s", 10800, ("127.0.0.1", "::1"))
    elsewhere = place(frozenset({"10.0.0.254"}), loopback)
    address = parse_address("ignite://localhost:10800/C")
    with pytest.raises(SourceError, match="loopback interface alone, and host0-0 on another host"):
        find_way(address, {loopback.node: loopback}, NodeId("host0-0"), elsewhere)


def test_a_node_goes_the_ways_that_mean_the_same_on_its_host():
    servers = [Endpoint(f"s{s}", 10800 + s, (f"10.0.0.{s}", "127.0.0.1")) for s in range(2)]
    places = place(HOSTS[NodeId("host0-0")], *servers)
    named = parse_address("ignite://grid-1,127.0.0.1:10800/C%2FD%25")

    def ways(text: str, node: str) -> list[tuple[str, int]]:
        way = find_way(parse_address(text), {s.node: s for s in servers}, NodeId(node), places)
        found = parse_address(way)
        assert found.cache == named.cache == "C/D%", "the name survives being written and read"
        return list(found.servers)

    assert ways("ignite://grid-1,127.0.0.1:10800/C%2FD%25", "host0-0") == list(named.servers)
    assert ways("ignite://grid-1,127.0.0.1:10800/C%2FD%25", "host1-0") == [("grid-1", 10800)]
    # Its own server first, by the address that is its own.
    found = ways("ignite://127.0.0.1/C%2FD%25", "host1-0")
    assert found[0] == ("10.0.0.1", 10801) and ("127.0.0.1", 10801) not in found
