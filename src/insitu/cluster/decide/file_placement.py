"""Which nodes hold the blocks of files, and which copies are missing.

Every process computes the same from the same list of nodes, so nobody keeps an account of places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from insitu.base.spec import NodeId


def rank_nodes(key: str, nodes: Iterable[NodeId]) -> list[NodeId]:
    """Return the nodes in the order in which they hold `key` (rendezvous hashing).

    A node that comes or goes changes nothing about the order of the others.
    """

    def weigh(node: NodeId) -> bytes:
        return hashlib.blake2b(f"{key}\0{node}".encode(), digest_size=16).digest()

    return sorted(nodes, key=lambda node: (weigh(node), node), reverse=True)


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """The actions that bring the copies of blocks to the number that is asked for."""

    #: (key, nodes that have it, nodes that get it).
    copies: tuple[tuple[str, tuple[NodeId, ...], tuple[NodeId, ...]], ...]
    #: (key, node) of copies beyond that number.
    surplus: tuple[tuple[str, NodeId], ...]
    #: Blocks that no node has.
    lost: tuple[str, ...]


def plan_repair(
    wanted: Mapping[str, int], held: Mapping[NodeId, Collection[str]], nodes: Sequence[NodeId]
) -> RepairPlan:
    """Plan the actions of `nodes`, which are all alive, for blocks, with the copies that each must have.

    `held` has the blocks of each node. No node gets a copy while enough others have one.
    """
    copies, surplus, lost = [], [], []
    for key, count in wanted.items():
        order = rank_nodes(key, nodes)
        having = [node for node in order if key in held.get(node, ())]
        missing = min(count, len(order)) - len(having)
        if not having:
            lost.append(key)
        elif missing > 0:
            targets = [node for node in order if node not in having][:missing]
            copies.append((key, tuple(having), tuple(targets)))
        surplus += [(key, node) for node in having[count:]]
    return RepairPlan(tuple(copies), tuple(surplus), tuple(lost))
