"""Where rows and partitions go: fair, deterministic, and the same in every release."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import InputError
from insitu.base.spec import NodeId, PartitionInfo, Topology
from insitu.grid.layout.affinity import (
    check_split,
    hash_integers,
    hash_rows,
    hash_texts,
    owners_of_partition,
    partition_of_rows,
    shard_partitions,
    split_of_rows,
    splitmix64,
)


def topology(nodes: int) -> Topology:
    return Topology(tuple(NodeId(f"node-{i}") for i in range(nodes)))


def text_hashes(texts: list[str]) -> np.ndarray:
    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)])
    return hash_texts(np.frombuffer(b"".join(encoded), np.uint8), offsets)


def test_hashes_are_those_of_every_release() -> None:
    """Caches on disk were split by these: changing them would give an overwritten cache other partitions."""
    assert [hex(h) for h in splitmix64(np.arange(3, dtype=np.uint64))] == [
        "0xe220a8397b1dcdaf",
        "0x910a2dec89025cc1",
        "0x975835de1c9756ce",
    ]
    assert partition_of_rows(hash_rows(0, 12), 4).tolist() == [3, 1, 2, 1, 2, 2, 0, 3, 2, 0, 2, 1]
    assert [hex(h) for h in text_hashes(["", "a", "é"])] == [
        hex(h) for h in map(_slow_text_hash, ["", "a", "é"])
    ]


def test_splits_and_owners_are_those_of_every_release() -> None:
    """An import of the same rows has the same splits, and those of before find their partitions."""
    splits = split_of_rows(hash_rows(0, 16), [0.5, 0.3, 0.2])
    assert "".join(map(str, splits)) == "0110200112020100"
    owners = ("".join(node[-1] for node in owners_of_partition(p, topology(4), 2)) for p in range(13))
    assert " ".join(owners) == "012 123 230 301 023 130 201 312 031 102 213 320 012"


def _slow_text_hash(text: str) -> int:
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return int(splitmix64(np.array([value], dtype=np.uint64))[0])


@given(st.lists(st.text(max_size=20), max_size=20))
def test_texts_hash_one_by_one(texts: list[str]) -> None:
    assert text_hashes(texts).tolist() == [_slow_text_hash(text) for text in texts]


@given(st.lists(st.integers(-100, 100), min_size=1))
def test_equal_numbers_hash_alike_in_every_dtype(values: list[int]) -> None:
    expected = hash_integers(np.array(values, dtype=np.int64))
    for dtype in (np.int8, np.int16, np.int32, ">i4"):
        np.testing.assert_array_equal(hash_integers(np.array(values, dtype=dtype)), expected)
    positive = np.abs(np.array(values))
    np.testing.assert_array_equal(hash_integers(positive.astype(np.uint64)), hash_integers(positive))


def test_hashing_in_blocks_changes_nothing() -> None:
    whole = hash_rows(0, 100)
    np.testing.assert_array_equal(whole, np.concatenate([hash_rows(0, 37), hash_rows(37, 100)]))


def test_rows_spread_evenly_and_splits_are_independent_of_partitions() -> None:
    hashes = hash_rows(0, 100_000)
    partition, split = partition_of_rows(hashes, 10), split_of_rows(hashes, [0.9, 0.1])
    assert np.bincount(partition).min() > 9_600 and np.bincount(partition).max() < 10_400
    assert 9_600 < (split == 1).sum() < 10_400
    both = np.bincount(partition[split == 1], minlength=10)
    assert both.min() > 850 and both.max() < 1150


@pytest.mark.parametrize(
    "split", [{}, {"a": 0.5}, {"a": 0.5, "b": 0.6}, {"a": 1.5, "b": -0.5}, {"a": 1.0, "b": 0.0}]
)
def test_bad_splits_are_refused(split: dict[str, float]) -> None:
    with pytest.raises(InputError, match="add up to 1"):
        check_split(split)


@given(st.integers(1, 12), st.integers(1, 200), st.data())
def test_owners_are_distinct_and_fair(nodes: int, partitions: int, data: st.DataObject) -> None:
    backups = data.draw(st.integers(0, nodes - 1))
    owners = [owners_of_partition(p, topology(nodes), backups) for p in range(partitions)]
    assert all(len(set(o)) == len(o) == backups + 1 for o in owners)
    primaries = collections.Counter(o[0] for o in owners)
    assert max(primaries.values()) - (min(primaries.values()) if len(primaries) == nodes else 0) <= 1


def test_a_lost_nodes_partitions_are_shared_by_all_others() -> None:
    owners = [owners_of_partition(p, topology(4), 1) for p in range(24)]
    assert collections.Counter(o[1] for o in owners if o[0] == "node-0") == {
        f"node-{i}": 2 for i in (1, 2, 3)
    }


@pytest.mark.parametrize(("nodes", "backups"), [(1, 1), (3, 3), (3, -1)])
def test_more_backups_than_other_nodes_are_refused(nodes: int, backups: int) -> None:
    with pytest.raises(InputError, match="--backups must be in"):
        owners_of_partition(0, topology(nodes), backups)


def info(index: int, rows: int, *owners: str) -> PartitionInfo:
    return PartitionInfo(index, rows, 0, "crc32:0", tuple(NodeId(o) for o in owners))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[PartitionInfo], list[NodeId]]:
    nodes = topology(draw(st.integers(1, 5))).nodes
    partitions = [
        info(i, draw(st.integers(0, 50)), *draw(st.permutations(nodes))[: draw(st.integers(1, len(nodes)))])
        for i in range(draw(st.integers(0, 20)))
    ]
    return partitions, draw(st.lists(st.sampled_from([*nodes, NodeId("elsewhere")]), min_size=1, max_size=8))


@given(layouts())
def test_shards_hold_each_partition_once_and_are_not_empty(
    layout: tuple[list[PartitionInfo], list[NodeId]],
) -> None:
    partitions, homes = layout
    shards = shard_partitions(partitions, homes)
    assert len(shards) == len(homes)
    assert sorted(p for shard in shards for p in shard) == list(range(len(partitions)))
    assert all(list(shard) == sorted(shard) for shard in shards)
    with_rows = [p for p in partitions if p.rows]
    empty = [s for s in shards if not any(partitions[p].rows for p in s)]
    assert len(empty) == max(0, len(homes) - len(with_rows))
    assert shards == shard_partitions(partitions[::-1], homes)


@given(layouts())
def test_partitions_stay_local_unless_a_shard_would_be_empty(
    layout: tuple[list[PartitionInfo], list[NodeId]],
) -> None:
    partitions, homes = layout
    shards = shard_partitions(partitions, homes)
    home_of = {p: homes[s] for s, held in enumerate(shards) for p in held}
    astray = [
        p
        for p in partitions
        if (p.owners[0] in homes and home_of[p.index] != p.owners[0])
        or (set(p.owners) & set(homes) and home_of[p.index] not in p.owners)
    ]
    assert len(astray) < len(homes)


def test_shards_of_one_home_are_balanced_by_rows() -> None:
    rows = [50, 10, 10, 10, 10, 10, 7, 3]
    shards = shard_partitions([info(i, n, "node-0") for i, n in enumerate(rows)], [NodeId("node-0")] * 2)
    assert sorted(sum(rows[p] for p in shard) for shard in shards) == [53, 57]


def test_a_backup_home_is_preferred_to_a_stranger() -> None:
    partitions = [info(0, 5, "node-0"), info(1, 5, "node-9", "node-1"), info(2, 5, "node-9", "node-1")]
    assert shard_partitions(partitions, [NodeId("node-0"), NodeId("node-1")]) == ((0,), (1, 2))


def test_no_homes_are_refused() -> None:
    with pytest.raises(InputError, match="at least one shard"):
        shard_partitions([], [])
