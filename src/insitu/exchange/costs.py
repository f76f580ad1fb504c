"""Pure: which way to reduce is the cheapest, by a model of latency and bandwidth that is measured at join.

- "gather": everybody sends its rows to everybody and sums all of them. One message deep.
- "star": one member, the hub, is sent all rows and sends the sum to all. Two messages deep, but the fewest
  messages: where members share processors, the work of sending counts, not the depth.
- "direct": everybody owns a part of the length, is sent all rows' parts, and sends the sums back. Two
  messages deep; moves the least, as a ring does, but keeps the order of summation.
- "chain": a running sum goes from the first host to the last in shard order, chunk after chunk, and the
  result comes back. Deep, but a host that has many shards sends one sum instead of all its rows. Possible
  only where each host's shards follow one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from insitu.exchange.transport import Members

AlgorithmName = Literal["gather", "star", "direct", "chain"]
MeasuredAlgorithm = Literal["gather", "star", "direct"]
MEASURED: tuple[MeasuredAlgorithm, ...] = ("gather", "star", "direct")
MEASURED_BYTES = 512 * 1024
"""Of the largest rows that are measured."""
_TABLE_BYTES = 8 << 20
"""All shards' rows lie beside each other in the memory of one member only up to this size together."""
_SHARED_OUT_FROM = 64 * 1024
"""Bytes of a row up to which messages cost more than what is in them, so that it isn't cut into parts."""
_FAVOUR = 0.9


@dataclass(frozen=True, slots=True)
class LinearCost:
    """What a reduction takes: `latency` in seconds, and `seconds_per_byte` in seconds more per byte of a row."""

    latency: float
    seconds_per_byte: float

    def at(self, row_bytes: int) -> float:
        return self.latency + row_bytes * self.seconds_per_byte


Costs = Mapping[MeasuredAlgorithm, LinearCost]


def hub(members: Members) -> int:
    """Who adds up for all in a star: the member with the most shards, whose rows need not be sent."""
    return max(range(members.size), key=lambda rank: len(members.shards[rank]))


def chain_order(members: Members) -> list[int] | None:
    """Members in the order of their shards, or None where their shards don't follow one another. Members
    without shards come last: they hand on what they get."""
    hosts = [rank for rank in range(members.size) if members.shards[rank]]
    hosts.sort(key=lambda rank: members.shards[rank][0])
    following = [shard for rank in hosts for shard in members.shards[rank]]
    if following != list(range(members.num_shards)):
        return None
    return hosts + [rank for rank in range(members.size) if not members.shards[rank]]


def estimate(algorithm: AlgorithmName, members: Members, row_bytes: int, chunk: int, costs: Costs) -> float:
    """Seconds that one reduction takes, by the model.

    Rows that were measured are too short to be streamed in chunks. So what larger ones take in "direct",
    whose two messages overlap then, follows from how long everybody's rows take to everybody; so does what a
    chain takes, which isn't measured.
    """
    others, rows = members.size - 1, max(len(shards) for shards in members.shards)
    everybody = costs["gather"]
    seconds_per_byte = everybody.seconds_per_byte / (others * rows)
    if algorithm == "chain":
        step = everybody.latency + min(chunk, row_bytes) * seconds_per_byte
        return 2 * others * step + (2 if others > 1 else 1) * row_bytes * seconds_per_byte
    if algorithm == "direct":
        streamed = min(
            costs["direct"].seconds_per_byte, others / members.size * (rows + 1) * seconds_per_byte
        )
        measured = min(row_bytes, MEASURED_BYTES)
        return costs["direct"].at(measured) + (row_bytes - measured) * streamed
    return costs[algorithm].at(row_bytes)


def choose(members: Members, row_bytes: int, chunk: int, costs: Costs) -> AlgorithmName:
    """The cheapest algorithm, or "gather", the simplest, where that takes hardly longer. The same on every
    member, as long as `costs` are."""
    if not row_bytes:
        return "gather"

    def seconds(algorithm: AlgorithmName) -> float:
        favour = _FAVOUR if algorithm == "gather" else 1.0
        return favour * estimate(algorithm, members, row_bytes, chunk, costs)

    candidates: list[AlgorithmName] = []
    if members.num_shards * row_bytes <= _TABLE_BYTES:
        candidates.append("gather")
        if members.size == 2 and max(map(len, members.shards)) == 1:
            return "gather"  # nothing sends less, or in fewer messages
        candidates.append("star")
    if row_bytes > _SHARED_OUT_FROM or not candidates:
        candidates.append("direct")
        if chain_order(members) is not None:
            candidates.append("chain")
    return min(candidates, key=seconds)
