"""Decides on which nodes of a Ray cluster an agent is started or ended, by a holder that is pinned there.

A holder is an actor of Ray that starts the agent of its node. `reconcile` compares what there is with what
there should be: one holder on each node, with the settings of this cluster. `insitu.cluster.nodes.ray_hosts`
performs the returned actions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

RETRY_SECONDS = (2.0, 60.0)
"""The first and the longest pause after a start that failed."""

HolderState = Literal["starting", "joined", "failed", "ended"]
"""How the agent of a holder is. `ended`: it was asked to end, and isn't started again by itself."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Starts of something that failed, one after another."""

    #: How many.
    count: int
    #: When the next attempt is due, on the monotonic clock of who makes it.
    retry_at: float


@dataclass(frozen=True, slots=True)
class StartHolder:
    """Start a holder on a node."""

    #: Ray's id of the node.
    node: str


@dataclass(frozen=True, slots=True)
class EndHolder:
    """End the holder of a node, and its agent with it."""

    #: Ray's id of the node.
    node: str


HolderAction = StartHolder | EndHolder


def record_failure(before: Failure | None, now: float) -> Failure:
    """Return the failures after one more at `now`. Each pause is twice as long as the previous one."""
    count = before.count if before else 0
    first, longest = RETRY_SECONDS
    return Failure(count + 1, now + min(longest, first * 2 ** min(count, 30)))


def reconcile(
    alive: Collection[str],
    holders: Mapping[str, str | None],
    settings: str,
    failures: Mapping[str, Failure],
    now: float,
) -> tuple[HolderAction, ...]:
    """Return the actions after which each node that is alive has one holder, and no other node has one.

    `holders`: what each was given, by the id of its node; None: it hasn't said so yet. `settings` is what
    they should be given. A holder that was given something else ends now, and is started by a later call,
    once it isn't in `holders` any more.
    """
    ended = [node for node, given in holders.items() if node not in alive or given not in (None, settings)]
    due = [node for node in alive if node not in failures or failures[node].retry_at <= now]
    started = [node for node in due if node not in holders]
    return (*map(EndHolder, sorted(ended)), *map(StartHolder, sorted(started)))
