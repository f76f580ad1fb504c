from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.base.errors import ClusterError
from insitu.base.spec import CacheSpec, Column, NodeId, PartitionInfo, ShardMap
from insitu.cluster.hosts_engine.job_supplies import (
    PartitionSupply,
    Readers,
    find_missing,
    prefer_reachable,
)

A, B, C = map(NodeId, "abc")
OWNERS = ((A,), (B, A), (B,), (C,))
CACHE = CacheSpec(
    "data",
    1,
    (Column("x", "float32", ()),),
    tuple(PartitionInfo(i, 10, 100, "sum", nodes) for i, nodes in enumerate(OWNERS)),
    40,
    None,
    0.0,
)
SHARDS = ShardMap("data", 1, ((0, 3), (1, 2)))
FETCH = """
import json, sys
wanted = json.load(sys.stdin)["wanted"]
with open(sys.argv[1] + "/asked", "a") as file:
    file.write(json.dumps(wanted) + "\\n")
if sys.argv[1].endswith("full"):
    print(json.dumps({"error": "no room is left"}))
elif sys.argv[1].endswith("broken"):
    sys.exit(3)
else:
    print(json.dumps({"moved": {node: 100 * len(indices) for node, indices in wanted.items()}}))
"""


def test_a_node_lacks_what_its_shards_hold_and_it_doesnt_own() -> None:
    assert find_missing(CACHE, SHARDS, {A: [0], B: [1]}) == {A: {3}}
    assert find_missing(CACHE, SHARDS, {A: [0, 1], C: []}) == {A: {2, 3}}


def bring(supply: PartitionSupply, readers: Readers) -> None:
    deadline = time.monotonic() + 60
    while not supply.advance(readers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make(home: Path) -> PartitionSupply:
    home.mkdir(exist_ok=True)
    return PartitionSupply(home, CACHE, SHARDS, (sys.executable, "-c", FETCH))


def test_what_is_missing_is_fetched_once(tmp_path: Path) -> None:
    supply, began = make(tmp_path), time.time()
    assert supply.advance({B: [1]}) and not (tmp_path / "asked").exists()
    bring(supply, {A: [0]})
    bring(supply, {A: [0, 1]})
    bring(supply, {A: [0, 1], B: [1]})
    assert (tmp_path / "asked").read_text().splitlines() == ['{"a": [3]}', '{"a": [2]}']
    assert supply.news[0] == "a reads 1 partition of data that other nodes hold: 100 bytes were fetched"
    (first, second) = supply.times
    assert began <= first[0] <= first[1] <= second[0] <= second[1] <= time.time()
    supply.close()


@pytest.mark.parametrize(("kind", "why"), [("full", "no room is left"), ("broken", "exit code 3")])
def test_a_failure_is_told_and_tried_again(kind: str, why: str, tmp_path: Path) -> None:
    supply = make(tmp_path / kind)
    for _ in range(2):
        with pytest.raises(ClusterError, match=f"can't be fetched to a: .*{why}"):
            bring(supply, {A: [0]})
    assert len((tmp_path / kind / "asked").read_text().splitlines()) >= 2
    supply.close()


def test_copies_on_hosts_that_cannot_be_reached_come_last() -> None:
    assert prefer_reachable(CACHE, ()) is CACHE
    found = prefer_reachable(CACHE, {B})
    assert [p.owners for p in found.partitions] == [(A,), (A, B), (B,), (C,)]


def test_what_is_missing_is_counted_until_it_has_come(tmp_path: Path) -> None:
    supply = make(tmp_path)
    assert supply.count_missing_bytes({A: [0], B: [1]}) == 100
    bring(supply, {A: [0]})
    assert supply.count_missing_bytes({A: [0], B: [1]}) == 0
    supply.close()


def test_a_node_that_has_owned_a_partition_keeps_it_while_the_job_runs(tmp_path: Path) -> None:
    supply = make(tmp_path)
    moved = replace(CACHE, partitions=tuple(replace(info, owners=(C,)) for info in CACHE.partitions))
    supply.record_owners(moved)
    assert supply.advance({B: [1], C: [0, 1]}) and not (tmp_path / "asked").exists()
    bring(supply, {A: [0]})
    assert (tmp_path / "asked").read_text() == '{"a": [3]}\n'
    supply.close()
