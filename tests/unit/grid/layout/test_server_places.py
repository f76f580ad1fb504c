"""Which node holds the rows of which server of another system."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from insitu.base.spec import NodeId
from insitu.grid.layout import Endpoint, HostAddresses, HostPlaces, count_moved, find_host_places, find_places

PRIMARIES = st.lists(st.integers(0, 6), min_size=1, max_size=40)


def uuid(server: int, life: int) -> str:
    """A server gets another UUID each time that it is started."""
    return f"{(server * 7919 + life * 104729) % 1000003:032x}"


def endpoints(life: int) -> dict[str, Endpoint]:
    return {uuid(s, life): Endpoint(uuid(s, life), 10800 + s, ("127.0.0.1", "host")) for s in range(7)}


@given(PRIMARIES, st.integers(1, 5))
def test_each_server_has_one_node_and_nodes_have_equally_many(primaries: list[int], count: int):
    nodes = [NodeId(f"node-{n}") for n in range(count)]
    places = find_places([uuid(server, 0) for server in primaries], endpoints(0))
    owners = places.owners(nodes)
    beside = dict(zip(primaries, owners, strict=True))
    assert [beside[server] for server in primaries] == list(owners)
    held = Counter(beside.values())
    assert max(held.values()) - min(held[node] for node in nodes) <= 1


@given(PRIMARIES)
def test_servers_that_were_started_again_are_the_same(primaries: list[int]):
    before, after = (
        find_places([uuid(server, life) for server in primaries], endpoints(life)) for life in (0, 1)
    )
    assert before == after and count_moved(before, after) == 0
    assert before.servers == tuple(f"127.0.0.1:{10800 + server}" for server in sorted(set(primaries)))


def test_partitions_that_have_moved_are_counted():
    before = find_places([uuid(s, 0) for s in (0, 1, 2, 0)], endpoints(0))
    after = find_places([uuid(s, 0) for s in (0, 2, 2, 1)], endpoints(0))
    assert count_moved(before, after) == 2


def test_a_server_without_an_address_is_named_by_its_uuid():
    assert find_places([uuid(0, 0)], {}).servers == (uuid(0, 0),)


BRIDGE = "172.17.0.1"
"""An address that each host has, of a bridge for containers."""


def cluster(hosts: int, agents: int = 1, here: str = "gateway") -> HostAddresses:
    """Some hosts with as many agents each."""
    nodes = {
        NodeId(f"host{host}-{agent}"): frozenset({f"10.0.0.{host}", f"fd00::{host}", f"host{host}", BRIDGE})
        for host in range(hosts)
        for agent in range(agents)
    }
    return HostAddresses(nodes, nodes.get(NodeId(f"{here}-0"), frozenset({"10.0.0.254"})))


def server_on(host: int, server: int = 0) -> Endpoint:
    return Endpoint(uuid(server, 0), 10800 + server, (f"10.0.0.{host}", "127.0.0.1", BRIDGE))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(2, 4), st.integers(1, 2))
def test_a_node_on_the_host_of_a_server_holds_its_rows(primaries: list[int], count: int, agents: int):
    """Servers 0 to 3 are on hosts 0 to 3, of which the cluster has `count`."""
    nodes = cluster(count, agents)
    named = [uuid(server, 0) for server in primaries]
    found = find_host_places(named, {uuid(s, 0): server_on(s, s) for s in range(4)}, nodes)
    for partition, (server, owner) in enumerate(zip(primaries, found.owners, strict=True)):
        if server < count:
            assert owner.startswith(f"host{server}-") and uuid(server, 0) in found.near[owner]
        else:
            assert owner == sorted(nodes.nodes)[partition % len(nodes.nodes)]
            assert all(uuid(server, 0) not in near for near in found.near.values())
    assert [found.nodes[s] for s in found.places.primaries] == list(found.owners)
    assert set(found.places.primaries) == set(range(len(found.places.servers))), "each is of use"
    if max(primaries) < count:
        assert found.places == find_places(named, {uuid(s, 0): server_on(s, s) for s in range(4)})


def test_servers_on_one_host_are_shared_by_its_nodes():
    endpoints = {uuid(s, 0): server_on(0, s) for s in range(5)}
    found = find_host_places([uuid(s, 0) for s in range(5)], endpoints, cluster(2, 2))
    assert found.owners == tuple(f"host0-{s % 2}" for s in range(5))
    assert len(found.near["host0-1"]) == 5 and found.near["host1-0"] == ()


def place(hosts: HostAddresses, *endpoints: Endpoint) -> HostPlaces:
    return find_host_places([e.node for e in endpoints], {e.node: e for e in endpoints}, hosts)


def test_hosts_are_known_by_names_and_by_any_form_of_an_address():
    long = Endpoint(uuid(0, 0), 10800, ("0:0:0:0:0:0:0:1%lo", "FD00:0:0:0:0:0:0:1%eth0"))
    name = Endpoint(uuid(1, 0), 10800, ("localhost", "HOST1"))
    assert place(cluster(3), long, name).owners == ("host1-0", "host1-0")


def test_what_several_hosts_have_says_nothing():
    bridge = Endpoint(uuid(0, 0), 10800, (BRIDGE, "127.0.0.1"))
    both = Endpoint(uuid(1, 0), 10800, ("10.0.0.0", "10.0.0.1"))
    for endpoint in (bridge, both, Endpoint(uuid(2, 0), 10800, ())):
        assert place(cluster(2), endpoint).near == {"host0-0": (), "host1-0": ()}


def test_a_server_on_loopback_alone_is_on_the_host_that_asks():
    loopback = Endpoint(uuid(0, 0), 10800, ("127.0.0.1", "::1"))
    assert place(cluster(2, here="host1"), loopback).owners == ("host1-0",)
    elsewhere = place(cluster(2), loopback)
    assert elsewhere.near == {"host0-0": (), "host1-0": ()}
