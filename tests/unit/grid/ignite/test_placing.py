"""Which node of insitu holds the rows of which server of Ignite."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from insitu.grid.ignite.placing import count_moved, find_places
from insitu.grid.ignite.protocol import Endpoint
from insitu.spec import NodeId

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
