"""The reductions in shared memory. Each class is prepared for one array and run many times.

- SlotReduction: small rows. Each member copies its rows into slots, all wait, each sums all slots.
- RegionReduction: rows in memory that all members have mapped. All wait, each sums its part of the length and
  writes the sum to all members' rows, and all wait again. If a member is lost in between, the others finish
  its part, from its progress word.
- BufferReduction: rows in buffers of the group, which are such memory.
- StagedReduction: rows from elsewhere, which are copied to such memory first.

The compiled subclasses do all of it in one call, as long as no member is late. NumPy sums what `kernels.c`
doesn't: half precision and the results of a reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from insitu.exchange import native
from insitu.exchange.memory import fence
from insitu.exchange.native import AT_END, EVICTED, HOLD_GIL_BYTES, PIECE_BITS
from insitu.exchange.plan import (
    Factors,
    MemberLost,
    ReducePiece,
    ReducePlan,
    Reducer,
    Reduction,
    RunReduction,
)
from insitu.exchange.shm_barrier import LINE
from insitu.exchange.shm_layout import Region
from insitu.exchange.shm_session import ShmSession, sign

_PROGRESS_WORDS = LINE // 8
_WORD = (1 << 64) - 1
"""Counters go round at 64 bits, after the other members have long been past them."""
_TAKEN_OVER, _HELPER = 1, 2
"""Words of a member after its own progress: how far those are who finish its part, and which member holds the
sum in its scratch memory. The helper's number is written while the progress is even, when nobody needs it."""


def copy_to_targets(total: np.ndarray, targets: Sequence[np.ndarray]) -> None:
    """Copy a sum over the members' rows."""
    for target in targets:
        target[...] = total


class SlotReduction:
    """Reduces small rows through the slots."""

    def __init__(self, session: ShmSession, reduction: Reduction) -> None:
        self._session = session
        self._barrier = session.barrier
        self._dtype = dtype = reduction.dtype
        self._result = reduction.result
        self._label = reduction.__str__
        self._signature = sign(str(reduction))
        self._reducer = Reducer(reduction.op, dtype, session.members.num_shards, reduction.length)
        self._start, stop = reduction.scatter or (0, reduction.length)
        self._rows = reduction.rows
        self._row_bytes = reduction.row_bytes
        self._slots = [[slot[: self._row_bytes].view(dtype) for slot in slots] for slots in session.slots]
        own = session.own_shards
        self._copies = [
            list(zip((slots[s] for s in own), reduction.rows, strict=True)) for slots in self._slots
        ]
        self._summands = [[slot[self._start : stop] for slot in slots] for slots in self._slots]

    def run(self, weights: Sequence[float] | None) -> bool:
        """Reduce; see RunReduction."""
        session = self._session
        parity = (self._barrier.phase + 1) & 1
        for slot, row in self._copies[parity]:
            slot[...] = row
        session.publish_weights(weights)
        session.synchronize(self._signature, self._label)
        factors = session.read_factors(weights, self._dtype)
        if weights is not None and factors is None:
            return False
        self._reducer.reduce(self._summands[parity], self._result, factors)
        return True


class CompiledSlotReduction(SlotReduction):
    """Does it in one call of compiled code; without weights."""

    def __init__(self, session: ShmSession, reduction: Reduction) -> None:
        super().__init__(session, reduction)
        dtype = reduction.dtype
        total = native.describe_sum(reduction.op, dtype, session.members.num_shards, None)
        targets = [[slot for slot, _ in pairs] for pairs in self._copies]
        self._prepared = native.prepare_slot_reduction(
            session.barrier.struct_address,
            total,
            self._signature,
            self._row_bytes,
            self._rows,
            targets[0] + targets[1],
            self._slots[0] + self._slots[1],
            self._result,
            self._start,
        )
        self._address = self._prepared.address
        self._call = session.kernels.reduce_slots
        self._struct = session.barrier.struct
        self._wait_stats = session.wait_stats

    def run(self, weights: Sequence[float] | None) -> bool:
        """Reduce; see RunReduction."""
        barrier = self._barrier
        phase = barrier.phase = barrier.phase + 1
        state = self._call(self._address, phase)
        if state:  # a member is late: Python waits, and sums
            self._session.synchronize(self._signature, self._label, state)
            self._reducer.reduce(self._summands[phase & 1], self._result)
        else:
            self._wait_stats.seconds += self._struct.waited
            self._session.record_last_rank()
        return True


class RegionReduction:
    """Reduces rows in a region, after a barrier that all members came to with the signature `begin`."""

    def __init__(
        self, session: ShmSession, reduction: Reduction, region: Region, offset: int, begin: int = 0
    ) -> None:
        self._session = session
        self._barrier = session.barrier
        self._reduction = reduction
        self._label = reduction.__str__
        self._begin = begin
        self._end = sign(f"{reduction} done")
        size = native.choose_piece_bytes(reduction.row_bytes) if is_compiled(reduction) else None
        parts = [part[offset:] for part in region.parts]
        self._plan = ReducePlan(reduction, session.members, parts, session.scratch, size)
        self._reducer = Reducer(reduction.op, reduction.dtype, session.members.num_shards, self._plan.longest)

    def run(self, weights: Sequence[float] | None) -> bool:
        """Reduce; see RunReduction."""
        raise NotImplementedError

    def _finish(self, factors: Factors | None, state: int | None = None) -> None:
        """Wait for the others at the end, and finish the parts of those that are lost.

        `state`: what compiled code that began the phase of that barrier returned.
        """
        barrier = self._barrier
        first = barrier.phase if state is None else barrier.phase - 1
        try:
            barrier.wait_and_finish(self._end, partial(self._finish_for, factors, first), state)
        except MemberLost:
            self._session.make_buffers_private()
            raise
        self._session.wait_stats.seconds += barrier.waited

    def _finish_for(self, factors: Factors | None, first: int, member: int) -> None:
        """Finish the part of a lost member from where it stopped, or from where another member stopped that
        finished it and was lost too. Call under the lock. `first` is the phase before the part."""
        session, plan = self._session, self._plan
        words, own, base = session.progress, member * _PROGRESS_WORDS, first << PIECE_BITS & _WORD
        pieces = plan.make_pieces(member)
        done, total = self._find_progress(member, base, pieces)
        for number in range(done // 2, len(pieces)):
            piece = pieces[number]
            if total is None:
                words[own + _TAKEN_OVER] = base + 2 * number & _WORD
                words[own + _HELPER] = session.member
                total = plan.get_scratch(session.member, len(piece.targets[0]))
                self._reducer.reduce(piece.rows, total, factors)
                words[own + _TAKEN_OVER] = base + 2 * number + 1 & _WORD
            copy_to_targets(total, piece.targets)
            total = None
        words[own + _TAKEN_OVER] = base + 2 * len(pieces) & _WORD

    def _find_progress(
        self, member: int, base: int, pieces: Sequence[ReducePiece]
    ) -> tuple[int, np.ndarray | None]:
        """Return how far a lost member's part is, and a copy of the sum that comes over the rows next, or
        None if it must be computed first.

        The member may continue for a moment, with its next piece in the same scratch memory: so the copy
        counts only if its progress is still the same afterwards. Once it looks, it sees that it was evicted,
        and doesn't copy that next sum itself.
        """
        words, own = self._session.progress, member * _PROGRESS_WORDS
        helper, word = member, own
        if (words[own + _TAKEN_OVER] - base & _WORD) <= 2 * len(pieces):
            helper, word = words[own + _HELPER], own + _TAKEN_OVER
        while True:
            state = words[word]
            done = state - base & _WORD
            if done > 2 * len(pieces):
                return 0, None  # it hasn't begun
            if done % 2 == 0:
                return done, None
            fence()
            total = self._plan.get_scratch(helper, len(pieces[done // 2].targets[0])).copy()
            fence()
            if words[word] == state:
                return done, total


class NumpyRegionReduction(RegionReduction):
    """Sums this member's part in Python, piece after piece."""

    def __init__(
        self, session: ShmSession, reduction: Reduction, region: Region, offset: int, begin: int = 0
    ) -> None:
        super().__init__(session, reduction, region, offset, begin)
        self._scatter = reduction.scatter is not None
        self._pieces = [
            (self._reducer.bind(piece.rows, piece.total), piece.total, piece.targets)
            for piece in self._plan.make_pieces(session.member)
        ]

    def run(self, weights: Sequence[float] | None) -> bool:
        """Reduce; see RunReduction."""
        factors = self._session.read_factors(weights, self._plan.dtype)
        if weights is not None and factors is None:
            return False
        if self._scatter:
            for reduce, _, _ in self._pieces:
                reduce(factors)
            self._session.synchronize(self._end, self._label)
        else:
            self._reduce_pieces(factors)
            self._finish(factors)
        return True

    def _reduce_pieces(self, factors: Factors | None) -> None:
        """Reduce this member's part, and publish the progress, so that others can finish it at any point."""
        words, barrier = self._session.progress, self._barrier
        own = self._session.member * _PROGRESS_WORDS
        state = barrier.phase << PIECE_BITS & _WORD
        for reduce, total, targets in self._pieces:
            words[own] = state
            reduce(factors)
            words[own] = state + 1
            fence()  # as in kernels.c
            if barrier.is_evicted():
                raise barrier.eviction_error()
            copy_to_targets(total, targets)
            state += 2
        words[own] = state


class CompiledRegionReduction(RegionReduction):
    """Sums this member's part in compiled code."""

    def __init__(
        self, session: ShmSession, reduction: Reduction, region: Region, offset: int, begin: int = 0
    ) -> None:
        super().__init__(session, reduction, region, offset, begin)
        kernels, plan, shards = session.kernels, self._plan, session.members.num_shards
        self._factors = np.zeros(shards) if reduction.op == "weighted_mean" else None
        self._prepared = native.prepare_region_reduction(
            session.barrier.struct_address,
            native.describe_sum(reduction.op, plan.dtype, shards, self._factors),
            (begin, self._end),
            plan.get_interval(session.member),
            plan.longest,
            plan.rows,
            plan.results,
            session.scratch[session.member],
            (session.progress_address, session.barrier.evicted_address),
        )
        self._address = self._prepared.address
        hold = reduction.row_bytes <= HOLD_GIL_BYTES
        self._reduce = kernels.reduce_region if hold else kernels.reduce_region_nogil
        self._wait_and_reduce = (
            kernels.barrier_and_reduce_region if hold else kernels.barrier_and_reduce_region_nogil
        )
        self._struct = session.barrier.struct
        self._wait_stats = session.wait_stats

    def run(self, weights: Sequence[float] | None) -> bool:
        """Reduce; see RunReduction."""
        factors = self._session.read_factors(weights, self._plan.dtype)
        if factors is None:
            if weights is not None:
                return False
        elif self._factors is not None:
            self._factors[:] = factors
        self._complete(self._reduce(self._address, self._barrier.phase), factors)
        return True

    def wait_and_run(self) -> int:
        """Wait at the barrier before, too; without weights. Returns 0 when all is done, or the state of that
        barrier, which the caller completes."""
        barrier = self._barrier
        phase = barrier.phase = barrier.phase + 1
        state = self._wait_and_reduce(self._address, phase)
        if state:
            if state & (AT_END | EVICTED):
                self._session.record_last_rank()
                self._complete(state, None)
                return 0
            return state
        barrier.phase = phase + 1
        self._wait_stats.seconds += self._struct.waited
        self._session.record_last_rank()
        return 0

    def _complete(self, state: int, factors: Factors | None) -> None:
        """Complete the barrier at the end, which compiled code left with `state`."""
        if state == EVICTED:
            raise self._barrier.eviction_error()
        self._barrier.phase += 1
        if state:
            self._finish(factors, state)
        else:
            self._wait_stats.seconds += self._struct.waited


class StagedReduction:
    """Reduces rows from elsewhere: one copy in, one copy out."""

    def __init__(self, session: ShmSession, reduction: Reduction, signature: int | None) -> None:
        """`signature` None: the members have agreed already that the rows need staging."""
        self._session = session
        self._reduction = reduction
        self._label: Callable[[], str] = reduction.__str__
        self._signature = signature
        self._ready = sign(f"{reduction} staged")
        self._region: Region | None = None
        self._run: RunReduction | None = None

    def run(self, weights: Sequence[float] | None) -> bool:
        """Reduce; see RunReduction."""
        session, reduction = self._session, self._reduction
        if self._signature is not None:
            session.agree(self._signature, self._label)
        region = session.get_staging(reduction.row_bytes)
        if self._run is None or self._region is not region:
            self._region = region
            self._run = prepare_region_reduction(session, reduction, region, 0).run
        copy_rows(session, reduction, region)
        own = region.parts[session.member][: reduction.row_bytes].view(reduction.dtype)
        session.publish_weights(weights)
        session.synchronize(self._ready, self._label)
        try:
            reduced = self._run(weights)
        except MemberLost as lost:
            if lost.completed and reduction.scatter is None:
                np.copyto(reduction.result, own)
            raise
        if reduced and reduction.scatter is None:
            np.copyto(reduction.result, own)
        return reduced


class BufferReduction:
    """Reduces rows in a buffer. They are copied only if the members' rows are at different offsets."""

    def __init__(self, session: ShmSession, reduction: Reduction, number: int, offset: int) -> None:
        self._session = session
        self._label: Callable[[], str] = reduction.__str__
        self._signature = sign(f"{reduction} {(number, offset)}")
        region = session.get_buffer(number)
        self._in_place = prepare_region_reduction(session, reduction, region, offset, self._signature)
        self._staged = StagedReduction(session, reduction, None)

    def run(self, weights: Sequence[float] | None) -> bool:
        """Reduce; see RunReduction."""
        self._session.publish_weights(weights)
        return self._agree_and_run(weights, None)

    def _agree_and_run(self, weights: Sequence[float] | None, state: int | None) -> bool:
        if self._session.agree(self._signature, self._label, state):
            return self._in_place.run(weights)
        return self._staged.run(weights)


class CompiledBufferReduction(BufferReduction):
    """Does it in one call of compiled code; without weights."""

    _in_place: CompiledRegionReduction

    def run(self, weights: Sequence[float] | None) -> bool:
        """Reduce; see RunReduction."""
        state = self._in_place.wait_and_run()
        return self._agree_and_run(weights, state) if state else True


def is_compiled(reduction: Reduction) -> bool:
    """Return True if compiled code does a reduction of rows in shared memory."""
    return reduction.scatter is None and native.supports(reduction.dtype)


def prepare_slot_reduction(session: ShmSession, reduction: Reduction) -> SlotReduction:
    """Prepare a reduction of small rows."""
    compiled = native.supports(reduction.dtype) and reduction.op != "weighted_mean"
    return (CompiledSlotReduction if compiled else SlotReduction)(session, reduction)


def prepare_region_reduction(
    session: ShmSession, reduction: Reduction, region: Region, offset: int, begin: int = 0
) -> RegionReduction:
    """Prepare a reduction of rows at `offset` of a region."""
    kind = CompiledRegionReduction if is_compiled(reduction) else NumpyRegionReduction
    return kind(session, reduction, region, offset, begin)


def prepare_buffer_reduction(
    session: ShmSession, reduction: Reduction, number: int, offset: int
) -> BufferReduction:
    """Prepare a reduction of rows at `offset` of a buffer."""
    compiled = is_compiled(reduction) and reduction.op != "weighted_mean"
    return (CompiledBufferReduction if compiled else BufferReduction)(session, reduction, number, offset)


def copy_rows(session: ShmSession, reduction: Reduction, region: Region) -> None:
    """Copy this member's rows to its part of a region."""
    own = region.parts[session.member].view(reduction.dtype)
    for index, row in enumerate(reduction.rows):
        np.copyto(own[index * reduction.length : (index + 1) * reduction.length], row)
