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
from dataclasses import dataclass

import numpy as np

from insitu.errors import ExchangeError
from insitu.exchange.arithmetic import Factors, Reducer, chunks, coefficients
from insitu.exchange.memory import Segment, attach, create, fill
from insitu.exchange.plan import SCRATCH_BYTES, Plan
from insitu.exchange.transport import Account, Gone, Members, Mismatch, Reduction, Run
from insitu.exchange.wait import (
    LINE,
    SIGNATURE_MASK,
    Disagreement,
    Meeting,
    Patience,
    as_words,
    meeting_bytes,
)

SLOT_BYTES = 64 * 1024
"""Room of a slot."""
_SMALL_BYTES = 8 * 1024
"""A row to reduce goes through the slots up to this size: everybody reads all rows then, which costs more
than a second meeting from here on."""
_WORK_WORDS = LINE // 8
_PIECE_BITS, _MEMBER_BITS = 20, 12
_MEMBER_MASK = (1 << _MEMBER_BITS) - 1
_DIRECTORY_BYTES = 256
"""Per member: where its new segment is, or what it came for, in words."""


Step = tuple[Callable[[Factors | None], None], np.ndarray, list[np.ndarray]]
"""(reduces a piece, where its sum goes first, where that is copied then)."""


def deliver(total: np.ndarray, targets: Sequence[np.ndarray]) -> None:
    for target in targets:
        target[...] = total


def signature(text: str) -> int:
    """24 bits that tell operations apart."""
    return zlib.crc32(text.encode()) & SIGNATURE_MASK


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in the control segment that all members map. All values are byte offsets."""

    members: int
    shards: int

    @property
    def weights(self) -> int:
        return 2 * _round_up(meeting_bytes(self.members))

    @property
    def work(self) -> int:
        """Two words per member: how far it is with its part, and how far the others are who finish it."""
        return self.weights + 2 * _round_up(8 * self.shards)

    @property
    def directory(self) -> int:
        return self.work + LINE * self.members

    @property
    def scratch(self) -> int:
        return _round_up(self.directory + _DIRECTORY_BYTES * self.members, 4096)

    @property
    def common(self) -> int:
        return self.scratch + SCRATCH_BYTES * self.members

    @property
    def slots(self) -> int:
        return self.common + 2 * SLOT_BYTES

    @property
    def size(self) -> int:
        return self.slots + 2 * self.shards * SLOT_BYTES


def _round_up(size: int, unit: int = LINE) -> int:
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that all members made together: `parts[m]` is that of member m, mapped here."""

    parts: tuple[np.ndarray, ...]
    own: Segment
    size: int

    def offset_of(self, array: np.ndarray) -> int | None:
        """Where in this member's part `array` begins, or None where it doesn't lie in it."""
        start = array.__array_interface__["data"][0] - self.own.address
        return start if start >= 0 and start + max(array.nbytes, 1) <= self.size else None


class SharedMemory:
    """A Transport for members of one host. `control` is a segment of `Layout.size` zero bytes; `ranks` are
    the members' ranks in the group."""

    name = "shm"

    def __init__(
        self,
        members: Members,
        control: Segment,
        ranks: Sequence[int],
        patience: Patience,
        dead: Callable[[], Sequence[int]],
        stall_timeout: float,
    ) -> None:
        self._members = members
        self._rank = members.rank
        self._layout = layout = Layout(members.size, members.num_shards)
        self.account = Account()
        self._control = control
        self._data = data = control.array()
        self._ranks = ranks
        second = _round_up(meeting_bytes(members.size))
        self._meeting = Meeting(control, 0, members.rank, ranks, patience, dead, stall_timeout)
        self._quarrel = Meeting(control, second, members.rank, ranks, patience, dead, stall_timeout)
        slots = data[layout.slots : layout.size].reshape(2, members.num_shards, SLOT_BYTES)
        self._slots = (slots[0], slots[1])
        common = data[layout.common : layout.slots].reshape(2, SLOT_BYTES)
        self._common = (common[0], common[1])
        weights = data[layout.weights : layout.work].view(np.float64).reshape(2, -1)
        self._weights = (weights[0][: members.num_shards], weights[1][: members.num_shards])
        self._directory = data[layout.directory :][: _DIRECTORY_BYTES * members.size].reshape(
            members.size, -1
        )
        self._scratch = data[layout.scratch : layout.common].reshape(members.size, SCRATCH_BYTES)
        self._work = as_words(data[layout.work : layout.directory])
        self._mine = list(members.shards[self._rank])
        self._regions: list[Region] = []
        self._staging: Region | None = None
        self._room: Region | None = None

    # Meeting

    def _meet(self, sign: int, what: Callable[[], str]) -> None:
        """All members are here for the same thing, or Mismatch, Gone."""
        if not self._agree(sign, what):
            raise ExchangeError(f"Members of one operation disagree on where its buffers are: {what()}")

    def _agree(self, sign: int, what: Callable[[], str]) -> bool:
        """Meets. False: all came for the same operation, but their arrays are in different places, so that
        it needs staging. Raises Mismatch where operations differ, Gone."""
        meeting = self._meeting
        try:
            meeting.meet(sign)
        except Disagreement:
            self._compare(what())
            return False
        except Gone:
            self._isolate()
            raise
        self.account.waiting += meeting.waited
        self.account.last = self._ranks[meeting.last]
        return True

    def _compare(self, what: str) -> None:
        """All members find that they disagree; each writes down what it came for, and reads the others'."""
        self._write_directory(what.encode()[:_DIRECTORY_BYTES])
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
        row[: len(text)] = np.frombuffer(text, np.uint8)
        row[len(text) :] = 0

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
            self._directory[self._rank][:24].view(np.int64)[:] = (os.getpid(), file, size)
            self._meet(signature("buffer"), lambda: "buffer")
            segments = []
            for member, row in enumerate(self._directory):
                process, descriptor, length = (int(value) for value in row[:24].view(np.int64))
                segments.append(attach(process, descriptor, length, keep if member == self._rank else None))
            self._meet(signature("mapped"), lambda: "buffer")
        finally:
            os.close(file)
        for segment in segments:
            segment.close_file()
        return Region(tuple(segment.array() for segment in segments), segments[self._rank], size)

    def _stage(self, row_bytes: int) -> Region:
        """The region for arrays from elsewhere; grown by all members together. Each has room for its rows."""
        if self._staging is None or row_bytes > self._staging.size // max(1, len(self._mine)):
            self._staging = self._allocate(_round_up(row_bytes, 4096) * max(1, len(self._mine)))
        return self._staging

    def _locate(self, array: np.ndarray) -> tuple[int, int] | None:
        for number, region in enumerate(self._regions):
            offset = region.offset_of(array)
            if offset is not None:
                return number, offset
        return None

    # Reduction

    def reduction(self, reduction: Reduction) -> Run:
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

    def _small(self, reduction: Reduction) -> Run:
        size, dtype = reduction.row_bytes, reduction.dtype
        reducer = Reducer(reduction.op, dtype, self._members.num_shards, reduction.length)
        start, stop = reduction.scatter or (0, reduction.length)
        views = [[row[:size].view(dtype) for row in slots] for slots in self._slots]
        copies = [list(zip((slots[s] for s in self._mine), reduction.rows, strict=True)) for slots in views]
        summands = [[slot[start:stop] for slot in slots] for slots in views]
        sign, meeting, result = signature(str(reduction)), self._meeting, reduction.result

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

    def _in_buffer(self, reduction: Reduction, sign: int, number: int, offset: int) -> Run:
        """For arrays in buffers: nothing to copy, where all members' are at the same place."""
        reduce = self._in_region(reduction, self._regions[number], offset)
        otherwise = self._staged(reduction, None)

        def run(weights: Sequence[float] | None) -> bool:
            if weights is not None:
                self._weights[(self._meeting.tick + 1) & 1][self._mine] = weights
            if self._agree(sign, reduction.__str__):
                return reduce(weights)
            return otherwise(weights)

        return run

    def _in_region(self, reduction: Reduction, region: Region, offset: int) -> Run:
        """What comes after the meeting where all said that their rows are there."""
        plan = Plan(reduction, self._members, [part[offset:] for part in region.parts], self._scratch)
        reducer = Reducer(reduction.op, reduction.dtype, self._members.num_shards, plan.longest)
        steps = [
            (reducer.bind(rows, total), total, targets) for rows, total, targets in plan.pieces(self._rank)
        ]
        done = signature(f"{reduction} done")
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

    def _staged(self, reduction: Reduction, sign: int | None) -> Run:
        """For arrays from elsewhere: one copy in, one copy out. `sign` None: all know already."""
        size, ready = reduction.row_bytes, signature(f"{reduction} staged")
        prepared: list[tuple[Region, Run]] = []

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
            except Gone as gone:
                if gone.completed and reduction.scatter is None:
                    np.copyto(reduction.result, own)
                raise
            if reduced and reduction.scatter is None:
                np.copyto(reduction.result, own)
            return reduced

        return run

    # For a transport over several hosts

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
        plan = Plan(reduction, self._members, [part[offset:] for part in region.parts], self._scratch)
        return (region, common), plan.rows, common[: reduction.row_bytes].view(reduction.dtype)

    def _common_room(self, size: int) -> np.ndarray:
        """Memory of the first member's, which all may write to."""
        if self._room is None or self._room.size < size:
            self._room = self._allocate(_round_up(size, 4096))
        return self._room.parts[0]

    def _copy_in(self, reduction: Reduction, region: Region) -> None:
        own = region.parts[self._rank].view(reduction.dtype)
        for index, row in enumerate(reduction.rows):
            np.copyto(own[index * reduction.length : (index + 1) * reduction.length], row)

    # Work that outlives who does it

    def _work_off(self, steps: Sequence[Step], factors: Sequence[np.generic] | None) -> None:
        """Reduces this member's part, saying at each moment how far it is, so that others can finish it."""
        work, meeting = self._work, self._meeting
        mine = self._rank * _WORK_WORDS
        state = meeting.tick << _PIECE_BITS
        for reduce, total, targets in steps:
            work[mine] = state
            reduce(factors)
            work[mine] = state + 1
            if meeting.is_out():
                raise Gone(self._ranks[self._rank], "was given up by the others")
            deliver(total, targets)
            state += 2
        work[mine] = state

    def _finish(self, done: int, plan: Plan, reducer: Reducer, factors: Sequence[np.generic] | None) -> None:
        """Meets at the end. The part of a lost member is finished by whoever has the lock, from where that
        member, or one who finished for it and was lost too, left off."""
        base = self._meeting.tick << _PIECE_BITS

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
            meeting.finish(done, roll)
        except Gone:
            self._isolate()
            raise
        self.account.waiting += meeting.waited

    # Copies

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray) -> None:
        size = out.shape[1]
        sign = signature(f"all_gather of {size} bytes a shard")
        for low, high in chunks(0, size, SLOT_BYTES) or [(0, 0)]:
            slots = self._slots[(self._meeting.tick + 1) & 1]
            for shard, row in zip(self._mine, rows, strict=True):
                slots[shard, : high - low] = row[low:high]
            self._meet(sign, lambda: f"all_gather of {size} bytes a shard")
            out[:, low:high] = slots[:, : high - low]

    def broadcast(self, data: np.ndarray, root: int) -> None:
        text = f"broadcast of {len(data)} bytes from rank {root}"
        if len(data) <= SLOT_BYTES:
            source = self._common[(self._meeting.tick + 1) & 1][: len(data)]
        else:
            self._meet(signature(text), lambda: text)
            source = self._stage(len(data)).parts[root][: len(data)]
        if self._rank == root:
            source[...] = data
        self._meet(signature(text + " ready"), lambda: text)
        if self._rank != root:
            data[...] = source

    def _isolate(self) -> None:
        """After a loss: no other process, stopped now and waking up later, can change this one's buffers."""
        for region in self._regions:
            region.own.isolate()

    def close(self) -> None:
        self._meeting.leave()
        self._quarrel.leave()
