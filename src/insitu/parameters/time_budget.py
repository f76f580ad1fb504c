"""Pure: how much of a thread's time goes to work that anybody can cause."""

from __future__ import annotations


class TimeBudget:
    """Seconds that may be spent: a share of all time, and some at once after a quiet time."""

    def __init__(self, share: float, most: float, now: float) -> None:
        """`most`: seconds at once, which are there at the start."""
        self._share = share
        self._most = most
        #: Seconds that may be spent at the time `_at`; below 0 after too much was.
        self._left = most
        self._at = now

    def spend(self, seconds: float, now: float) -> float:
        """Note that `seconds` were spent until `now`. Return for how many seconds nothing may be, from now
        on."""
        self._left = min(self._most, self._left + self._share * (now - self._at)) - seconds
        self._at = now
        return max(0.0, -self._left / self._share)
