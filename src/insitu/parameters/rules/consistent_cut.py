"""Pure: the cut at which all servers write their state, so that a checkpoint is consistent over servers.

All servers write the state after the same push of each shard: the furthest one that any of them had applied
when they froze. All servers receive each push, so the others will have it soon. In mode sync the leader's
version is the cut, and the others follow its decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DENSE_STREAM = ""
"""The stream of pushes of dense variables; pushes to one table alone are a stream of the table's name."""


@dataclass(frozen=True, slots=True)
class ConsistentCut:
    """The pushes that a checkpoint contains."""

    #: Number of the checkpoint, the same on all servers.
    number: int
    #: The leader's version, for mode sync.
    version: int
    #: The leader's last decisions, [step, shards] each, with which the others come to `version`.
    decisions: Sequence[Any] = ()
    #: By stream, the last sequence of each shard.
    sequences: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a `checkpoint` request."""
        return {
            "number": self.number,
            "cut": {stream: sorted(shards.items()) for stream, shards in self.sequences.items()},
            "version": self.version,
            "decisions": self.decisions,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ConsistentCut:
        """Return the cut that `to_json` described."""
        sequences = {
            str(stream): {int(shard): int(sequence) for shard, sequence in shards}
            for stream, shards in data["cut"].items()
        }
        return cls(int(data["number"]), int(data["version"]), data.get("decisions", ()), sequences)

    def contains(self, stream: str, shard: int, sequence: int) -> bool:
        """Return whether a push is part of the checkpoint."""
        return sequence <= self.sequences.get(stream, {}).get(shard, -1)

    def is_reached(self, mode: str, version: int, applied: Mapping[str, Mapping[int, int]]) -> bool:
        """Return whether a server at `version`, which has `applied` (by stream and shard), is at the cut."""
        if mode == "sync" and version < self.version:
            return False
        for stream, shards in self.sequences.items():
            if stream == DENSE_STREAM and mode == "sync":
                continue  # the version decides for this stream
            own = applied.get(stream)
            if own is None or any(own.get(shard, -1) < sequence for shard, sequence in shards.items()):
                return False
        return True


def plan_cut(frozen: Sequence[Mapping[str, Any]]) -> ConsistentCut:
    """Return the cut for servers that answered `freeze` with these descriptions, the leader's first."""
    sequences: dict[str, dict[int, int]] = {}
    for server in frozen:
        for stream, applied in server["applied"].items():
            furthest = sequences.setdefault(stream, {})
            for shard, sequence in applied:
                furthest[shard] = max(furthest.get(shard, -1), sequence)
    number = 1 + max(int(server["number"]) for server in frozen)
    return ConsistentCut(number, frozen[0]["version"], frozen[0]["decisions"], sequences)
