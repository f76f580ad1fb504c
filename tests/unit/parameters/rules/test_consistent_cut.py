"""The cut of a checkpoint over all servers."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.parameters.rules.consistent_cut import ConsistentCut, plan_cut

sequences = st.dictionaries(st.integers(0, 4), st.integers(0, 20))
servers = st.lists(
    st.fixed_dictionaries({"": sequences}, optional={"words": sequences, "users": sequences}),
    min_size=1,
    max_size=4,
)


def describe(applied: Any, number: int = 0, version: int = 3) -> dict[str, Any]:
    streams = {stream: sorted(shards.items()) for stream, shards in applied.items()}
    return {"applied": streams, "version": version, "number": number, "decisions": [[2, [0, 1]]]}


@settings(max_examples=100, deadline=None)
@given(servers)
def test_the_cut_is_the_furthest_push_of_each_shard(applied: Any):
    cut = plan_cut([describe(one) for one in applied])
    for stream in ("", "words", "users"):
        for shard in range(5):
            furthest = max(one.get(stream, {}).get(shard, -1) for one in applied)
            assert cut.contains(stream, shard, furthest)
            assert not cut.contains(stream, shard, furthest + 1)


@settings(max_examples=100, deadline=None)
@given(servers)
def test_a_server_is_at_the_cut_once_it_has_all_pushes(applied: Any):
    cut = plan_cut([describe(one) for one in applied])
    complete = {stream: dict(shards) for stream, shards in cut.sequences.items()}
    assert cut.is_reached("async", 0, complete)
    for stream, shards in cut.sequences.items():
        for shard, sequence in shards.items():
            behind = {**complete, stream: {**shards, shard: sequence - 1}}
            assert not cut.is_reached("async", 0, behind)
        assert not cut.is_reached("async", 0, {s: a for s, a in complete.items() if s != stream})


@settings(max_examples=50, deadline=None)
@given(servers, st.integers(0, 9))
def test_it_survives_the_wire(applied: Any, number: int):
    cut = plan_cut([describe(one, number) for one in applied])
    assert cut.number == number + 1
    read = ConsistentCut.from_json(json.loads(json.dumps(cut.to_json())))
    assert read == cut


def test_the_number_follows_the_greatest_of_all_servers():
    assert plan_cut([describe({}, 4), describe({}, 7)]).number == 8


def test_in_mode_sync_the_leaders_version_counts_for_dense_variables():
    cut = plan_cut([describe({"": {0: 5}, "words": {0: 1}}, version=6), describe({}, version=5)])
    assert not cut.is_reached("sync", 5, {"": {0: 5}, "words": {0: 1}})
    assert cut.is_reached("sync", 6, {"": {}, "words": {0: 1}})
    assert not cut.is_reached("sync", 6, {"": {}, "words": {0: 0}})
