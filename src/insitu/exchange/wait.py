"""How members of one host wait for each other: words in shared memory, and sleeping where it takes long.

Each member publishes one 64-bit word per meeting: the meeting's number and a signature of what the member
came for. A waiting member looks at the others' words for some microseconds, then yields the processor, then
sleeps on a futex, waking now and then to see whether somebody died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from insitu.exchange.memory import Segment, futex_wait, futex_wake, yield_processor
from insitu.exchange.transport import Gone

SIGNATURE_BITS = 24
SIGNATURE_MASK = (1 << SIGNATURE_BITS) - 1

LINE = 64
"""Bytes of a cache line: what one member writes never shares one with what another writes."""
_WORDS = LINE // 8
_LEFT, _LOST, _BELL = 2, 3, 8
"""Words of a member, beside its two arrival words (of even and of odd meetings): whether it has left; 1 +
the rank that it has found lost; the word it sleeps on, on a line of its own."""
_PER_MEMBER = 2 * _WORDS

_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.0005, 0.04
"""Seconds. The longest bounds how late a death is noticed; the shortest how much a missed bell costs."""


class Disagreement(Exception):
    """Internal: members came to one meeting for different things."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How often to look again before yielding, and to yield before sleeping."""

    spins: int
    yields: int


def patience(members: int, processors: int, same_process: bool) -> Patience:
    """Spinning pays where the awaited member runs on another processor at this moment, and only there."""
    if same_process:
        return Patience(0, 2)
    if members <= processors:
        return Patience(300, 50)
    return Patience(0, 2 * members)


def meeting_bytes(members: int) -> int:
    """Bytes of shared memory that a Meeting of so many members needs."""
    return _PER_MEMBER * 8 * members + -(-members // LINE) * LINE


class Meeting:
    """The place where members of one host meet. Not for several threads of one member."""

    def __init__(
        self,
        segment: Segment,
        offset: int,
        member: int,
        members: int,
        patience: Patience,
        dead: Callable[[], Sequence[int]],
        stall_timeout: float,
    ) -> None:
        self._segment = segment
        data = memoryview(segment.array())[offset : offset + meeting_bytes(members)]  # type: ignore[arg-type]
        self._words = data.cast("Q")
        self._bells = data.cast("I")
        self._sleeping = data[_PER_MEMBER * 8 * members :]
        self._nobody = bytes(members)
        self._asleep = self._sleeping[:members]
        self._address = segment.address + offset
        self._member = member
        self._members = members
        self._patience = patience
        self._dead = dead
        self._stall_timeout = stall_timeout
        self._own = tuple(member * _PER_MEMBER + parity for parity in (0, 1))
        self._others = tuple(
            tuple(m * _PER_MEMBER + parity for m in range(members) if m != member) for parity in (0, 1)
        )
        self.tick = 0
        """Number of the last meeting that this member came to; the first is 1."""
        self.waited = 0.0
        """Seconds spent waiting in the last meeting."""
        self.last = member
        """Who came last to the last meeting."""

    def meet(self, signature: int) -> None:
        """Returns once all members came to this meeting with the same `signature` (24 bits). What a member
        wrote to shared memory before is seen by all after. Raises Gone, Disagreement."""
        tick = self.tick = self.tick + 1
        parity = tick & 1
        word = tick << SIGNATURE_BITS | signature
        words = self._words
        words[self._own[parity]] = word
        for index in self._others[parity]:
            if words[index] != word:
                self._wait(tick, word)
                break
        else:
            self.waited = 0.0
            self.last = self._member
        if self._asleep != self._nobody:
            self._wake()

    def _wait(self, tick: int, word: int) -> None:
        start = time.monotonic()
        missing = list(self._others[tick & 1])
        words = self._words
        looks = 0
        spins, yields = self._patience.spins, self._patience.yields + self._patience.spins
        pause = _SHORTEST_SLEEP
        while True:
            late = [index for index in missing if words[index] != word]
            if not late:
                break
            missing = late
            looks += 1
            if looks <= spins:
                continue
            self._check_words(missing, tick, word)
            if looks <= yields:
                yield_processor()
                continue
            self._sleep(missing, word, pause)
            pause = min(2 * pause, _LONGEST_SLEEP)
            self._check_lives(missing, word, start)
        self.waited = time.monotonic() - start
        self.last = missing[-1] // _PER_MEMBER

    def _check_words(self, missing: Sequence[int], tick: int, word: int) -> None:
        for index in missing:
            seen = self._words[index]
            if seen != word and seen >> SIGNATURE_BITS == tick:
                raise Disagreement

    def _sleep(self, missing: Sequence[int], word: int, seconds: float) -> None:
        bell = self._member * _PER_MEMBER * 2 + _BELL * 2
        self._asleep[self._member] = 1
        value = self._bells[bell]
        if any(self._words[index] != word for index in missing):
            futex_wait(self._address + bell * 4, value, seconds)
        self._asleep[self._member] = 0

    def _wake(self) -> None:
        for member in range(self._members):
            if self._asleep[member] and member != self._member:
                bell = member * _PER_MEMBER * 2 + _BELL * 2
                self._bells[bell] = (self._bells[bell] + 1) & 0xFFFFFFFF
                futex_wake(self._address + bell * 4)

    def _check_lives(self, missing: Sequence[int], word: int, start: float) -> None:
        dead = set(self._dead())
        # A member that came and died after coming is not missed in this meeting, so look again.
        late = {index // _PER_MEMBER for index in missing if self._words[index] != word}
        lost = late & dead
        if lost:
            raise self._lost(sorted(lost))
        if late and time.monotonic() - start > self._stall_timeout:
            member = min(late)
            self._words[self._member * _PER_MEMBER + _LOST] = member + 1
            raise Gone(member, f"made no progress for {self._stall_timeout:g} s")

    def _lost(self, lost: Sequence[int]) -> Gone:
        """Whom to blame: where a member left because it lost another one, that other one."""
        for member in lost:
            blamed = self._words[member * _PER_MEMBER + _LOST]
            if blamed and blamed - 1 != self._member:
                self._words[self._member * _PER_MEMBER + _LOST] = blamed
                return Gone(blamed - 1, "was lost")
        member = lost[0]
        self._words[self._member * _PER_MEMBER + _LOST] = member + 1
        left = self._words[member * _PER_MEMBER + _LEFT]
        return Gone(member, "left the group" if left else "died")

    def leave(self) -> None:
        """Tells the others that this member won't come again."""
        self._words[self._member * _PER_MEMBER + _LEFT] = 1


def as_words(array: np.ndarray) -> memoryview:
    """A writable view of uint8 bytes as 64-bit words."""
    return memoryview(array).cast("B").cast("Q")
