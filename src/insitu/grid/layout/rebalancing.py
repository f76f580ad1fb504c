"""Pure: decides the nodes of copies of partitions, such that the fewest bytes move.

Each partition gets the copies that are wanted, each on a node of its own, and the numbers of copies of the
nodes differ by one at most. Among all such placements one that moves the fewest bytes is chosen, and among
those one with the fewest copies moved.

This is a flow of least cost: each copy is sent from its partition to a node. It costs nothing if the node has
the partition already, else its bytes. Copies are sent one after another along a cheapest path, which may push
others from node to node. That keeps the flow cheapest after each (successive shortest paths). The same input
gives the same plan.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insitu.base.errors import InputError
from insitu.base.spec import NodeId, PlacedCopy
from insitu.base.wording import format_count


@dataclass(frozen=True, slots=True)
class Move:
    """One copy that is made."""

    #: The partition's number.
    partition: int
    #: The node that the bytes come from; it has a live copy.
    source: NodeId
    #: The node that gets the copy.
    target: NodeId
    #: The node whose copy the new one replaces; None: it is one copy more.
    replaced: NodeId | None
    #: The size of the partition.
    bytes: int


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """The actions that lead from one placement to another."""

    #: The copies to make, by partition and target.
    moves: tuple[Move, ...]
    #: (partition, node) of copies that are dropped without being replaced.
    drops: tuple[tuple[int, NodeId], ...]
    #: The nodes of each partition afterwards, the primary owner first.
    owners: Mapping[int, tuple[NodeId, ...]]
    #: Partitions of which no copy is live: nothing can be done for them.
    unavailable: tuple[int, ...]
    #: Partitions that get another primary owner.
    promoted: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that move."""
        return sum(move.bytes for move in self.moves)


def plan_rebalancing(
    copies: Sequence[PlacedCopy],
    sizes: Mapping[int, int],
    nodes: Sequence[NodeId],
    backups: int,
    leaving: Sequence[NodeId] = (),
) -> RebalancePlan:
    """Return how `copies` get onto `nodes`, with `backups` further copies of each partition.

    `sizes` are the bytes of each partition, `nodes` all nodes that are there. Those in `leaving` get nothing
    and keep nothing, but their copies may be read. Each node counts as a host of its own. Raises InputError
    if there are too few nodes.
    """
    staying = sorted(set(nodes) - set(leaving))
    if not 0 <= backups < len(staying):
        raise InputError(
            f"Each copy of a partition is on a node of its own, so there must be more nodes that stay than "
            f"backups. Received: {format_count(len(staying), 'node')} for "
            f"{format_count(backups, 'backup')}. Add nodes, or import with "
            f"fewer backups"
        )
    present = set(nodes)
    readable: dict[int, list[NodeId]] = {partition: [] for partition in sorted(sizes)}
    for copy in copies:
        if copy.state == "live" and copy.node in present:
            readable[copy.partition].append(copy.node)
    unavailable = tuple(partition for partition, holders in readable.items() if not holders)
    wanted = {p: holders for p, holders in readable.items() if holders}
    kept = {p: [node for node in holders if node in staying] for p, holders in wanted.items()}
    placed = _Flow(kept, sizes, staying, backups + 1).send_all()
    primaries = _Primaries(placed, readable, staying).level()
    owners = {p: _order_owners(placed[p], primaries[p], readable[p]) for p in placed}
    promoted = tuple(p for p in sorted(owners) if owners[p][0] != readable[p][0])
    return RebalancePlan(
        _pair_moves(copies, readable, owners, sizes),
        _find_drops(copies, owners),
        owners,
        unavailable,
        promoted,
    )


class _Flow:
    """Copies on nodes, sent one after another."""

    def __init__(
        self,
        kept: Mapping[int, Sequence[NodeId]],
        sizes: Mapping[int, int],
        nodes: Sequence[NodeId],
        count: int,
    ) -> None:
        total = count * len(kept)
        self._nodes = nodes
        self._count = count
        #: The nodes that have each partition already.
        self._there = {partition: set(holders) for partition, holders in kept.items()}
        #: A copy costs its bytes first, and then one for its number.
        self._price = {partition: sizes[partition] * (total + 1) + 1 for partition in kept}
        #: Copies that each node has at least, and at most.
        self._low, self._high = total // len(nodes), -(-total // len(nodes))
        #: More than all copies cost: filling a node up to `_low` comes before everything.
        self._reward = sum(self._price.values()) * count + 1
        #: The nodes chosen for each partition so far, and how many copies each node has. `_put` and `_take`
        #: write them.
        self.placed: dict[int, set[NodeId]] = {partition: set() for partition in kept}
        self._load = dict.fromkeys(nodes, 0)
        #: For each two nodes, a heap of (cost, partition) of copies that could go from one to the other.
        #: Entries that no longer hold are skipped when they are read.
        self._pushes: dict[tuple[NodeId, NodeId], list[tuple[int, int]]] = {
            (node, other): [] for node in nodes for other in nodes
        }

    def send_all(self) -> dict[int, set[NodeId]]:
        """Return the nodes of each partition when all copies are placed."""
        for partition in sorted(self.placed):
            # Partitions that stay cost nothing: no path is cheaper while the node has room below the least.
            for node in sorted(self._there[partition]):
                if len(self.placed[partition]) < self._count and self._load[node] < self._low:
                    self._put(partition, node)
        for partition in sorted(self.placed):
            while len(self.placed[partition]) < self._count:
                self._send(partition)
        return self.placed

    def _put(self, partition: int, node: NodeId) -> None:
        self.placed[partition].add(node)
        self._load[node] += 1
        for other in self._nodes:
            if other not in self.placed[partition]:
                self._offer(partition, node, other)

    def _take(self, partition: int, node: NodeId) -> None:
        self.placed[partition].remove(node)
        self._load[node] -= 1
        for holder in self.placed[partition]:
            self._offer(partition, holder, node)

    def _offer(self, partition: int, node: NodeId, other: NodeId) -> None:
        cost = self._cost(partition, other) - self._cost(partition, node)
        heapq.heappush(self._pushes[node, other], (cost, partition))

    def _find_push(self, node: NodeId, other: NodeId) -> tuple[int, int] | None:
        """Return the cheapest copy of `node` that can go to `other`: (cost, its partition)."""
        heap = self._pushes[node, other]
        while heap:
            nodes = self.placed[heap[0][1]]
            if node in nodes and other not in nodes:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _cost(self, partition: int, node: NodeId) -> int:
        return 0 if node in self._there[partition] else self._price[partition]

    def _send(self, partition: int) -> None:
        """Place one copy more, along a cheapest path."""
        distance = {n: self._cost(partition, n) for n in self._nodes if n not in self.placed[partition]}
        before: dict[NodeId, tuple[NodeId, int]] = {}
        waiting = deque(sorted(distance, key=lambda node: (distance[node], node)))
        queued = set(waiting)
        while waiting:
            node = waiting.popleft()
            queued.discard(node)
            for other in self._nodes:
                push = self._find_push(node, other)
                if push is None:
                    continue
                cost, pushed = push
                if other not in distance or distance[node] + cost < distance[other]:
                    distance[other] = distance[node] + cost
                    before[other] = (node, pushed)
                    if other not in queued:
                        waiting.append(other)
                        queued.add(other)
        free = [node for node in distance if self._load[node] < self._high]
        end = min(free, key=lambda node: (distance[node] - self._reward_of(node), node))
        while end in before:
            node, pushed = before[end]
            self._take(pushed, node)
            self._put(pushed, end)
            end = node
        self._put(partition, end)

    def _reward_of(self, node: NodeId) -> int:
        return self._reward if self._load[node] < self._low else 0


class _Primaries:
    """The primary owner of each partition: today's if it stays, unless others would have fewer.

    Their numbers differ as little as the copies allow: no chain of changes takes one from a node that has at
    least two more than the node at the chain's end. If there is no such chain, nothing is better (Harvey,
    Ladner, Lovász, Tamir: Semi-matchings for bipartite graphs and load balancing, 2006).
    """

    def __init__(
        self,
        placed: Mapping[int, set[NodeId]],
        readable: Mapping[int, Sequence[NodeId]],
        nodes: Sequence[NodeId],
    ) -> None:
        self._placed = placed
        #: The partitions of which each node is the primary owner, in order.
        self._owned: dict[NodeId, list[int]] = {node: [] for node in nodes}
        self.chosen: dict[int, NodeId] = {}
        for partition in sorted(placed, key=lambda p: (readable[p][0] not in placed[p], p)):
            node = readable[partition][0]
            if node not in placed[partition]:
                node = min(sorted(placed[partition]), key=lambda each: len(self._owned[each]))
            self._give(partition, node)

    def level(self) -> dict[int, NodeId]:
        """Return the primary owners, once no other choice has more equal numbers."""
        while any(self._relieve(node) for node in sorted(self._owned, key=lambda n: -len(self._owned[n]))):
            pass
        return self.chosen

    def _give(self, partition: int, node: NodeId) -> None:
        if partition in self.chosen:
            self._owned[self.chosen[partition]].remove(partition)
        self.chosen[partition] = node
        bisect.insort(self._owned[node], partition)

    def _relieve(self, node: NodeId) -> bool:
        """Take a partition from `node`, by the shortest chain that ends at a node with at least two fewer.

        Returns whether there is such a chain.
        """
        #: The partition that each node reached takes over, from the node before it in the chain.
        takes: dict[NodeId, int] = {}
        waiting = deque([node])
        while waiting:
            for partition in self._owned[waiting.popleft()]:
                for taker in sorted(self._placed[partition] - takes.keys() - {node}):
                    takes[taker] = partition
                    if len(self._owned[taker]) + 2 <= len(self._owned[node]):
                        self._follow(takes, taker, node)
                        return True
                    waiting.append(taker)
        return False

    def _follow(self, takes: Mapping[NodeId, int], taker: NodeId, first: NodeId) -> None:
        while taker != first:
            giver = self.chosen[takes[taker]]
            self._give(takes[taker], taker)
            taker = giver


def _order_owners(placed: set[NodeId], primary: NodeId, readable: Sequence[NodeId]) -> tuple[NodeId, ...]:
    """Return the owners: the primary one, then backups that stay in their order, then new ones by name."""
    order = {node: place for place, node in enumerate(readable)}
    backups = sorted(placed - {primary}, key=lambda node: (order.get(node, len(order)), node))
    return (primary, *backups)


def _pair_moves(
    copies: Sequence[PlacedCopy],
    readable: Mapping[int, Sequence[NodeId]],
    owners: Mapping[int, tuple[NodeId, ...]],
    sizes: Mapping[int, int],
) -> tuple[Move, ...]:
    sent: dict[NodeId, int] = {}
    moves = []
    for partition, nodes in sorted(owners.items()):
        removed = deque(_removed(copies, partition, nodes))
        for target in sorted(set(nodes) - set(readable[partition])):
            source = min(readable[partition], key=lambda node: (sent.get(node, 0), node))
            sent[source] = sent.get(source, 0) + sizes[partition]
            replaced = removed.popleft() if removed else None
            moves.append(Move(partition, source, target, replaced, sizes[partition]))
    return tuple(moves)


def _find_drops(
    copies: Sequence[PlacedCopy], owners: Mapping[int, tuple[NodeId, ...]]
) -> tuple[tuple[int, NodeId], ...]:
    drops = []
    for partition, nodes in sorted(owners.items()):
        live = {c.node for c in copies if c.partition == partition and c.state == "live"}
        arriving = len(set(nodes) - live)
        drops += [(partition, node) for node in _removed(copies, partition, nodes)[arriving:]]
    return tuple(drops)


def _removed(copies: Sequence[PlacedCopy], partition: int, owners: Sequence[NodeId]) -> list[NodeId]:
    """Return the nodes whose copy of a partition, live or lost, isn't wanted any more; lost ones first."""
    removed = [
        copy
        for copy in copies
        if copy.partition == partition and copy.state != "copying" and copy.node not in owners
    ]
    return [copy.node for copy in sorted(removed, key=lambda copy: (copy.state != "lost", copy.node))]
