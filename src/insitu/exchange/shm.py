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
from insitu.exchange.arithmetic import Reducer, bounds, chunks, coefficients
from insitu.exchange.memory import Segment, attach, create
from insitu.exchange.transport import Account, Members, Mismatch, Reduction, Run
from insitu.exchange.wait import (
    LINE,
    SIGNATURE_MASK,
    Disagreement,
    Meeting,
    Patience,
    meeting_bytes,
)

SLOT_BYTES = 64 * 1024
"""A row up to this size goes through the slots."""
SCRATCH_BYTES = 512 * 1024
_CACHE_BYTES = 1024 * 1024
"""What the rows of one piece and its sum may take, so that they stay in the processor's second-level cache."""
_DIRECTORY_BYTES = 256
"""Per member: where its new segment is, or what it came for, in words."""


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
    def directory(self) -> int:
        return self.weights + 2 * _round_up(8 * self.shards)

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
    address: int
    size: int

    def offset_of(self, array: np.ndarray) -> int | None:
        """Where in this member's part `array` begins, or None where it doesn't lie in it."""
        start = array.__array_interface__["data"][0] - self.address
        return start if 0 <= start and start + max(array.nbytes, 1) <= self.size else None


class SharedMemory:
    """A Transport for members of one host. `control` is a segment of `Layout.size` zero bytes."""

    name = "shm"

    def __init__(
        self,
        members: Members,
        control: Segment,
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
        self._meeting = Meeting(control, 0, members.rank, members.size, patience, dead, stall_timeout)
        self._quarrel = Meeting(
            control, _round_up(meeting_bytes(members.size)), members.rank, members.size, patience, dead, stall_timeout
        )
        slots = data[layout.slots : layout.size].reshape(2, members.num_shards, SLOT_BYTES)
        self._slots = (slots[0], slots[1])
        common = data[layout.common : layout.slots].reshape(2, SLOT_BYTES)
        self._common = (common[0], common[1])
        weights = data[layout.weights : layout.directory].view(np.float64).reshape(2, -1)
        self._weights = (weights[0][: members.num_shards], weights[1][: members.num_shards])
        self._directory = data[layout.directory :][: _DIRECTORY_BYTES * members.size].reshape(members.size, -1)
        self._scratch = data[layout.scratch + SCRATCH_BYTES * self._rank :][:SCRATCH_BYTES]
        self._mine = list(members.shards[self._rank])
        self._regions: list[Region] = []
        self._staging: Region | None = None

    # Meeting

    def _meet(self, sign: int, what: Callable[[], str]) -> None:
        """All members are here for the same thing, or Mismatch, Gone."""
        if not self._agree(sign, what, ""):
            raise ExchangeError(f"Members of one operation disagree on where its buffers are: {what()}")

    def _agree(self, sign: int, what: Callable[[], str], place: str) -> bool:
        """Meets. False: all came for the same operation, but their arrays are in different places, so that
        it needs staging. Raises Mismatch where operations differ, Gone."""
        meeting = self._meeting
        try:
            meeting.meet(sign)
        except Disagreement:
            self._compare(what(), place)
            return False
        self.account.waiting += meeting.waited
        self.account.last = meeting.last
        return True

    def _compare(self, what: str, place: str) -> None:
        """All members find that they disagree; each writes down what it came for, and reads the others'."""
        self._write_directory(what.encode()[:_DIRECTORY_BYTES])
        self._quarrel.meet(0)
        told = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in self._directory]
        self._quarrel.meet(1)
        for rank, other in enumerate(told):
            if other != what:
                raise Mismatch(
                    f"All ranks must call the same operations in the same order, with the same sizes and dtypes. "
                    f"Rank {self._rank} called {what}, rank {rank} called {other}"
                )

    def _write_directory(self, text: bytes) -> None:
        row = self._directory[self._rank]
        row[: len(text)] = np.frombuffer(text, np.uint8)
        row[len(text) :] = 0

    # Memory

    def allocate(self, size: int) -> np.ndarray:
        region = self._allocate(size)
        self._regions.append(region)
        return region.parts[self._rank]

    def _allocate(self, size: int) -> Region:
        """Each member makes a segment and maps those of all others. Once all have, none needs a descriptor."""
        file = create("insitu-buffer", size)
        try:
            self._write_directory(b"")
            self._directory[self._rank][:24].view(np.int64)[:] = (os.getpid(), file, size)
            self._meet(signature("buffer"), lambda: "buffer")
            segments = []
            for row in self._directory:
                process, descriptor, length = (int(value) for value in row[:24].view(np.int64))
                segments.append(attach(process, descriptor, length))
            self._meet(signature("mapped"), lambda: "buffer")
        finally:
            os.close(file)
        own = segments[self._rank]
        return Region(tuple(segment.array() for segment in segments), own.address, size)

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
        if reduction.row_bytes <= SLOT_BYTES:
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
            if self._agree(sign, reduction.__str__, f"buffer {number}"):
                return reduce(weights)
            return otherwise(weights)

        return run

    def _in_region(self, reduction: Reduction, region: Region, offset: int) -> Run:
        """What comes after the meeting where all said that their rows are there."""
        pieces = self._pieces(reduction, region, offset)
        length = max((len(out) for _, out, _ in pieces), default=0)
        reducer = Reducer(reduction.op, reduction.dtype, self._members.num_shards, length)
        done = signature(f"{reduction} done")

        def run(weights: Sequence[float] | None) -> bool:
            factors = self._factors(weights, reduction.dtype)
            if weights is not None and factors is None:
                return False
            for rows, total, targets in pieces:
                reducer.reduce(rows, total, factors)
                for target in targets:
                    np.copyto(target, total)
            self._meet(done, reduction.__str__)
            return True

        return run

    def _staged(self, reduction: Reduction, sign: int | None) -> Run:
        """For arrays from elsewhere: one copy in, one copy out. `sign` None: all know already."""
        size, ready = reduction.row_bytes, signature(f"{reduction} staged")
        prepared: list[tuple[Region, Run]] = []

        def run(weights: Sequence[float] | None) -> bool:
            if sign is not None:
                self._agree(sign, reduction.__str__, "elsewhere")
            region = self._stage(size)
            if not prepared or prepared[0][0] is not region:
                prepared[:] = [(region, self._in_region(reduction, region, 0))]
            own = region.parts[self._rank][: size * max(1, len(self._mine))].view(reduction.dtype)
            for index, row in enumerate(reduction.rows):
                np.copyto(own[index * reduction.length : (index + 1) * reduction.length], row)
            if weights is not None:
                self._weights[(self._meeting.tick + 1) & 1][self._mine] = weights
            self._meet(ready, reduction.__str__)
            reduced = prepared[0][1](weights)
            if reduced and reduction.scatter is None:
                np.copyto(reduction.result, own[: reduction.length])
            return reduced

        return run

    def _pieces(
        self, reduction: Reduction, region: Region, offset: int
    ) -> list[tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]]:
        """What this member reduces: (a piece of every shard's row, where its sum goes first, the pieces of
        all members' results)."""
        rows, results = self._rows(reduction, region, offset)
        size = min(SCRATCH_BYTES, _round_up(_CACHE_BYTES // (len(rows) + 1), 4096)) // reduction.dtype.itemsize
        total = self._scratch.view(reduction.dtype)
        if reduction.scatter is not None:
            start, stop = reduction.scatter
            return [
                ([row[low:high] for row in rows], reduction.result[low - start : high - start], [])
                for low, high in chunks(start, stop, size)
            ]
        start, stop = bounds(reduction.length, self._members.size, reduction.dtype.itemsize)[self._rank]
        return [
            ([row[low:high] for row in rows], total[: high - low], [result[low:high] for result in results])
            for low, high in chunks(start, stop, size)
        ]

    def _rows(
        self, reduction: Reduction, region: Region, offset: int
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(every shard's row in shard order, every member's result), in this process's mappings."""
        rows: dict[int, np.ndarray] = {}
        results = []
        size = reduction.row_bytes
        for rank, part in enumerate(region.parts):
            shards = self._members.shards[rank]
            if len(part) < offset + max(1, len(shards)) * size:
                raise ExchangeError(
                    f"{reduction}: rank {rank} has {len(part)} bytes in this buffer, "
                    f"{offset + max(1, len(shards)) * size} are needed"
                )
            for index, shard in enumerate(shards):
                low = offset + index * size
                rows[shard] = part[low : low + size].view(reduction.dtype)
            results.append(part[offset : offset + size].view(reduction.dtype))
        return [rows[shard] for shard in range(self._members.num_shards)], results

    def _foreign(self, reduction: Reduction) -> Run:
        """For arrays from elsewhere: one copy in, one copy out."""
        text = f"{reduction} of arrays outside of buffers"
        sign = signature(text)
        prepared: list[tuple[Region, Run]] = []

        def run(weights: Sequence[float] | None) -> bool:
            self._meet(sign, lambda: text)
            region = self._stage(reduction.row_bytes)
            if not prepared or prepared[0][0] is not region:
                prepared[:] = [(region, self._in_region(reduction, region, 0, text + " staged"))]
            own = region.parts[self._rank][: reduction.row_bytes * max(1, len(self._mine))].view(reduction.dtype)
            for index, row in enumerate(reduction.rows):
                np.copyto(own[index * reduction.length : (index + 1) * reduction.length], row)
            reduced = prepared[0][1](weights)
            if reduced and reduction.scatter is None:
                np.copyto(reduction.result, own[: reduction.length])
            return reduced

        return run

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
        sign = signature(text)
        for low, high in chunks(0, len(data), SLOT_BYTES) or [(0, 0)]:
            common = self._common[(self._meeting.tick + 1) & 1][: high - low]
            if self._rank == root:
                common[...] = data[low:high]
            self._meet(sign, lambda: text)
            if self._rank != root:
                data[low:high] = common

    def close(self) -> None:
        self._meeting.leave()
        self._quarrel.leave()
