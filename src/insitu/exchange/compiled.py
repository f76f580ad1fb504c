"""Reductions of which compiled code does everything, as long as all goes well."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from insitu.exchange import native
from insitu.exchange.arithmetic import Factors
from insitu.exchange.shm_barrier import ShmBarrier

_BRIEF_BYTES = 256 * 1024
"""Rows up to this size are reduced without letting other threads run."""


class CompiledSmall:
    """A RunReduction through the slots, in one call. Where somebody is late, `meet` goes on with the meeting from what
    the call came back with, and `reduce` sums the slots of even or odd meetings."""

    def __init__(
        self,
        kernels: native.Kernels,
        prepared: native.PreparedCall,
        meeting: ShmBarrier,
        book: Callable[[], None],
        meet: Callable[[int], None],
        reduce: Callable[[int], None],
    ) -> None:
        self._call, self._address, self._prepared = kernels.small, prepared.address, prepared
        self._meeting, self._book, self._meet, self._reduce = meeting, book, meet, reduce

    def __call__(self, weights: Sequence[float] | None) -> bool:
        meeting = self._meeting
        tick = meeting.tick = meeting.tick + 1
        state = self._call(self._address, tick)
        if state:
            self._meet(state)
            self._reduce(tick & 1)
        else:
            self._book()
        return True


class CompiledPart:
    """A RunReduction for rows in shared memory. `weigh` gives all shards' factors, `end` is told how it ended,
    `came_last` is called after a meeting in compiled code."""

    def __init__(
        self,
        kernels: native.Kernels,
        prepared: native.PreparedCall,
        row_bytes: int,
        meeting: ShmBarrier,
        weigh: Callable[[Sequence[float] | None], Factors | None],
        end: Callable[[int, Factors | None], None],
        came_last: Callable[[], None],
    ) -> None:
        brief = row_bytes <= _BRIEF_BYTES
        self._part = kernels.part if brief else kernels.long_part
        self._whole = kernels.whole if brief else kernels.long_whole
        self._prepared = prepared
        self._meeting = meeting
        self._weigh, self._end, self._came_last = weigh, end, came_last

    def __call__(self, weights: Sequence[float] | None) -> bool:
        """After a meeting."""
        factors = self._weigh(weights)
        if weights is not None and factors is None:
            return False
        self._end(self._part(self._prepared.address, self._meeting.tick), factors)
        return True

    def whole(self, go_on: Callable[[Sequence[float] | None, int], bool], weights: None) -> bool:
        """With that meeting; `go_on` where compiled code doesn't get beyond it."""
        meeting = self._meeting
        tick = meeting.tick = meeting.tick + 1
        state = self._whole(self._prepared.address, tick)
        if state & ~(native.GIVEN_UP | native.AFTERWARDS) and not state & native.AFTERWARDS:
            return go_on(weights, state)
        self._came_last()
        self._end(state, None)
        return True
