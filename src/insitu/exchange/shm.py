"""The transport between processes of one host: shared memory.

Small buffers go through slots: each member copies its rows into the slots of its shards, all meet once, and
each sums all slots by itself. The slots of even and odd meetings differ, so nobody overwrites what another
still reads. Large buffers lie in regions that every member has mapped: all meet, each member reduces its own
part of the length, reading all members' rows and writing the sum to all of them, and all meet again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from insitu.errors import ExchangeError
from insitu.exchange import native
from insitu.exchange.arithmetic import Factors, Reducer, chunks, coefficients
from insitu.exchange.compiled import CompiledPart, CompiledSmall
from insitu.exchange.memory import Segment, attach, create, fill
from insitu.exchange.plan import SCRATCH_BYTES, ReducePlan
from insitu.exchange.shm_barrier import (
    LINE,
    MEMBER_WORDS,
    SIGNATURE_MASK,
    ShmBarrier,
    SignatureMismatch,
    SpinPolicy,
    as_words,
    meeting_bytes,
)
from insitu.exchange.shm_layout import DIRECTORY_BYTES, SLOT_BYTES, Region, SegmentLayout, round_up
from insitu.exchange.transport import MemberLost, Members, Mismatch, Reduction, RunReduction, WaitStats

_SMALL_BYTES = 8 * 1024
"""A row to reduce goes through the slots up to this size: everybody reads all rows then, which costs more
than a second meeting from here on."""
_WORK_WORDS = LINE // 8
_PIECE_BITS, _MEMBER_BITS = 20, 12
_MEMBER_MASK = (1 << _MEMBER_BITS) - 1


ReducePiece = tuple[Callable[[Factors | None], None], np.ndarray, list[np.ndarray]]
"""(reduces a piece, where its sum goes first, where that is copied then)."""


def deliver(total: np.ndarray, targets: Sequence[np.ndarray]) -> None:
    for target in targets:
        target[...] = total


def signature(text: str) -> int:
    """24 bits that tell operations apart."""
    return zlib.crc32(text.encode()) & SIGNATURE_MASK


class SharedMemoryTransport:
    """A Transport for members of one host. `control` is a segment of `SegmentLayout.size` zero bytes; `ranks` are
    the members' ranks in the group."""

    name = "shm"

    def __init__(
        self,
        members: Members,
        control: Segment,
        ranks: Sequence[int],
        patience: SpinPolicy,
        dead: Callable[[], Sequence[int]],
        stall_timeout: float,
    ) -> None:
        self._members = members
        self._rank = members.rank
        self._layout = layout = SegmentLayout(members.size, members.num_shards)
        self.account = WaitStats()
        self._control = control
        data = control.array()
        self._ranks = ranks
        second = round_up(meeting_bytes(members.size))
        self._kernels = native.kernels()
        self._meeting = ShmBarrier(
            control, 0, members.rank, ranks, patience, dead, stall_timeout, self._kernels
        )
        self._place = self._meeting.place
        self._quarrel = ShmBarrier(control, second, members.rank, ranks, patience, dead, stall_timeout)
        slots = data[layout.slots : layout.size].reshape(2, members.num_shards, SLOT_BYTES)
        self._slots = (slots[0], slots[1])
        common = data[layout.common : layout.slots].reshape(2, SLOT_BYTES)
        self._common = (common[0], common[1])
        weights = data[layout.weights : layout.work].view(np.float64).reshape(2, -1)
        self._weights = (weights[0][: members.num_shards], weights[1][: members.num_shards])
        self._directory = data[layout.directory :][: DIRECTORY_BYTES * members.size].reshape(members.size, -1)
        self._scratch = data[layout.scratch : layout.common].reshape(members.size, SCRATCH_BYTES)
        self._work = as_words(data[layout.work : layout.directory])
        self._mine = list(members.shards[self._rank])
        self._regions: list[Region] = []
        self._staging: Region | None = None
        self._room: Region | None = None

    # ShmBarrier

    def _meet(self, sign: int, what: Callable[[], str], begun: int | None = None) -> None:
        """All members are here for the same thing, or Mismatch, MemberLost. `begun`: what compiled code that came
        returned with."""
        if not self._agree(sign, what, begun):
            raise ExchangeError(f"Members of one operation disagree on where its buffers are: {what()}")

    def _agree(self, sign: int, what: Callable[[], str], begun: int | None = None) -> bool:
        """Meets. False: all came for the same operation, but their arrays are in different places, so that
        it needs staging. `begun` as for `_meet`. Raises Mismatch where operations differ, MemberLost."""
        meeting = self._meeting
        try:
            if begun is None:
                meeting.meet(sign)
            else:
                meeting.settle(begun, sign)
        except SignatureMismatch:
            self._compare(what())
            return False
        except MemberLost:
            self._isolate()
            raise
        self.account.waiting += meeting.waited
        self.account.last = self._ranks[meeting.last]
        return True

    def _book(self) -> None:
        """Accounts for a meeting of which compiled code did everything."""
        self.account.waiting += self._place.waited
        self._came_last()

    def _came_last(self) -> None:
        last = self._place.last
        self.account.last = self._ranks[self._rank if last < 0 else last // MEMBER_WORDS]

    def _compare(self, what: str) -> None:
        """All members find that they disagree; each writes down what it came for, and reads the others'."""
        self._write_directory(what.encode()[:DIRECTORY_BYTES])
        self._quarrel.meet(0)
        told = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in self._directory]
        self._quarrel.meet(1)
        for rank, other in enumerate(told):
            if other != what:
                raise Mismatch(
                    f"All ranks must call the same operations in the same order, of the same size and dtype. "
                    f"Rank {self._ranks[self._rank]} called {what}, rank {self._ranks[rank]} called {other}"
                )

    def _write_directory(self, text: bytes) -> None:
        row = self._directory[self._rank]
        row[:] = np.frombuffer(text.ljust(DIRECTORY_BYTES, b"\0"), np.uint8)

    # Memory

    def allocate(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        region = self._allocate(size, keep)
        self._regions.append(region)
        return region.parts[self._rank]

    def _allocate(self, size: int, keep: np.ndarray | None = None) -> Region:
        """Each member makes a segment and maps all others'. Once all have, none needs a descriptor."""
        file = create("insitu-buffer", size)
        try:
            if keep is not None:
                fill(file, keep)
            self._write_directory(b"")
            compiled = self._kernels is not None
            self._directory[self._rank][:32].view(np.int64)[:] = (os.getpid(), file, size, compiled)
            self._meet(signature("buffer"), lambda: "buffer")
            segments = []
            for member, row in enumerate(self._directory):
                process, descriptor, length, able = (int(value) for value in row[:32].view(np.int64))
                compiled = compiled and bool(able)
                segments.append(attach(process, descriptor, length, keep if member == self._rank else None))
            self._meet(signature("mapped"), lambda: "buffer")
        finally:
            os.close(file)
        for segment in segments:
            segment.close_file()
        return Region(tuple(segment.array() for segment in segments), segments[self._rank], size, compiled)

    def _stage(self, row_bytes: int) -> Region:
        """The region for arrays from elsewhere; grown by all members together. Each has room for its rows."""
        if self._staging is None or row_bytes > self._staging.size // max(1, len(self._mine)):
            self._staging = self._allocate(round_up(row_bytes, 4096) * max(1, len(self._mine)))
        return self._staging

    def _locate(self, array: np.ndarray) -> tuple[int, int] | None:
        for number, region in enumerate(self._regions):
            offset = region.offset_of(array)
            if offset is not None:
                return number, offset
        return None

    # Reduction

    def reduction(self, reduction: Reduction) -> RunReduction:
        if reduction.row_bytes <= _SMALL_BYTES:
            return self._small(reduction)
        place = self._locate(reduction.rows[0] if reduction.rows else reduction.result)
        what = str(reduction)
        if place is None:
            return self._staged(reduction, signature(what))
        return self._in_buffer(reduction, signature(f"{what} {place}"), *place)

    def _factors(self, weights: Sequence[float] | None, dtype: np.dtype) -> list[np.generic] | None:
        """Read after the meeting that `weights` were written before."""
        if weights is None:
            return None
        return coefficients(self._weights[self._meeting.tick & 1].tolist(), dtype)

    def _small(self, reduction: Reduction) -> RunReduction:
        size, dtype = reduction.row_bytes, reduction.dtype
        reducer = Reducer(reduction.op, dtype, self._members.num_shards, reduction.length)
        start, stop = reduction.scatter or (0, reduction.length)
        views = [[row[:size].view(dtype) for row in slots] for slots in self._slots]
        copies = [list(zip((slots[s] for s in self._mine), reduction.rows, strict=True)) for slots in views]
        summands = [[slot[start:stop] for slot in slots] for slots in views]
        sign, meeting, result = signature(str(reduction)), self._meeting, reduction.result
        if self._kernels is not None and native.supports(dtype) and reduction.op != "weighted_mean":
            total = native.sum_of(reduction.op, dtype, self._members.num_shards, None)
            targets = [[slot for slot, _ in pairs] for pairs in copies]
            arrays = (reduction.rows, targets[0] + targets[1], views[0] + views[1], result)
            prepared = native.small(meeting.place_address, total, sign, size, *arrays, start)

            def reduce(parity: int) -> None:
                reducer.reduce(summands[parity], result)

            meet = partial(self._meet, sign, reduction.__str__)
            return CompiledSmall(self._kernels, prepared, meeting, self._book, meet, reduce)

        def run(weights: Sequence[float] | None) -> bool:
            parity = (meeting.tick + 1) & 1
            for slot, row in copies[parity]:
                slot[...] = row
            if weights is not None:
                self._weights[parity][self._mine] = weights
            self._meet(sign, reduction.__str__)
            factors = self._factors(weights, dtype)
            if weights is not None and factors is None:
                return False
            reducer.reduce(summands[parity], result, factors)
            return True

        return run

    def _in_buffer(self, reduction: Reduction, sign: int, number: int, offset: int) -> RunReduction:
        """For arrays in buffers: nothing to copy, where all members' are at the same place."""
        region, meeting = self._regions[number], self._meeting
        reduce = self._in_region(reduction, region, offset, sign)
        otherwise = self._staged(reduction, None)

        def go_on(weights: Sequence[float] | None, begun: int | None) -> bool:
            if self._agree(sign, reduction.__str__, begun):
                return reduce(weights)
            return otherwise(weights)

        def run(weights: Sequence[float] | None) -> bool:
            if weights is not None:
                self._weights[(meeting.tick + 1) & 1][self._mine] = weights
            return go_on(weights, None)

        if isinstance(reduce, CompiledPart) and reduction.op != "weighted_mean":
            return partial(reduce.whole, go_on)
        return run

    def _in_region(self, reduction: Reduction, region: Region, offset: int, begin: int = 0) -> RunReduction:
        """What comes after the meeting where all said by the signature `begin` that their rows are there."""
        compiled = region.compiled and reduction.scatter is None and native.supports(reduction.dtype)
        parts = [part[offset:] for part in region.parts]
        size = native.piece_bytes(reduction.row_bytes) if compiled else None
        plan = ReducePlan(reduction, self._members, parts, self._scratch, size)
        reducer = Reducer(reduction.op, reduction.dtype, self._members.num_shards, plan.longest)
        done = signature(f"{reduction} done")
        if compiled and self._kernels is not None:
            return self._compiled_part(self._kernels, reduction, plan, reducer, (begin, done))
        steps = [
            (reducer.bind(rows, total), total, targets) for rows, total, targets in plan.pieces(self._rank)
        ]
        scatter = reduction.scatter is not None

        def run(weights: Sequence[float] | None) -> bool:
            factors = self._factors(weights, reduction.dtype)
            if weights is not None and factors is None:
                return False
            if scatter:
                for reduce, _, _ in steps:
                    reduce(factors)
                self._meet(done, reduction.__str__)
            else:
                self._work_off(steps, factors)
                self._finish(done, plan, reducer, factors)
            return True

        return run

    def _compiled_part(
        self,
        kernels: native.Kernels,
        reduction: Reduction,
        plan: ReducePlan,
        reducer: Reducer,
        signatures: tuple[int, int],
    ) -> CompiledPart:
        weighted = reduction.op == "weighted_mean"
        factors = np.zeros(self._members.num_shards) if weighted else None
        work = self._control.address + self._layout.work + LINE * self._rank
        prepared = native.part(
            self._meeting.place_address,
            native.sum_of(reduction.op, plan.dtype, self._members.num_shards, factors),
            signatures,
            plan.interval(self._rank),
            plan.longest,
            plan.dtype,
            plan.rows,
            plan.results,
            self._scratch[self._rank],
            (work, self._meeting.out_address),
            _PIECE_BITS,
        )

        def weigh(weights: Sequence[float] | None) -> Factors | None:
            found = self._factors(weights, plan.dtype)
            if factors is not None and found is not None:
                factors[:] = found
            return found

        def end(state: int, found: Factors | None) -> None:
            """After the part: the meeting at the end is done where `state` says nothing else."""
            if state == native.GIVEN_UP:
                raise self._given_up()
            self._meeting.tick += 1
            if state:
                self._finish(signatures[1], plan, reducer, found, state)
            else:
                self.account.waiting += self._place.waited

        return CompiledPart(
            kernels, prepared, reduction.row_bytes, self._meeting, weigh, end, self._came_last
        )

    def _given_up(self) -> MemberLost:
        return MemberLost(self._ranks[self._rank], "was given up by the others")

    def _staged(self, reduction: Reduction, sign: int | None) -> RunReduction:
        """For arrays from elsewhere: one copy in, one copy out. `sign` None: all know already."""
        size, ready = reduction.row_bytes, signature(f"{reduction} staged")
        prepared: list[tuple[Region, RunReduction]] = []

        def run(weights: Sequence[float] | None) -> bool:
            if sign is not None:
                self._agree(sign, reduction.__str__)
            region = self._stage(size)
            if not prepared or prepared[0][0] is not region:
                prepared[:] = [(region, self._in_region(reduction, region, 0))]
            self._copy_in(reduction, region)
            own = region.parts[self._rank][:size].view(reduction.dtype)
            if weights is not None:
                self._weights[(self._meeting.tick + 1) & 1][self._mine] = weights
            self._meet(ready, reduction.__str__)
            try:
                reduced = prepared[0][1](weights)
            except MemberLost as gone:
                if gone.completed and reduction.scatter is None:
                    np.copyto(reduction.result, own)
                raise
            if reduced and reduction.scatter is None:
                np.copyto(reduction.result, own)
            return reduced

        return run

    # For a transport over several hosts, and while one forms

    def wait_at_most(self, stall_timeout: float) -> None:
        """From now on, seconds after which a member that doesn't come is given up."""
        self._meeting.stall_timeout = self._quarrel.stall_timeout = stall_timeout

    def meanwhile(self, tell: Callable[[int], None]) -> None:
        """Has `tell` called now and then while this member waits, with the rank that it waits for."""
        self._meeting.meanwhile = self._quarrel.meanwhile = tell

    def meet(self, text: str) -> None:
        self._meet(signature(text), lambda: text)

    def announce(self, rank: int) -> None:
        """Tells all members that `rank`, on another host, was lost."""
        self._meeting.announce(rank)
        self._isolate()

    def lay_out(self, reduction: Reduction) -> tuple[object, list[np.ndarray], np.ndarray]:
        """All members' rows in shared memory, and room for the result: (what changes only when the others
        do, all shards' rows, one row that all members share). The arrays are copied in where they are in no
        buffer, or not all in the same."""
        place = self._locate(reduction.rows[0] if reduction.rows else reduction.result)
        here = self._agree(signature(f"{reduction} {place}"), reduction.__str__)
        common = self._common_room(reduction.row_bytes)
        if here and place is not None:
            region, offset = self._regions[place[0]], place[1]
        else:
            region, offset = self._stage(reduction.row_bytes), 0
            self._copy_in(reduction, region)
            self._meet(signature("copied in"), reduction.__str__)
        plan = ReducePlan(reduction, self._members, [part[offset:] for part in region.parts], self._scratch)
        return (region, common), plan.rows, common[: reduction.row_bytes].view(reduction.dtype)

    def _common_room(self, size: int) -> np.ndarray:
        """Memory of the first member's, which all may write to."""
        if self._room is None or self._room.size < size:
            self._room = self._allocate(round_up(size, 4096))
        return self._room.parts[0]

    def _copy_in(self, reduction: Reduction, region: Region) -> None:
        own = region.parts[self._rank].view(reduction.dtype)
        for index, row in enumerate(reduction.rows):
            np.copyto(own[index * reduction.length : (index + 1) * reduction.length], row)

    # Work that outlives who does it

    def _work_off(self, steps: Sequence[ReducePiece], factors: Sequence[np.generic] | None) -> None:
        """Reduces this member's part, saying at each moment how far it is, so that others can finish it."""
        work, meeting = self._work, self._meeting
        mine = self._rank * _WORK_WORDS
        state = meeting.tick << _PIECE_BITS
        for reduce, total, targets in steps:
            work[mine] = state
            reduce(factors)
            work[mine] = state + 1
            if meeting.is_out():
                raise self._given_up()
            deliver(total, targets)
            state += 2
        work[mine] = state

    def _finish(
        self, done: int, plan: ReducePlan, reducer: Reducer, factors: Factors | None, begun: int | None = None
    ) -> None:
        """Meets at the end, or goes on with that where it has `begun`. The part of a lost member is finished
        by whoever has the lock, from where that member, or one who finished for it and was lost too, left
        off."""
        base = self._meeting.tick - (begun is not None) << _PIECE_BITS

        def roll(member: int) -> None:
            pieces = plan.pieces(member)
            own, taken = member * _WORK_WORDS, member * _WORK_WORDS + 1
            state, helper = self._work[own], member
            if self._work[taken] >> _PIECE_BITS >> _MEMBER_BITS == self._meeting.tick - 1:
                state, helper = self._work[taken] >> _MEMBER_BITS, self._work[taken] & _MEMBER_MASK
            at = max(0, state - base)
            for number in range(at // 2, len(pieces)):
                rows, _, targets = pieces[number]
                total = self._scratch[helper].view(plan.dtype)[: len(targets[0])]
                if number > at // 2 or at % 2 == 0:
                    helper = self._rank
                    total = self._scratch[helper].view(plan.dtype)[: len(targets[0])]
                    self._work[taken] = (base + 2 * number) << _MEMBER_BITS | helper
                    reducer.reduce(rows, total, factors)
                    self._work[taken] = (base + 2 * number + 1) << _MEMBER_BITS | helper
                deliver(total, targets)
            self._work[taken] = (base + 2 * len(pieces)) << _MEMBER_BITS | self._rank

        meeting = self._meeting
        try:
            meeting.finish(done, roll, begun)
        except MemberLost:
            self._isolate()
            raise
        self.account.waiting += meeting.waited

    # Copies

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray, what: str) -> None:
        sign = signature(what)
        for low, high in chunks(0, out.shape[1], SLOT_BYTES) or [(0, 0)]:
            slots = self._slots[(self._meeting.tick + 1) & 1]
            for shard, row in zip(self._mine, rows, strict=True):
                slots[shard, : high - low] = row[low:high]
            self._meet(sign, lambda: what)
            out[:, low:high] = slots[:, : high - low]

    def broadcast(self, data: np.ndarray, root: int, what: str) -> None:
        if len(data) <= SLOT_BYTES:
            source = self._common[(self._meeting.tick + 1) & 1][: len(data)]
        else:
            self._meet(signature(what), lambda: what)
            source = self._stage(len(data)).parts[root][: len(data)]
        if self._rank == root:
            source[...] = data
        self._meet(signature(what + " ready"), lambda: what)
        if self._rank != root:
            data[...] = source

    def _isolate(self) -> None:
        """After a loss: no other process, stopped now and waking up later, can change this one's buffers."""
        for region in self._regions:
            region.own.isolate()

    def close(self) -> None:
        self._meeting.leave()
        self._quarrel.leave()
