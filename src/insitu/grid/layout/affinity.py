"""Pure: the partition of each row, the owners of each partition, the partitions of each shard.

Every answer is the same on every platform and in every release: a cache that is imported again from the
same rows has the same partitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from insitu.base.errors import InputError
from insitu.base.spec import NodeId, PartitionInfo, Topology
from insitu.base.wording import format_count

Hashes = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_SPLIT_SALT = np.uint64(0x5B1D3A7C2E9F4680)
"""Keeps the choice of a split independent of the choice of a partition."""


def splitmix64(values: Hashes) -> Hashes:
    """Apply a round of splitmix64 (Steele, Lea, Flood 2014) to each of `values`: uint64[n] -> uint64[n]."""
    mixed = values + _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hash_rows(start: int, stop: int) -> Hashes:
    """Return each row's hash by its index in the source, for rows [start, stop): uint64[stop - start]."""
    return splitmix64(np.arange(start, stop, dtype=np.uint64))


def hash_integers(values: npt.NDArray[np.generic]) -> Hashes:
    """Return the hash of each integer or bool. Equal numbers hash alike whatever their dtype."""
    if values.dtype == np.uint64:
        return splitmix64(values.astype(np.uint64))
    return splitmix64(values.astype(np.int64).view(np.uint64))


def hash_texts(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> Hashes:
    """Return the hash of each text: FNV-1a over its UTF-8 bytes, then splitmix64.

    Text i is `data[offsets[i]:offsets[i + 1]]`. Takes one vectorised pass per byte of the longest text.
    """
    starts, lengths = offsets[:-1], np.diff(offsets)
    hashes = np.full(len(starts), _FNV_OFFSET, dtype=np.uint64)
    longest_first = np.argsort(-lengths, kind="stable")
    ascending = np.sort(lengths)
    for position in range(int(ascending[-1]) if len(ascending) else 0):
        still_going = len(ascending) - int(np.searchsorted(ascending, position, side="right"))
        rows = longest_first[:still_going]
        hashes[rows] = (hashes[rows] ^ data[starts[rows] + position]) * _FNV_PRIME
    return splitmix64(hashes)


def partition_of_rows(hashes: Hashes, partitions: int) -> npt.NDArray[np.int64]:
    """Return the partition in [0, partitions) of each row: its hash modulo `partitions`."""
    return (hashes % np.uint64(partitions)).astype(np.int64)


def split_of_rows(hashes: Hashes, fractions: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return the split in [0, len(fractions)) of each row; split i gets about `fractions[i]` of all rows.

    The hash, salted, is a point in [0, 1) whose place among the running sums of `fractions` decides.
    """
    points = (splitmix64(hashes ^ _SPLIT_SALT) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    bounds = np.cumsum(np.asarray(fractions, dtype=np.float64))[:-1]
    return np.searchsorted(bounds, points, side="right").astype(np.int64)


def check_split(split: Mapping[str, float]) -> None:
    """Raise InputError unless `split` has positive fractions that add up to 1."""
    total = sum(split.values())
    if not split or any(not 0 < f <= 1 for f in split.values()) or abs(total - 1) > 1e-6:
        raise InputError(
            f"A split gives each part a fraction in (0, 1], and all of them add up to 1, such as "
            f"train=0.9,test=0.1. Received: {dict(split)!r}, which adds up to {total:g}"
        )


def owners_of_partition(partition: int, topology: Topology, backups: int) -> tuple[NodeId, ...]:
    """Return the primary owner of `partition`, then its `backups` further ones; all distinct.

    Primaries go round the nodes, so that their numbers of partitions differ by one at most. The backups of
    one node's partitions go round all the other nodes, so that when it is lost they share its load.
    """
    nodes = topology.nodes
    if not 0 <= backups < len(nodes):
        raise InputError(
            f"Each copy of a partition is on a node of its own, so --backups must be in [0, {len(nodes)}) "
            f"on {format_count(len(nodes), 'node')}. Received: {backups}. Bring up more nodes with `insitu "
            "up --nodes N`, "
            f"on several hosts with `insitu up --hosts FILE`"
        )
    primary = partition % len(nodes)
    others = [nodes[(primary + k) % len(nodes)] for k in range(1, len(nodes))]
    first = partition // len(nodes) % len(others) if others else 0
    return (nodes[primary], *(others[(first + k) % len(others)] for k in range(backups)))


def shard_partitions(
    partitions: Sequence[PartitionInfo], homes: Sequence[NodeId]
) -> tuple[tuple[int, ...], ...]:
    """Return, for each shard at home on `homes[shard]`, the indices of its partitions in ascending order.

    A partition goes to a shard at home on its primary owner; if there is none, to one at home on a backup
    owner; else to any. Among those it goes to the one with the fewest rows so far, large partitions first.
    Then a shard without rows takes a partition from the fullest one, so that none is empty if enough
    partitions have rows. The same input gives the same answer.
    """
    if not homes:
        raise InputError("A job has at least one shard. Received: no homes")
    shards: list[list[PartitionInfo]] = [[] for _ in homes]
    tiers: tuple[list[PartitionInfo], ...] = ([], [], [])
    for partition in sorted(partitions, key=lambda p: (-p.rows, p.index)):
        at_primary = partition.owners[0] in homes
        tiers[0 if at_primary else 1 if set(partition.owners) & set(homes) else 2].append(partition)
    for tier, members in enumerate(tiers):
        for partition in members:
            wanted = (partition.owners[:1], partition.owners, homes)[tier]
            candidates = [s for s, home in enumerate(homes) if home in wanted]
            shards[min(candidates, key=lambda s: (_rows(shards[s]), len(shards[s]), s))].append(partition)
    _fill_empty_shards(shards, homes)
    return tuple(tuple(sorted(p.index for p in shard)) for shard in shards)


def _rows(shard: Sequence[PartitionInfo]) -> int:
    return sum(p.rows for p in shard)


def _fill_empty_shards(shards: list[list[PartitionInfo]], homes: Sequence[NodeId]) -> None:
    for receiver, home in enumerate(homes):
        if _rows(shards[receiver]):
            continue
        gifts = [
            (home not in p.owners, -_rows(donor), -p.rows, p.index, s)
            for s, donor in enumerate(shards)
            for p in donor
            if p.rows and sum(1 for other in donor if other.rows) > 1
        ]
        if not gifts:
            return
        *_, index, giver = min(gifts)
        gift = next(p for p in shards[giver] if p.index == index)
        shards[giver].remove(gift)
        shards[receiver].append(gift)
