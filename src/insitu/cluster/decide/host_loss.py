"""Decides which hosts of a job are lost: which have vanished, and which are only slow. Pure.

Three signs are taken together. None of them is believed alone:

- The supervisor sends each host a beat every fraction of a second, and the *kernel* of that host acknowledges
  it, however busy or stopped its processes are. Without an acknowledgement a host is suspected soon.
- Then the others try to reach it, too. One that still does vetoes: only the path to the supervisor is cut.
- If most hosts are quiet at once, it is rather this machine that is cut off, or was suspended.

A host that acknowledges and whose server says nothing hangs, which is known much later. The limit follows
the measured round trip, as timeouts of TCP do (RFC 6298). A detector that accrues a suspicion from the spread
of arrivals (Hayashibara et al., 2004) would learn how busy processes are; on that nothing here depends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from insitu.base.spec import NodeId

VANISHED_SECONDS = 1.5
"""Seconds without an acknowledgement after which a host is lost, unless another one still reaches it. The
system sends again after 0.2, 0.6 and 1.4 s: a link that is down for about a second costs that time."""
SILENT_SECONDS = 10.0
"""Seconds without a word of a host's server, which speaks each second, after which the host is lost."""
ROUND_TRIPS = 20
"""Round trips that the limit is at least, on a long path."""
_CLOSE_LOOK = 0.05
"""Seconds between two looks, while a host is suspected that no other one has reached."""
_SUSPECTED_SHARE = 1 / 3
"""Share of the limit after which a host is suspected, and others are asked."""
_LONGEST_LOOK = 0.5
"""Seconds that one look counts for at most: a longer time is one in which this process didn't run."""


@dataclass(frozen=True, slots=True)
class HostSigns:
    """The supervisor's knowledge of one host."""

    #: Seconds for which the host's kernel has acknowledged nothing of what was sent; 0.0: nothing waits.
    unacknowledged: float
    #: Seconds since the last word of its server.
    silent: float
    #: Seconds of a round trip to it.
    round_trip: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The conclusions from one look at all hosts."""

    #: Hosts that others must try to reach now.
    suspected: tuple[NodeId, ...] = ()
    #: Why hosts are lost, as a sentence without its subject.
    lost: Mapping[NodeId, str] = field(default_factory=dict)


class HostWatch:
    """Keeps since when hosts have been suspected. Times are those of its caller's clock, in seconds."""

    def __init__(self, vanished_seconds: float = VANISHED_SECONDS) -> None:
        #: Seconds without an acknowledgement after which a host is lost, on a short path.
        self.limit = vanished_seconds
        #: Seconds for which each suspected host has been seen to be so. Written by `observe`.
        self._suspected: dict[NodeId, float] = {}
        #: Hosts that another one has reached since they have been suspected.
        self._seen: set[NodeId] = set()
        self._looked_at = 0.0
        #: Seconds after the last look in which nothing can change the verdict. Written by `observe`.
        self.next_look = math.inf

    def record_seen(self, node: NodeId) -> None:
        """Another host has reached this one."""
        if node in self._suspected:
            self._seen.add(node)

    def observe(self, signs: Mapping[NodeId, HostSigns], now: float) -> Verdict:
        """Judge the hosts of a job by one look at them."""
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK), now
        limits = {node: max(self.limit, ROUND_TRIPS * sign.round_trip) for node, sign in signs.items()}
        quiet = {n for n, sign in signs.items() if sign.unacknowledged > _SUSPECTED_SHARE * limits[n]}
        self._seen &= quiet
        fresh = quiet - self._suspected.keys()
        self._suspected = {node: self._suspected.get(node, -passed) + passed for node in sorted(quiet)}
        lost = {
            node: f"said nothing for {SILENT_SECONDS:g} s"
            for node, sign in signs.items()
            if sign.silent > SILENT_SECONDS
        }
        if 2 * len(quiet) <= len(signs) and len(signs) > 1:  # else this machine is rather cut off itself
            for node in sorted(quiet - self._seen - lost.keys()):
                long_enough = self._suspected[node] >= (1 - _SUSPECTED_SHARE) * limits[node]
                if long_enough and signs[node].unacknowledged >= limits[node]:
                    lost[node] = (
                        f"acknowledged nothing for {limits[node]:.2g} s, and no other host reaches it"
                    )
        for node in lost:
            self._suspected.pop(node, None)
        self.next_look = self._find_next_look(signs, limits)
        return Verdict(tuple(sorted(fresh - lost.keys())), lost)

    def _find_next_look(self, signs: Mapping[NodeId, HostSigns], limits: Mapping[NodeId, float]) -> float:
        """Return in how many seconds a host can be suspected, or lost."""
        if self._suspected.keys() - self._seen:
            return _CLOSE_LOOK
        waiting = [n for n, sign in signs.items() if sign.unacknowledged > 0 and n not in self._suspected]
        left = (_SUSPECTED_SHARE * limits[n] - signs[n].unacknowledged for n in waiting)
        return min((max(_CLOSE_LOOK, seconds) for seconds in left), default=math.inf)
