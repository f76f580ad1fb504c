"""Pure: where the copies of partitions are, and in which state each is.

The specification of a version never changes. Which nodes hold its partitions does, so that is a table beside
it, in the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from insitu.spec import NodeId

CopyState = Literal["live", "copying", "lost"]
"""`live`: whole and verified. `copying`: its bytes are on the way. `lost`: its node isn't there."""
COPY_STATES: tuple[CopyState, ...] = get_args(CopyState)


@dataclass(frozen=True, slots=True)
class PlacedCopy:
    """One copy of a partition of one version of a cache."""

    #: The partition's number.
    partition: int
    #: The node whose store the copy lies in, or will lie in.
    node: NodeId
    #: Written by the import, and by what moves the copy.
    state: CopyState = "live"

    def __post_init__(self) -> None:
        if self.state not in COPY_STATES:
            raise ValueError(f"a copy is {', '.join(COPY_STATES)}. Received: {self.state!r}")


def owners_by_partition(copies: Iterable[PlacedCopy]) -> dict[int, tuple[NodeId, ...]]:
    """Return the nodes of each partition's live copies, in the order of `copies`: the primary owner first.

    Where no copy is live, the lost ones stand for them, so that an error names the nodes that are missed.
    """
    found: dict[int, dict[CopyState, list[NodeId]]] = {}
    for copy in copies:
        found.setdefault(copy.partition, {}).setdefault(copy.state, []).append(copy.node)
    return {index: tuple(states.get("live") or states.get("lost") or ()) for index, states in found.items()}


def flip_copies(
    copies: Sequence[PlacedCopy], moves: Iterable[tuple[int, NodeId | None, NodeId]]
) -> list[PlacedCopy]:
    """Return `copies` after each (partition, source, target) of `moves`: the target's copy becomes live.

    It takes the place of the source's, so that the primary owner stays the first. Without a source it comes
    last. Raises ValueError where the target isn't copying, or the source has no copy.
    """
    result = list(copies)
    for partition, source, target in moves:
        arriving = PlacedCopy(partition, target, "copying")
        if arriving not in result:
            raise ValueError(f"partition {partition} isn't being copied to {target}")
        result.remove(arriving)
        live = PlacedCopy(partition, target, "live")
        if source is None:
            result.append(live)
            continue
        place = next((i for i, c in enumerate(result) if (c.partition, c.node) == (partition, source)), None)
        if place is None:
            raise ValueError(f"{source} has no copy of partition {partition}")
        result[place] = live
    return result
