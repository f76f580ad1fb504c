"""Decides when an agent's node takes over from a head that is lost, without a person. Pure.

All nodes follow the same rule, each by its own monotonic clock `now`, in seconds. A node tries only where
most agents of the cluster answer it and have been without a head for the time that was set. They try in the
order of their names, `STAGGER_SECONDS` apart, so that the first one that can is usually the only one. That no
two of them lead is decided by promises, see `fencing.py`; the order only spares attempts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from insitu.cluster.decide.fencing import AgentView, find_missing_majority, find_obstacle_to_taking_over
from insitu.cluster.decide.membership import LOST_SECONDS
from insitu.spec import NodeId

LEAST_SECONDS = 2 * LOST_SECONDS
"""The shortest time without a head after which a node may take over: agents notice within half of it that it
has lost its power."""
STAGGER_SECONDS = 10.0
"""Seconds between the attempts of two nodes: longer than one takes."""
PAUSE_SECONDS = (5.0, 60.0)
"""The first and the longest pause after a look at the other agents that found an obstacle, or an attempt that
failed."""
MOST_ATTEMPTS = 5
"""Attempts of a node that may fail before it leaves the rest to the others and to people."""


@dataclass(frozen=True, slots=True)
class Vacancy:
    """What a node knows of the loss of its head."""

    #: Seconds without a head after which a node takes over; None: never.
    after: float | None
    #: When the head was lost; None: there is one.
    lost_at: float | None = None
    #: When the node looks at the other agents next.
    look_at: float = 0.0
    #: Looks and attempts in a row that came to nothing.
    failures: int = 0
    #: Attempts that failed.
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a node does after a look at the other agents."""

    #: Why it can't take over; "": it can.
    obstacle: str = ""
    #: Seconds for which it leaves the attempt to those before it; 0: it tries now.
    wait: float = 0.0


def lose_head(vacancy: Vacancy, now: float) -> Vacancy:
    """Return the state of a node that has lost its head, or has promised now to obey another one."""
    return Vacancy(vacancy.after, now, now + (vacancy.after or 0.0), attempts=vacancy.attempts)


def find_head(vacancy: Vacancy) -> Vacancy:
    """Return the state of a node that has a head."""
    return Vacancy(vacancy.after)


def set_time(vacancy: Vacancy, after: float | None) -> Vacancy:
    """Return the state with another time after which a node takes over."""
    lost_at = vacancy.lost_at
    return replace(vacancy, after=after, look_at=0.0 if lost_at is None else lost_at + (after or 0.0))


def is_due(vacancy: Vacancy, now: float) -> bool:
    """Return whether the node is to look at the other agents now."""
    return (
        vacancy.after is not None
        and vacancy.lost_at is not None
        and vacancy.attempts < MOST_ATTEMPTS
        and now >= vacancy.look_at
    )


def judge(
    known: Collection[NodeId], views: Mapping[NodeId, AgentView], own: NodeId, after: float, overdue: float
) -> Verdict:
    """Return whether `own` takes over now.

    `known` are the agents of the cluster, `views` what those say that answer, `after` the time without a head
    that was set, and `overdue` the seconds that `own` has been without one beyond it.
    """
    if why := find_obstacle_to_taking_over(known, views):
        return Verdict(why)
    without = [node for node, view in views.items() if view.without_head >= after]
    if why := find_missing_majority(known, without):
        return Verdict(f"Most agents must have been without a head for {after:g} s. Received: {why}")
    if own not in without:
        return Verdict(f"{own} has had a head within the last {after:g} s")
    place = sorted(without).index(own)
    return Verdict(wait=max(0.0, place * STAGGER_SECONDS - overdue))


def note_verdict(vacancy: Vacancy, verdict: Verdict, now: float) -> Vacancy:
    """Return the state after a look that didn't lead to an attempt."""
    if verdict.obstacle:
        return _pause(vacancy, now)
    return replace(vacancy, look_at=now + verdict.wait)


def note_failure(vacancy: Vacancy, now: float) -> Vacancy:
    """Return the state after an attempt that failed."""
    return replace(_pause(vacancy, now), attempts=vacancy.attempts + 1)


def _pause(vacancy: Vacancy, now: float) -> Vacancy:
    first, longest = PAUSE_SECONDS
    pause = min(longest, first * 2.0 ** min(vacancy.failures, 16))
    return replace(vacancy, failures=vacancy.failures + 1, look_at=now + pause)


def find_last_majority(known: int, heard: Collection[float]) -> float | None:
    """Return the last time at which most of `known` agents had been heard since; None: never.

    `heard` are the times of the last word of each that was heard.
    """
    needed = known // 2 + 1
    return sorted(heard, reverse=True)[needed - 1] if len(heard) >= needed else None
