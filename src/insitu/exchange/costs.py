"""Pure: which way to reduce is the cheapest, by a model of latency, bandwidth and the speed of summing, which
are measured at join.

- "gather": everybody sends its rows to everybody and sums all of them. One message deep.
- "direct": everybody owns a part of the length, is sent all rows' parts, and sends the sums back. Two
  messages deep; moves the least, as a ring does, but keeps the order of summation.
- "chain": a running sum goes from the first host to the last in shard order, chunk after chunk, and the
  result comes back. Deep, but a host that has many shards sends one sum instead of all its rows. Possible
  only where each host's shards follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from insitu.exchange.transport import Members

Algorithm = Literal["gather", "direct", "chain"]

_DIRECT_LATENCIES = 4
"""Two messages deep, and as much again for the keeping of chunks, as measured."""


@dataclass(frozen=True, slots=True)
class Costs:
    """`latency` in seconds per message, `bandwidth` in bytes per second out of one member, `summing` in
    bytes of rows that one member adds up per second."""

    latency: float
    bandwidth: float
    summing: float


def chain_order(members: Members) -> list[int] | None:
    """Members in the order of their shards, or None where their shards don't follow one another. Members
    without shards come last: they hand on what they get."""
    hosts = [rank for rank in range(members.size) if members.shards[rank]]
    hosts.sort(key=lambda rank: members.shards[rank][0])
    following = [shard for rank in hosts for shard in members.shards[rank]]
    if following != list(range(members.num_shards)):
        return None
    return hosts + [rank for rank in range(members.size) if not members.shards[rank]]


def estimate(algorithm: Algorithm, members: Members, row_bytes: int, chunk: int, costs: Costs) -> float:
    """Seconds that one reduction takes, by the model."""
    others = members.size - 1
    rows = max(len(shards) for shards in members.shards)
    moving, summing = row_bytes / costs.bandwidth, row_bytes / costs.summing
    if algorithm == "gather":
        return costs.latency + others * rows * moving + members.num_shards * summing
    if algorithm == "direct":
        parts = others / members.size * (rows + 1) * moving + members.num_shards / members.size * summing
        return _DIRECT_LATENCIES * costs.latency + parts
    step = costs.latency + min(chunk, row_bytes) / costs.bandwidth
    return 2 * others * step + (2 if others > 1 else 1) * moving + rows * summing


def choose(members: Members, row_bytes: int, chunk: int, costs: Costs) -> Algorithm:
    """The cheapest algorithm; the same on every member, as long as `costs` are."""
    candidates: list[Algorithm] = ["gather", "direct"]
    if chain_order(members) is not None:
        candidates.append("chain")
    return min(candidates, key=lambda algorithm: estimate(algorithm, members, row_bytes, chunk, costs))
