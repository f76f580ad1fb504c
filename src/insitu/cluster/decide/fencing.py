"""Decides whom agents and the servers of a job's hosts obey, and when another head may take over. Pure.

Each head, and each supervisor of a job, comes with a *claim*: a number that grows, and who has drawn it. Who
obeys keeps the highest claim that it has seen, on its disk, and refuses what is lower. Two claims with the
same number are of two that didn't know of each other: the one that came first is obeyed.

A head takes over with a number that the head before can't reach by starting again, and only where most
agents of the cluster have promised it: so two can't do so with the same number. An agent that is led
promises nothing, since the head before lives. It is the first half of Paxos (Lamport, 1998). That the head
before is lost is decided by a person, or by the time since (`taking_over.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from insitu.spec import NodeId

EPOCHS_OF_A_TERM = 1 << 20
"""Epochs that one machine's heads have: each start takes one. Another machine begins the next term."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a head, or a job's supervisor, is obeyed by."""

    #: Grows with each change of who leads.
    number: int = 0
    #: Drawn by the claimant; it tells two with the same number from each other.
    instance: str = ""


@dataclass(frozen=True, slots=True)
class AgentView:
    """What an agent says before another head takes over."""

    #: The highest epoch of a head that it has seen.
    epoch: int
    #: True: it has a connection to a head.
    is_led: bool
    #: Seconds since it has lost its head, or has promised to obey another one.
    without_head: float = 0.0


def may_obey(seen: Claim | None, asked: Claim) -> bool:
    """Return whether `asked` is obeyed by who has seen the claim `seen`; None: none yet."""
    return seen is None or asked == seen or asked.number > seen.number


def choose_next_epoch(highest: int) -> int:
    """Return the first epoch of the next term: no head of the terms before reaches it by starting again."""
    return (highest // EPOCHS_OF_A_TERM + 1) * EPOCHS_OF_A_TERM


def find_obstacle_to_taking_over(known: Collection[NodeId], views: Mapping[NodeId, AgentView]) -> str:
    """Return why no other head may take over now; "" where it may.

    `known` are the agents of the cluster, `views` what those have said that can be reached.
    """
    led = sorted(node for node, view in views.items() if view.is_led)
    if led:
        return (
            f"{', '.join(led)} is led by the head, which lives. End it by `insitu down` on its machine, or "
            f"where that is cut off, wait until its agents have lost it"
        )
    return find_missing_majority(known, views)


def find_missing_majority(known: Collection[NodeId], found: Collection[NodeId]) -> str:
    """Return why so many of the known agents are too few; "" where they are most of them."""
    missing = sorted(set(known) - set(found))
    if 2 * len(set(known) & set(found)) > len(known):
        return ""
    return (
        f"{len(known) - len(missing)} of {len(known)} agents; {', '.join(missing)} can't be reached, or obey "
        f"another head. Bring them up, or join them to this network again. If they are lost for good, start "
        f"a new cluster of what is left: `insitu up --hosts` in another INSITU_HOME, then `insitu repair`"
    )
