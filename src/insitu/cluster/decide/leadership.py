"""Decides who is head if etcd holds the metadata: when a head stops, and how an agent acts. Pure.

The head holds a key of etcd by a lease, which it keeps. If it hasn't kept it for as long as the lease lasts,
the key may be gone and another head may lead: it changes nothing from then on, until etcd has answered. An
agent follows the head that the key names, and if there is no such key, it tries to win it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

HEAD_LEASE_SECONDS = 5.0
"""After how long without a word of a head its key goes. A head that is replaced too early costs no task, so
this is shorter than the lease of a supervisor."""
KEEP_SECONDS = 1.0
"""How often heads and supervisors keep their leases."""
_AGAIN_SECONDS = 10.0
"""How long an agent that couldn't start a head leaves it to others."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A head's knowledge of its lease."""

    #: When it asked for what has kept the lease last, on a clock that runs while the machine is suspended.
    kept_at: float
    #: Whether it has said that etcd doesn't answer.
    is_silent: bool = False

    def may_lead(self, now: float) -> bool:
        """Return whether no other head can have the key at this time."""
        return now < self.kept_at + HEAD_LEASE_SECONDS


@dataclass(frozen=True, slots=True)
class Kept:
    """etcd has kept the lease."""

    #: When it was asked to.
    asked_at: float


@dataclass(frozen=True, slots=True)
class Unanswered:
    """etcd gave no answer."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease has ended, or another head has the key."""


HoldAction = Literal["say_silent", "say_heard", "stop"]


def advance_hold(hold: Hold, event: Kept | Unanswered | Lost, now: float) -> tuple[Hold, HoldAction | None]:
    """Return what a head knows now, and what it does."""
    match event:
        case Lost():
            return hold, "stop"
        case Kept(asked_at):
            return Hold(asked_at), "say_heard" if hold.is_silent else None
        case Unanswered() if not hold.is_silent and not hold.may_lead(now):
            return replace(hold, is_silent=True), "say_silent"
    return hold, None


@dataclass(frozen=True, slots=True)
class Candidacy:
    """An agent's knowledge of heads."""

    #: The highest epoch of a head that it follows.
    epoch: int
    #: Whether a head can run in its home.
    may_lead: bool
    #: When it may try to win the key, on the clock that gives `now`.
    again_at: float = 0.0

    def fail(self, now: float) -> Candidacy:
        """Return what it knows after a head couldn't be started here."""
        return replace(self, again_at=now + _AGAIN_SECONDS)


@dataclass(frozen=True, slots=True)
class SeenKey:
    """The key of the head, as an agent sees it."""

    #: The epoch that its holder has won.
    epoch: int
    #: The address on which that listens; empty: it is being started.
    address: str
    #: True: nobody may be head until a person says so.
    is_down: bool = False


def choose_as_agent(
    candidacy: Candidacy, key: SeenKey | None, now: float
) -> Literal["wait", "follow", "win"]:
    """Return what an agent does that sees this key; None: there is none."""
    if key is None:
        return "win" if candidacy.may_lead and now >= candidacy.again_at else "wait"
    if key.is_down or not key.address or key.epoch <= candidacy.epoch:
        return "wait"
    return "follow"
