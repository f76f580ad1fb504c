"""A barrier in shared memory for the members of one host, and the eviction of members that don't come.

Each member publishes one 64-bit word per phase of the barrier: the number of the phase and a signature of the
operation. A waiting member polls the others' words for some microseconds, then yields the processor, then
sleeps on a futex. It wakes up regularly to see whether a member has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from insitu.base.errors import ExchangeError
from insitu.exchange.memory import Segment, fence, futex_wait, futex_wake, yield_processor
from insitu.exchange.native import MISSING, BarrierStruct, address_of, load_kernels
from insitu.exchange.plan import MemberLost

SIGNATURE_BITS = 24
SIGNATURE_MASK = (1 << SIGNATURE_BITS) - 1
_WORD = (1 << 64) - 1

LINE = 64
"""Bytes of a cache line. Words that different members write never share one."""
_WORDS = LINE // 8
_LEFT, _EVICTED, _DOORBELL = 2, 3, 8
"""Words of a member after its two arrival words (for even and for odd phases): whether it has left; the
number of the first phase from which the others don't count on it any more (0: none); the word it sleeps on,
on a line of its own."""
MEMBER_WORDS = 2 * _WORDS

_MIN_SLEEP, _MAX_SLEEP = 0.0005, 0.04
"""Seconds. The longest sleep bounds how late a death is noticed, the shortest what a missed wake-up costs."""


class SignatureMismatch(Exception):
    """Internal: members came to one phase with different signatures."""


@dataclass(frozen=True, slots=True)
class SpinPolicy:
    """How often a waiting member polls before it sleeps."""

    #: Polls in Python, after those in compiled code, with yielding the processor.
    yields: int
    #: Polls in compiled code without yielding. Other threads don't run meanwhile.
    compiled_spins: int = 0
    #: Polls in compiled code with yielding.
    compiled_yields: int = 0


def choose_spin_policy(members: int, crowded: bool, same_process: bool) -> SpinPolicy:
    """Return how to poll. Spinning pays only if the awaited member runs on another processor meanwhile.

    `crowded`: the members are more than their processors. `same_process`: some are threads of one process.
    """
    if same_process:
        return SpinPolicy(2)
    if crowded:
        return SpinPolicy(2 * members, 0, 4 * members)
    return SpinPolicy(10, 3000, 10)


def count_barrier_bytes(members: int) -> int:
    """Return the bytes of shared memory that a ShmBarrier of so many members needs.

    These are two lines for each member, one for the loss flag, and one byte for each member that says whether
    it sleeps.
    """
    return LINE * (2 * members + 1 + -(-members // LINE))


class ShmBarrier:
    """A barrier for the members of one host. Not for several threads of one member.

    The eviction of a member is decided once for all members, under a lock. A member is evicted for good if it
    had not arrived at that time. Each member that comes to a phase reads the decisions after it has seen all
    others arrive. A fence orders the store of a decision before the load of the arrival word, and each
    member's
    own arrival before its load of the decisions, so two members can't conclude differently.
    """

    def __init__(
        self,
        segment: Segment,
        offset: int,
        member: int,
        ranks: Sequence[int],
        policy: SpinPolicy,
        find_dead: Callable[[], Sequence[int]],
        stall_timeout: float,
    ) -> None:
        """Use the memory at `offset` of `segment`, which is all zeros before the first phase.

        `ranks` are the members' ranks in the group, which `find_dead` returns and errors name.
        """
        members = len(ranks)
        self._ranks = ranks
        self._segment = segment
        data = memoryview(segment.array())[offset : offset + count_barrier_bytes(members)]  # type: ignore[arg-type]
        self._words = data.cast("Q")
        self._doorbells = data.cast("I")
        self._loss_flag = MEMBER_WORDS * members
        sleepers = self._loss_flag + _WORDS
        self._asleep = data[8 * sleepers : 8 * sleepers + members]
        self._sleepers = range(sleepers, sleepers + -(-members // 8))
        self._address = segment.address + offset
        self._member = member
        self._members = members
        self._policy = policy
        self._find_dead = find_dead
        #: Seconds after which a member that doesn't arrive is evicted.
        self.stall_timeout = stall_timeout
        self._own = tuple(member * MEMBER_WORDS + parity for parity in (0, 1))
        self._others = tuple(
            tuple(m * MEMBER_WORDS + parity for m in range(members) if m != member) for parity in (0, 1)
        )
        #: Called regularly while this member sleeps, with the rank that it waits for.
        self.on_sleep: Callable[[int], None] = lambda rank: None
        #: Number of the last phase that this member came to; the first is 1.
        self.phase = 0
        #: Seconds spent waiting in the last phase.
        self.waited = 0.0
        #: The member that came last to the last phase.
        self.last = member
        self._wait = load_kernels().barrier_wait
        self._others_table = np.array(self._others, np.uint64)
        #: This barrier for compiled code.
        self.struct = BarrierStruct(
            self._address,
            self._address + 8 * sleepers,
            address_of(self._others_table),
            self._own,
            *(self._loss_flag, 2 * _DOORBELL, MEMBER_WORDS, member, members - 1),
            *(policy.compiled_spins, policy.compiled_yields),
        )
        self.struct_address = ctypes.addressof(self.struct)
        #: Address of the word that says whether the others have evicted this member.
        self.evicted_address = self._address + 8 * (self._own[0] + _EVICTED)

    def wait(self, signature: int) -> None:
        """Return once all members have come to this phase with the same `signature` (24 bits).

        All members see then what each wrote to shared memory before. Raises MemberLost, SignatureMismatch.
        """
        phase = self.phase = self.phase + 1
        self.complete(self._wait(self.struct_address, phase, signature), signature)

    def _make_word(self, signature: int) -> int:
        """Return the arrival word of the present phase: its low 40 bits, which go round after the other
        members
        have long been past them, and the signature."""
        return (self.phase << SIGNATURE_BITS | signature) & _WORD

    def complete(self, state: int, signature: int) -> None:
        """Complete the current phase, which compiled code began and returned from with `state`. Raises as
        `wait` does."""
        struct = self.struct
        self.waited = struct.waited
        self.last = self._member if struct.last < 0 else struct.last // MEMBER_WORDS
        if state:
            if state & MISSING:
                start = time.monotonic()
                self._wait_for_missing(self._make_word(signature), frozenset())
                self.waited += time.monotonic() - start
            self._release()

    def _release(self) -> None:
        """Check, after all have arrived, that none was evicted, and wake those that sleep."""
        words = self._words
        if words[self._loss_flag]:
            self._raise_if_lost(self.phase, frozenset())
        for index in self._sleepers:
            if words[index]:
                self._wake()

    def wait_and_finish(
        self, signature: int, finish_for: Callable[[int], None], state: int | None = None
    ) -> None:
        """Wait at the end of work that all have begun, and finish the work of members that are lost.

        Every other member calls `finish_for(member)` under the lock for each member that is lost and did not
        arrive. Then this raises MemberLost with `completed` set. `state`: what compiled code that began this
        phase returned; None: nobody has begun it.
        """
        try:
            return self.wait(signature) if state is None else self.complete(state, signature)
        except MemberLost as lost:
            if lost.rank == self._ranks[self._member]:
                raise
            first = lost
        word = self._make_word(signature)
        finished: set[int] = set()
        while True:
            for member in self._find_evicted(self.phase) - finished:
                if self._words[member * MEMBER_WORDS + (self.phase & 1)] != word:
                    with self._locked():
                        finish_for(member)
                finished.add(member)
            try:
                self._wait_for_missing(word, finished)
                self._raise_if_lost(self.phase, finished)
            except MemberLost as lost:
                if lost.rank == self._ranks[self._member]:
                    raise
                continue
            raise MemberLost(first.rank, first.reason, completed=True) from first

    def is_evicted(self) -> bool:
        """Return True if the others have evicted this member."""
        return bool(self._words[self._own[0] + _EVICTED])

    def eviction_error(self) -> MemberLost:
        """Return the error for this member's eviction."""
        return MemberLost(self._ranks[self._member], "was evicted by the other ranks")

    # Waiting

    def _wait_for_missing(self, word: int, excused: Collection[int]) -> None:
        """Return once all members but those `excused` have arrived with `word`."""
        start = time.monotonic()
        parity = word >> SIGNATURE_BITS & 1
        missing = [index for index in self._others[parity] if index // MEMBER_WORDS not in excused]
        words = self._words
        polls = 0
        seconds = _MIN_SLEEP
        while True:
            missing = [index for index in missing if words[index] != word]
            if not missing:
                break
            self.last = missing[-1] // MEMBER_WORDS
            polls += 1
            self._check_signatures(missing, word)
            if polls <= self._policy.yields:
                yield_processor()
                continue
            self._sleep(missing, word, seconds)
            self.on_sleep(self._ranks[missing[0] // MEMBER_WORDS])
            seconds = min(2 * seconds, _MAX_SLEEP)
            if words[self._loss_flag]:
                self._raise_if_lost(self.phase, excused)
            self._evict_if_lost(missing, word, start)

    def _check_signatures(self, missing: Sequence[int], word: int) -> None:
        """Raise SignatureMismatch if a member has come to this phase with another signature."""
        for index in missing:
            seen = self._words[index]
            if seen != word and seen >> SIGNATURE_BITS == word >> SIGNATURE_BITS:
                raise SignatureMismatch

    def _sleep(self, missing: Sequence[int], word: int, seconds: float) -> None:
        doorbell = 2 * (self._own[0] + _DOORBELL)
        self._asleep[self._member] = 1
        fence()
        value = self._doorbells[doorbell]
        if any(self._words[index] != word for index in missing):
            futex_wait(self._address + doorbell * 4, value, seconds)
        self._asleep[self._member] = 0

    def _wake(self) -> None:
        """Wake all members that sleep."""
        for member in range(self._members):
            if self._asleep[member] and member != self._member:
                doorbell = 2 * (member * MEMBER_WORDS + _DOORBELL)
                self._doorbells[doorbell] = (self._doorbells[doorbell] + 1) & 0xFFFFFFFF
                futex_wake(self._address + doorbell * 4)

    # Loss

    def _evict_if_lost(self, missing: Sequence[int], word: int, start: float) -> None:
        """Evict a member that has died, or one that is late by more than the stall timeout."""
        dead = {self._ranks.index(rank) for rank in self._find_dead()}
        late = [index for index in missing if self._words[index] != word]
        lost = [index for index in late if index // MEMBER_WORDS in dead]
        if not lost and late and time.monotonic() - start > self.stall_timeout:
            lost = late[:1]
        if lost:
            with self._locked():
                self._evict(lost[0], word)

    def _evict(self, index: int, word: int) -> None:
        """Evict the member whose arrival word is at `index`, unless it arrives meanwhile. Call under the
        lock."""
        words = self._words
        evicted = index // MEMBER_WORDS * MEMBER_WORDS + _EVICTED
        words[self._loss_flag] = 1
        if words[evicted]:
            return
        words[evicted] = self.phase
        fence()
        if words[index] == word:
            words[evicted] = 0  # it has arrived after all

    def _find_evicted(self, phase: int) -> set[int]:
        """Return the members that were evicted at this phase or at an earlier one.

        A member that was evicted later did come to this phase, and has finished its work for it.
        """
        words = self._words
        return {m for m in range(self._members) if 0 < words[m * MEMBER_WORDS + _EVICTED] <= phase}

    def _raise_if_lost(self, phase: int, excused: Collection[int]) -> None:
        """Raise MemberLost if a member other than those `excused` was evicted, or one on another host
        lost."""
        with self._locked():
            evicted = self._find_evicted(phase)
            elsewhere = self._words[self._loss_flag + 1]
            if not elsewhere and not any(
                self._words[m * MEMBER_WORDS + _EVICTED] for m in range(self._members)
            ):
                self._words[self._loss_flag] = 0
        if self._member in evicted:
            raise self.eviction_error()
        for member in sorted(evicted.difference(excused)):
            raise MemberLost(self._ranks[member], self._describe_loss(member))
        if elsewhere:
            raise MemberLost(elsewhere - 1, "was lost")

    def announce_loss(self, rank: int) -> None:
        """Report to all members that `rank`, on another host, was lost: every wait ends with MemberLost."""
        self._words[self._loss_flag + 1] = rank + 1
        self._words[self._loss_flag] = 1

    def _describe_loss(self, member: int) -> str:
        if self._words[member * MEMBER_WORDS + _LEFT]:
            return "left the group"
        if self._ranks[member] in self._find_dead():
            return "died"
        return f"made no progress for {self.stall_timeout:g} s"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the segment. The system releases that of a member that dies; one that is stopped
        while it holds the lock is waited for up to the stall timeout."""
        deadline = time.monotonic() + self.stall_timeout
        while True:
            try:
                fcntl.flock(self._segment.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ExchangeError(
                        "A rank must release the lock of the group's shared memory within the stall timeout. "
                        f"Received: {self.stall_timeout:g} s of waiting. Resume or end the stopped rank"
                    ) from None
                time.sleep(_MIN_SLEEP)
        try:
            yield
        finally:
            fcntl.flock(self._segment.file, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Report to the others that this member won't come again."""
        self._words[self._own[0] + _LEFT] = 1


def as_words(array: np.ndarray) -> memoryview:
    """Return a writable view of uint8 bytes as 64-bit words."""
    return memoryview(array).cast("B").cast("Q")  # type: ignore[arg-type]
