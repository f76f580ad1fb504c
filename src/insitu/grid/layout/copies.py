"""Pure: which copies of partitions there are after one has moved.

The specification of a version never changes. Which nodes hold its partitions does, so that is a table beside
it, in the catalogue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from insitu.base.spec import NodeId, PlacedCopy


def flip_copies(
    copies: Sequence[PlacedCopy], moves: Iterable[tuple[int, NodeId | None, NodeId]]
) -> list[PlacedCopy]:
    """Return `copies` after each (partition, source, target) of `moves`: the target's copy becomes live.

    It takes the place of the source's, so that the primary owner stays the first. Without a source it comes
    last. Raises ValueError if the target isn't copying, or the source has no copy.
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


def reconcile_copies(
    copies: Sequence[PlacedCopy], node: NodeId, held: Collection[int]
) -> tuple[list[PlacedCopy], list[int], list[int]]:
    """Return (`copies` as they are when the store of `node` holds the partitions `held`, the partitions whose
    copy there is lost now, those whose copy is live again). Copies that are on their way stay so."""
    result, lost, found = [], [], []
    for copy in copies:
        if copy.node == node and copy.state == "live" and copy.partition not in held:
            lost.append(copy.partition)
            copy = PlacedCopy(copy.partition, node, "lost")
        elif copy.node == node and copy.state == "lost" and copy.partition in held:
            found.append(copy.partition)
            copy = PlacedCopy(copy.partition, node, "live")
        result.append(copy)
    return result, lost, found
