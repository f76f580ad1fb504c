"""Decides which nodes are drained because Ray is about to withdraw their machines. Pure.

Ray says so by a node's id, with a deadline: the provider of a spot machine wants it back, or an autoscaler
has chosen it. A machine that comes back has another id in Ray, and the same store: its node stays then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from insitu.base.spec import NodeId

NO_DEADLINE_SECONDS = 600.0
"""Seconds that a node has if Ray names no deadline."""
_SAME_SECONDS = 1.0
"""Deadlines that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Have a node leave."""

    #: The node.
    node: NodeId
    #: Deadline by which it must have left, in seconds since 1970.
    until: float


@dataclass(frozen=True, slots=True)
class KeepNode:
    """Let a node stay that was to leave: its machine is there again."""

    #: The node.
    node: NodeId


DrainAction = DrainNode | KeepNode


def plan_drains(
    draining: Mapping[str, float | None],
    joined: Mapping[str, NodeId],
    asked: Mapping[NodeId, float],
    wall: float,
) -> tuple[DrainAction, ...]:
    """Return the requests to the head.

    `draining`: Ray's id of each node that it withdraws -> its deadline in seconds since 1970; None: it names
    none. `joined`: Ray's id of a node -> the node of its agent. `asked`: the nodes that were drained by an
    earlier call, with the deadlines of that time. `wall`: seconds since 1970.
    """
    actions: list[DrainAction] = []
    for ray_id, node in sorted(joined.items()):
        if ray_id in draining:
            deadline = draining[ray_id]
            known = asked.get(node)
            until = wall + NO_DEADLINE_SECONDS if deadline is None else deadline
            if known is None or (deadline is not None and until < known - _SAME_SECONDS):
                actions.append(DrainNode(node, until))
        elif node in asked and not any(joined.get(other) == node for other in draining):
            actions.append(KeepNode(node))
    return tuple(actions)
