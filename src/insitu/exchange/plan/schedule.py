"""The schedule of one reduction over TCP: the sends, the receives and the sums.

A schedule is made once for an array and run many times, by `schedule_runner.ScheduleRunner`. Two members must
agree on the order of the bytes between them. When each part of them is sent is up to each member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Transfer:
    """Memory that is sent or received."""

    #: Contiguous and not empty.
    data: np.ndarray
    #: The number of steps that must be done before the transfer begins.
    gate: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """One sum."""

    #: The rows to sum: one piece of every shard's, in shard order.
    rows: Sequence[np.ndarray]
    #: Destination of the sum.
    out: np.ndarray
    #: By peer: the number of transfers from it that must be complete first. The header, which precedes those
    #: of the schedule, counts.
    needs: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One reduction. Its steps are done one after the other."""

    #: By peer: the transfers to it, in the order of the bytes.
    sends: Mapping[int, Sequence[Transfer]]
    #: By peer: the transfers from it, in the order of the bytes.
    receives: Mapping[int, Sequence[Transfer]]
    #: By peer: the number of transfers from it that precede its rows: the header, and the weights if any.
    preamble: Mapping[int, int]
    #: The sums, in the order in which they are done.
    steps: Sequence[ScheduleStep] = ()
    #: True if a step overwrites rows that are sent: it waits until all of them are sent.
    in_place: bool = False
    #: True if nothing is sent before the first step: then the header is sent together with its result.
    delay_header: bool = False
    #: (source, target) of a copy at the end, if the result is computed elsewhere; of equal size and dtype.
    copy_at_end: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def peers(self) -> list[int]:
        """The members that this one exchanges bytes with."""
        return list(self.sends)
