"""What all shards bring to a place."""

from __future__ import annotations

import numpy as np
import pytest
from parameter_servers import clients, servers

from insitu.base.errors import ServerStalled
from insitu.parameters.server_state import Gatherings


def bring(kept: Gatherings, place: str, shard: int, *values: float) -> None:
    kept.bring({"place": place, "shards": [shard], "rows": [len(values)]}, np.array([[v] for v in values]))


def test_what_a_shard_brought_first_stays():
    kept = Gatherings()
    bring(kept, "a", 1, 5.0)
    bring(kept, "a", 1, 6.0)
    assert kept.find("a", [0, 1]) is None and kept.find("b", []) is None
    bring(kept, "a", 0, 7.0, 8.0)
    meta, (array,) = kept.find("a", [0, 1])
    assert (meta, array.tolist()) == ({"shards": [0, 1]}, [[7], [8], [5]])


def test_the_places_that_were_opened_first_are_forgotten():
    kept = Gatherings(limit=16)
    for place in "abc":
        bring(kept, place, 0, 1.0)
    assert [place for place in "abc" if kept.find(place, [0])] == ["b", "c"]


def test_workers_get_what_all_bring_but_those_that_are_past_the_place():
    define = {"w": ((1,), "float32", np.zeros(1, "float32"))}
    with servers(2, mode="sync", total_replicas=2) as addresses, clients(addresses, 2) as made:
        for client in made:
            client.define(define, updater="sgd")
        first, second = made
        waiting = first.gather("a", 0, {0: np.ones((2, 3))})
        assert not waiting.done()
        found = [second.gather("a", 0, {1: np.zeros((0, 3))}).result(), waiting.result()]
        assert all(rows.tolist() == [[1] * 3] * 2 and list(shards) == [0, 1] for rows, shards in found)
        waiting = first.gather("b", 0, {0: np.ones((1, 3))})
        pushed = second.push(0, 8, gradients={"w": np.ones(1, "float32")})  # as one that was restarted
        assert list(waiting.result()[1]) == [0]
        first.push(0, 8, gradients={"w": np.ones(1, "float32")}).result()
        pushed.result()


def test_who_does_not_come_is_named():
    with (
        servers(1, mode="sync", total_replicas=2, stall_timeout=0.2) as addresses,
        clients(addresses, 1) as (client,),
        pytest.raises(ServerStalled, match=r"nothing from some of shards \[0, 1\]. Call evaluate in each"),
    ):
        client.gather("a", 0, {0: np.ones((1, 3))}).result()
