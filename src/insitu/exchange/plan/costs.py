"""Pure: which algorithm is the cheapest, by a model of latency and bandwidth that is measured at join.

- "gather": each member sends its rows to each other and sums all of them. One message deep.
- "star": one member, the hub, receives all rows and sends the sum to all. Two messages deep, but the fewest
  messages: if members share processors, the number of messages counts, not the depth.
- "direct": each member owns a part of the length, receives that part of all rows, and sends the sums back.
  Two messages deep. It moves the fewest bytes, as a ring does, but keeps the order of summation.
- "chain": a running sum passes from the first host to the last in shard order, chunk after chunk, and the
  result comes back. Deep, but a host that has many shards sends one sum instead of all its rows. Possible
  only if each host's shards follow one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from insitu.exchange.plan.transport import Members

AlgorithmName = Literal["gather", "star", "direct", "chain"]
MeasuredAlgorithm = Literal["gather", "star", "direct"]
MEASURED: tuple[MeasuredAlgorithm, ...] = ("gather", "star", "direct")
MAX_PROBE_BYTES = 512 * 1024
"""Bytes of the largest rows that are measured."""
_MAX_TABLE_BYTES = 8 << 20
"""One member holds the rows of all shards in its memory only up to this total size."""
_MIN_PARTITIONED_BYTES = 64 * 1024
"""Rows up to this size aren't cut into parts: messages cost more than the bytes in them."""
_GATHER_FACTOR = 0.9
"""The simplest algorithm is chosen unless another one takes less than this share of its time."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """The time of a reduction as a linear function of the size of a row."""

    #: Seconds for a row without elements.
    latency: float
    #: Seconds more per byte of a row.
    seconds_per_byte: float

    def predict(self, row_bytes: int) -> float:
        """Return the seconds for rows of this size."""
        return self.latency + row_bytes * self.seconds_per_byte


Costs = Mapping[MeasuredAlgorithm, LinearCost]


def find_hub(members: Members) -> int:
    """Return the hub of a star: the member with the most shards, whose rows need not be sent."""
    return max(range(members.size), key=lambda rank: len(members.shards[rank]))


def find_chain_order(members: Members) -> list[int] | None:
    """Return the members in the order of their shards, or None if their shards don't follow one another.

    Members without shards come last: they pass on what they receive.
    """
    hosts = [rank for rank in range(members.size) if members.shards[rank]]
    hosts.sort(key=lambda rank: members.shards[rank][0])
    following = [shard for rank in hosts for shard in members.shards[rank]]
    if following != list(range(members.num_shards)):
        return None
    return hosts + [rank for rank in range(members.size) if not members.shards[rank]]


def estimate(algorithm: AlgorithmName, members: Members, row_bytes: int, chunk: int, costs: Costs) -> float:
    """Return the seconds that one reduction takes by the model.

    The measured rows are too short to be sent in chunks, so for larger ones "direct", whose two messages then
    overlap, is derived from the measured "gather". So is "chain", which isn't measured.
    """
    others, rows = members.size - 1, max(len(shards) for shards in members.shards)
    gather = costs["gather"]
    row_seconds = gather.seconds_per_byte / (others * rows)
    if algorithm == "chain":
        step = gather.latency + min(chunk, row_bytes) * row_seconds
        return 2 * others * step + (2 if others > 1 else 1) * row_bytes * row_seconds
    if algorithm == "direct":
        overlapped = others / members.size * (rows + 1) * row_seconds
        streamed = min(costs["direct"].seconds_per_byte, overlapped)
        measured = min(row_bytes, MAX_PROBE_BYTES)
        return costs["direct"].predict(measured) + (row_bytes - measured) * streamed
    return costs[algorithm].predict(row_bytes)


def choose_algorithm(members: Members, row_bytes: int, chunk: int, costs: Costs) -> AlgorithmName:
    """Return the cheapest algorithm, or "gather", the simplest, if that takes hardly longer.

    All members choose the same one, as long as they have the same `costs`.
    """
    if not row_bytes:
        return "gather"

    def predict(algorithm: AlgorithmName) -> float:
        factor = _GATHER_FACTOR if algorithm == "gather" else 1.0
        return factor * estimate(algorithm, members, row_bytes, chunk, costs)

    candidates: list[AlgorithmName] = []
    if members.num_shards * row_bytes <= _MAX_TABLE_BYTES:
        candidates.append("gather")
        if members.size == 2 and max(map(len, members.shards)) == 1:
            return "gather"  # no other one sends less, or in fewer messages
        candidates.append("star")
    if row_bytes > _MIN_PARTITIONED_BYTES or not candidates:
        candidates.append("direct")
        if find_chain_order(members) is not None:
            candidates.append("chain")
    return min(candidates, key=predict)
