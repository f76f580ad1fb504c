"""Pure: which copies are made again when nodes are lost or leave, and on which nodes.

Unlike a rebalancing (`rebalancing.py`) this moves nothing that has its copies: each partition gets those that
it lacks, no more, on the nodes that hold the fewest bytes of the version. The same input gives the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from insitu.base.spec import NodeId, PlacedCopy
from insitu.grid.layout.rebalancing import Move, RebalancePlan


def plan_restoring(
    copies: Sequence[PlacedCopy],
    sizes: Mapping[int, int],
    nodes: Collection[NodeId],
    backups: int,
    *,
    leaving: Collection[NodeId] = (),
    waiting: Collection[NodeId] = (),
) -> RebalancePlan:
    """Return how each partition gets `backups` further copies, or as many as there are nodes for.

    `sizes` are the bytes of each partition, `nodes` all nodes that can be read from and written to. Those in
    `leaving` get nothing and keep nothing once others have it. Those in `waiting` are offline and may come
    back soon: their copies count. Nodes that are in neither are lost. Copies of a lost node are given up only
    for a copy that takes its place.
    """
    counted = {*nodes, *waiting} - set(leaving)
    plan = _Plan(copies, sizes, sorted(set(nodes) - set(leaving)), backups + 1)
    unavailable = []
    for partition in sorted(sizes):
        holders = [c.node for c in copies if c.partition == partition and c.state == "live"]
        kept = [node for node in holders if node in counted]
        sources = [node for node in holders if node in nodes]
        if sources:
            given_up = _list_given_up(copies, partition, counted, leaving)
            plan.restore(partition, holders, kept, sources, given_up, leaving)
        elif not kept:
            unavailable.append(partition)
    return RebalancePlan(tuple(plan.moves), tuple(plan.drops), plan.owners, tuple(unavailable))


class _Plan:
    """The plan, partition by partition."""

    def __init__(
        self, copies: Sequence[PlacedCopy], sizes: Mapping[int, int], staying: Sequence[NodeId], count: int
    ) -> None:
        self.moves: list[Move] = []
        self.drops: list[tuple[int, NodeId]] = []
        self.owners: dict[int, tuple[NodeId, ...]] = {}
        self._sizes = sizes
        self._staying = staying
        self._count = count
        #: Bytes that each node has, with those that it will have.
        self._load: Counter[NodeId] = Counter(dict.fromkeys(staying, 0))
        for copy in copies:
            if copy.node in self._load and copy.state == "live":
                self._load[copy.node] += sizes.get(copy.partition, 0)
        #: Bytes that are read from each node.
        self._sent: Counter[NodeId] = Counter()

    def restore(
        self,
        partition: int,
        holders: Sequence[NodeId],
        kept: Sequence[NodeId],
        sources: Sequence[NodeId],
        given_up: Sequence[NodeId],
        leaving: Collection[NodeId],
    ) -> None:
        """Plan for one partition. `kept` are the holders that count, `given_up` what others take the place
        of."""
        size, removed = self._sizes[partition], list(given_up)
        free = sorted(set(self._staying) - set(holders), key=lambda node: (self._load[node], node))
        targets = free[: max(0, self._count - len(kept))]
        for target in targets:
            source = min(sources, key=lambda node: (self._sent[node], node))
            self._sent[source] += size
            self._load[target] += size
            self.moves.append(Move(partition, source, target, removed.pop(0) if removed else None, size))
        missing = self._count - len(kept) - len(targets)
        if kept or targets:
            lost = [node for node in removed if node not in leaving]
            # Copies on a lost node are all there is of those that no other node has room for.
            dropped = set(removed) - set(lost[: max(0, missing)])
            self.drops += [(partition, node) for node in removed if node in dropped]
        removed_from = {*(n for p, n in self.drops if p == partition), *given_up[: len(targets)]}
        self.owners[partition] = (*(node for node in holders if node not in removed_from), *targets)


def _list_given_up(
    copies: Sequence[PlacedCopy], partition: int, counted: Collection[NodeId], leaving: Collection[NodeId]
) -> list[NodeId]:
    """Return the nodes whose copy doesn't count, in the order in which others take its place: first those
    that leave, then those whose copy is lost."""
    found = [c for c in copies if c.partition == partition and c.state != "copying" and c.node not in counted]
    return [c.node for c in sorted(found, key=lambda c: (c.node not in leaving, c.state != "lost", c.node))]
