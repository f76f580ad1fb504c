"""What one reduction sends to whom, what it receives where, and what it adds up when: made once for an array
and performed many times, by `rounds.ScheduleRunner`.

Members must agree on the order of what goes between two of them; when each part of it goes is each one's own
affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Transfer:
    """Contiguous memory, not empty, that is sent or received as soon as `gate` steps are done."""

    data: np.ndarray
    gate: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """Adds up `rows` (one piece of every shard's, in shard order) to `out`, once so many segments as `needs`
    says have come from each peer; the header, which precedes those of the schedule, counts."""

    rows: Sequence[np.ndarray]
    out: np.ndarray
    needs: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Schedule:
    """`out` and `into` by peer, in the order of the bytes. `greeting`: by peer, after how many segments (the
    header counts) it has said what it has to say before its rows. `steps` are done one after the other.

    `in_place`: a step writes to what is sent, so it waits until all of that is gone. `answers`: nothing is
    sent before the first step, so the header may wait for it. `deliver`: what is copied at the end, where the
    result isn't put together where it is wanted, and where that goes; of equal size and dtype.
    """

    out: Mapping[int, Sequence[Transfer]]
    into: Mapping[int, Sequence[Transfer]]
    greeting: Mapping[int, int]
    steps: Sequence[ScheduleStep] = ()
    in_place: bool = False
    answers: bool = False
    deliver: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def peers(self) -> list[int]:
        return list(self.out)
