"""How members of one host wait for each other: words in shared memory, and sleeping where it takes long.

Each member publishes one 64-bit word per meeting: the meeting's number and a signature of what the member
came for. A waiting member looks at the others' words for some microseconds, then yields the processor, then
sleeps on a futex, waking now and then to see whether somebody died.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from insitu.errors import ExchangeError
from insitu.exchange.memory import Segment, futex_wait, futex_wake, yield_processor
from insitu.exchange.native import MISSING, BarrierStruct, Kernels, address_of
from insitu.exchange.transport import MemberLost

SIGNATURE_BITS = 24
SIGNATURE_MASK = (1 << SIGNATURE_BITS) - 1

LINE = 64
"""Bytes of a cache line: what one member writes never shares one with what another writes."""
_WORDS = LINE // 8
_LEFT, _OUT, _BELL = 2, 3, 8
"""Words of a member, beside its two arrival words (of even and of odd meetings): whether it has left;
the number of the first meeting at which the others don't count on it any more (0: none); the word it sleeps
on, on a line of its own."""
MEMBER_WORDS = 2 * _WORDS

_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.0005, 0.04
"""Seconds. The longest bounds how late a death is noticed; the shortest how much a missed bell costs."""


class SignatureMismatch(Exception):
    """Internal: members came to one meeting for different things."""


@dataclass(frozen=True, slots=True)
class SpinPolicy:
    """How often to look again before yielding, and to yield before sleeping; and what compiled code does of
    both before that, without letting other threads run."""

    spins: int
    yields: int
    compiled_spins: int = 0
    compiled_yields: int = 0


def patience(members: int, crowded: bool, same_process: bool) -> SpinPolicy:
    """Spinning pays where the awaited member runs on another processor at this moment, and only there."""
    if same_process:
        return SpinPolicy(0, 2)
    if crowded:
        return SpinPolicy(0, 2 * members, 0, 4 * members)
    return SpinPolicy(1000, 10, 3000, 10)


def meeting_bytes(members: int) -> int:
    """Bytes of shared memory that a ShmBarrier of so many members needs: two lines for each, one for the
    alarm, and one byte for each that says whether it sleeps."""
    return LINE * (2 * members + 1 + -(-members // LINE))


class ShmBarrier:
    """The place where members of one host meet. Not for several threads of one member.

    Who is given up is decided once, under a lock, for all: a member is out for good if it had not come when
    that was decided, and everybody who comes to a meeting looks at the decisions after having seen all
    others come. (The store of a decision precedes the look at the arrival word, and the look at the
    decisions follows the look at the arrival words; on a processor with ordered stores, two members can't
    conclude differently.)
    """

    def __init__(
        self,
        segment: Segment,
        offset: int,
        member: int,
        ranks: Sequence[int],
        patience: SpinPolicy,
        dead: Callable[[], Sequence[int]],
        stall_timeout: float,
        kernels: Kernels | None = None,
    ) -> None:
        """`ranks` are the members' ranks in the group, which `dead` returns and errors name."""
        members = len(ranks)
        self._ranks = ranks
        self._segment = segment
        data = memoryview(segment.array())[offset : offset + meeting_bytes(members)]  # type: ignore[arg-type]
        self._words = data.cast("Q")
        self._bells = data.cast("I")
        self._alarm = MEMBER_WORDS * members
        sleepers = self._alarm + _WORDS
        self._asleep = data[8 * sleepers : 8 * sleepers + members]
        self._sleepers = range(sleepers, sleepers + -(-members // 8))
        self._address = segment.address + offset
        self._member = member
        self._members = members
        self._patience = patience
        self._spins = range(patience.spins)
        self._dead = dead
        self.stall_timeout = stall_timeout
        self._own = tuple(member * MEMBER_WORDS + parity for parity in (0, 1))
        self._others = tuple(
            tuple(m * MEMBER_WORDS + parity for m in range(members) if m != member) for parity in (0, 1)
        )
        self.meanwhile: Callable[[int], None] = lambda rank: None
        """Called now and then by a member that sleeps, with the rank that it waits for."""
        self.tick = 0
        """Number of the last meeting that this member came to; the first is 1."""
        self.waited = 0.0
        """Seconds spent waiting in the last meeting."""
        self.last = member
        """Who came last to the last meeting."""
        self._kernels = kernels
        self._others_table = np.array(self._others, np.uint64)
        self.place = BarrierStruct(
            self._address,
            self._address + 8 * sleepers,
            address_of(self._others_table),
            self._own,
            *(self._alarm, 2 * _BELL, MEMBER_WORDS, member, members - 1),
            *(patience.compiled_spins, patience.compiled_yields),
        )
        """This meeting, for compiled code."""
        self.place_address = ctypes.addressof(self.place)
        self.out_address = self._address + 8 * (self._own[0] + _OUT)
        """The word that says whether the others have given this member up."""

    def meet(self, signature: int) -> None:
        """Returns once all members came to this meeting with the same `signature` (24 bits). What a member
        wrote to shared memory before is seen by all after. Raises MemberLost, SignatureMismatch."""
        tick = self.tick = self.tick + 1
        if self._kernels is not None:
            return self.settle(self._kernels.meet(self.place_address, tick, signature), signature)
        parity = tick & 1
        word = tick << SIGNATURE_BITS | signature
        words = self._words
        words[self._own[parity]] = word
        self.waited, self.last = 0.0, self._member
        for index in self._others[parity]:
            if words[index] != word:
                self._spin(index, word)
        self._depart()

    def settle(self, state: int, signature: int) -> None:
        """Ends the meeting `tick`, to which compiled code came and returned with `state`. Raises as `meet`
        does."""
        place = self.place
        self.waited = place.waited
        self.last = self._member if place.last < 0 else place.last // MEMBER_WORDS
        if state:
            if state & MISSING:
                start = time.monotonic()
                self._wait(self.tick << SIGNATURE_BITS | signature, frozenset())
                self.waited += time.monotonic() - start
            self._depart()

    def _depart(self) -> None:
        """All have come: looks whether they still count, and wakes who sleeps."""
        words = self._words
        if words[self._alarm]:
            self._heed(self.tick, frozenset())
        for index in self._sleepers:
            if words[index]:
                self._wake()

    def finish(self, signature: int, roll: Callable[[int], None], begun: int | None = None) -> None:
        """The meeting at the end of work that all have begun. Where members are lost, the others do that
        work to its end: `roll(member)` is called under the lock, by every other member, for each that is
        lost and didn't come. Then raises MemberLost with `completed` set. `begun`: what compiled code that came to
        the meeting returned with."""
        try:
            return self.meet(signature) if begun is None else self.settle(begun, signature)
        except MemberLost as gone:
            if gone.rank == self._ranks[self._member]:
                raise
            first = gone
        word = self.tick << SIGNATURE_BITS | signature
        excused: set[int] = set()
        while True:
            for member in self._out(self.tick) - excused:
                if self._words[member * MEMBER_WORDS + (self.tick & 1)] != word:
                    with self._locked():
                        roll(member)
                excused.add(member)
            try:
                self._wait(word, excused)
                self._heed(self.tick, excused)
            except MemberLost as gone:
                if gone.rank == self._ranks[self._member]:
                    raise
                continue
            raise MemberLost(first.rank, first.why, completed=True) from first

    def is_out(self) -> bool:
        """Whether the others have given this member up."""
        return bool(self._words[self._own[0] + _OUT])

    # Waiting

    def _spin(self, index: int, word: int) -> None:
        """Looks at the arrival word at `index` for some microseconds, then waits for all that are missing."""
        words, start = self._words, time.monotonic()
        for _ in self._spins:
            if words[index] == word:
                self.last = index // MEMBER_WORDS
                break
        else:
            self._wait(word, frozenset())
        self.waited += time.monotonic() - start

    def _wait(self, word: int, excused: Collection[int]) -> None:
        start = time.monotonic()
        parity = word >> SIGNATURE_BITS & 1
        missing = [index for index in self._others[parity] if index // MEMBER_WORDS not in excused]
        words = self._words
        looks = 0
        pause = _SHORTEST_SLEEP
        while True:
            missing = [index for index in missing if words[index] != word]
            if not missing:
                break
            self.last = missing[-1] // MEMBER_WORDS
            looks += 1
            self._check_words(missing, word)
            if looks <= self._patience.yields:
                yield_processor()
                continue
            self._sleep(missing, word, pause)
            self.meanwhile(self._ranks[missing[0] // MEMBER_WORDS])
            pause = min(2 * pause, _LONGEST_SLEEP)
            if words[self._alarm]:
                self._heed(word >> SIGNATURE_BITS, excused)
            self._check_lives(missing, word, start)

    def _check_words(self, missing: Sequence[int], word: int) -> None:
        for index in missing:
            seen = self._words[index]
            if seen != word and seen >> SIGNATURE_BITS == word >> SIGNATURE_BITS:
                raise SignatureMismatch

    def _sleep(self, missing: Sequence[int], word: int, seconds: float) -> None:
        bell = 2 * (self._own[0] + _BELL)
        self._asleep[self._member] = 1
        value = self._bells[bell]
        if any(self._words[index] != word for index in missing):
            futex_wait(self._address + bell * 4, value, seconds)
        self._asleep[self._member] = 0

    def _wake(self) -> None:
        for member in range(self._members):
            if self._asleep[member] and member != self._member:
                bell = 2 * (member * MEMBER_WORDS + _BELL)
                self._bells[bell] = (self._bells[bell] + 1) & 0xFFFFFFFF
                futex_wake(self._address + bell * 4)

    # Loss

    def _check_lives(self, missing: Sequence[int], word: int, start: float) -> None:
        """Gives up those that died, and the first that is late beyond the stall timeout."""
        dead = {self._ranks.index(rank) for rank in self._dead()}
        late = [index for index in missing if self._words[index] != word]
        lost = [index for index in late if index // MEMBER_WORDS in dead]
        if not lost and late and time.monotonic() - start > self.stall_timeout:
            lost = late[:1]
        if lost:
            with self._locked():
                self._give_up(lost[0], word)

    def _give_up(self, index: int, word: int) -> None:
        """Decides on the member whose arrival word is at `index`; call under the lock."""
        words = self._words
        out = index // MEMBER_WORDS * MEMBER_WORDS + _OUT
        words[self._alarm] = 1
        if words[out]:
            return
        words[out] = word >> SIGNATURE_BITS
        yield_processor()  # its system call orders the store above before the look below
        if words[index] == word:
            words[out] = 0  # it came after all

    def _out(self, tick: int) -> set[int]:
        """Members that were given up at the meeting of this number or at an earlier one. One that was given
        up later did come to this one, with whatever that entails: its work is finished for it."""
        words = self._words
        return {m for m in range(self._members) if 0 < words[m * MEMBER_WORDS + _OUT] <= tick}

    def _heed(self, tick: int, excused: Collection[int]) -> None:
        """Raises MemberLost for a member that was given up."""
        with self._locked():
            out = self._out(tick)
            elsewhere = self._words[self._alarm + 1]
            if not elsewhere and not any(self._words[m * MEMBER_WORDS + _OUT] for m in range(self._members)):
                self._words[self._alarm] = 0
        if self._member in out:
            raise MemberLost(self._ranks[self._member], "was given up by the others")
        for member in sorted(out.difference(excused)):
            raise MemberLost(self._ranks[member], self._why(member))
        if elsewhere:
            raise MemberLost(elsewhere - 1, "was lost")

    def announce(self, rank: int) -> None:
        """Tells all members that `rank`, on another host, was lost: every wait ends with MemberLost."""
        self._words[self._alarm + 1] = rank + 1
        self._words[self._alarm] = 1

    def _why(self, member: int) -> str:
        if self._words[member * MEMBER_WORDS + _LEFT]:
            return "left the group"
        return (
            "died"
            if self._ranks[member] in self._dead()
            else f"made no progress for {self.stall_timeout:g} s"
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes the other members; the system frees the lock of one that dies. One that is stopped while
        it holds the lock is waited for as long as for anything else."""
        deadline = time.monotonic() + self.stall_timeout
        while True:
            try:
                fcntl.flock(self._segment.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ExchangeError("The lock of the group's shared memory is not given back") from None
                time.sleep(_SHORTEST_SLEEP)
        try:
            yield
        finally:
            fcntl.flock(self._segment.file, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Tells the others that this member won't come again."""
        self._words[self._own[0] + _LEFT] = 1


def as_words(array: np.ndarray) -> memoryview:
    """A writable view of uint8 bytes as 64-bit words."""
    return memoryview(array).cast("B").cast("Q")  # type: ignore[arg-type]
