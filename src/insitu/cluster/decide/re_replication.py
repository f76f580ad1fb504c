"""Decides when copies of partitions are made again: of nodes that are lost, and of those that leave. Pure.

A node that is offline for a moment costs nothing: its copies count until it has been offline for the grace,
or until somebody says that it leaves, since it won't come back. The copies and their nodes are planned from
the catalogue then (`grid/layout/restoring.py`). `now` is the head's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from insitu.base.spec import NodeId
from insitu.cluster.decide.membership import Membership

RETRY_SECONDS = (10.0, 300.0)
"""The first and the longest pause after a failure."""
LOOK_SECONDS = 5.0
"""Seconds between two looks whether a node that leaves is empty."""


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """The nodes whose copies are made again."""

    #: Nodes that have been offline for longer than the grace.
    lost: tuple[NodeId, ...]
    #: Nodes that are to leave, and are there or lost.
    leaving: tuple[NodeId, ...]
    #: Nodes that are offline and may come back.
    waiting: tuple[NodeId, ...]
    #: Nodes that are there and stay.
    staying: tuple[NodeId, ...]


def find_copy_order(membership: Membership, grace: float | None, now: float) -> CopyOrder | None:
    """Return the order that follows from the states of nodes; None: nothing.

    `grace`: seconds for which lost nodes are waited for; None: without end.
    """
    away = {
        node: member
        for node, member in sorted(membership.members.items())
        if member.state != "alive" or member.connection is None
    }
    leaving = [n for n in membership.leaving if n not in away or membership.members[n].state == "lost"]
    lost = [
        node
        for node, member in away.items()
        if member.state in ("lost", "left") and grace is not None and now - member.heard > grace
        if node not in leaving
    ]
    staying = sorted(membership.members.keys() - away.keys() - set(leaving))
    if not staying or not (lost or leaving):
        return None
    waiting = [node for node in away if node not in lost and node not in leaving]
    return CopyOrder(tuple(lost), tuple(leaving), tuple(waiting), tuple(staying))


def find_departed(order: CopyOrder, membership: Membership) -> tuple[NodeId, ...]:
    """Return the nodes of an order that were there when it began, and whose agents have said since that they
    end. Their data is found by the next order."""
    known = membership.members
    return tuple(
        node
        for node in (*order.leaving, *order.staying)
        if (member := known.get(node)) is not None and member.state == "left"
    )


@dataclass(frozen=True, slots=True)
class CopyOrders:
    """The orders so far."""

    #: The order that was carried out last, with the number of the catalogue's change before it.
    done: tuple[CopyOrder, int] | None = None
    #: The order that is being carried out, in the same way.
    running: tuple[CopyOrder, int] | None = None
    #: How often in a row it has failed.
    failures: int = 0
    #: When the next one may begin.
    next_at: float = 0.0

    def begin(self, order: CopyOrder | None, change: int, now: float, *, unfinished: bool) -> CopyOrders:
        """Return these orders with `order` running, if it can begin now.

        `change`: a number that grows with each change of the catalogue. `unfinished`: a node that leaves
        isn't empty yet.
        """
        if order is None or self.running is not None or now < self.next_at:
            return self
        if self.done == (order, change) and not unfinished:
            return self
        return replace(self, running=(order, change))

    def end(self, now: float, *, failed: bool, outdated: bool = False) -> CopyOrders:
        """Return these orders after the one that was running has ended. Failures of an order that is
        `outdated` say nothing: a node of it has left."""
        if failed and outdated:
            return CopyOrders(next_at=now + LOOK_SECONDS)
        if not failed:
            return CopyOrders(done=self.running, next_at=now + LOOK_SECONDS)
        first, longest = RETRY_SECONDS
        pause = min(longest, first * 2.0**self.failures)
        return CopyOrders(done=None, failures=self.failures + 1, next_at=now + pause)
