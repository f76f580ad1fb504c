"""The shared state of the members of one host: the barrier with its checks, and memory that all have
mapped."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from insitu.base.errors import ExchangeError
from insitu.exchange import native
from insitu.exchange.memory import Segment, adopt, create, fill
from insitu.exchange.memory_links import MemoryLinks
from insitu.exchange.plan import (
    SCRATCH_BYTES,
    MemberLost,
    Members,
    WaitStats,
    compute_factors,
    mismatch_error,
)
from insitu.exchange.shm_barrier import (
    LINE,
    MEMBER_WORDS,
    SIGNATURE_MASK,
    ShmBarrier,
    SignatureMismatch,
    SpinPolicy,
    as_words,
)
from insitu.exchange.shm_layout import DIRECTORY_BYTES, SLOT_BYTES, Region, SegmentLayout, round_up


def sign(text: str) -> int:
    """Return 24 bits that distinguish operations."""
    return zlib.crc32(text.encode()) & SIGNATURE_MASK


class ShmSession:
    """One member's view of the memory that the members of a host share, for one generation of the group.

    `synchronize` and `agree` wait for all members. Memory that has two halves has one for even and one for
    odd phases of the barrier, so that nobody overwrites what another member still reads.
    """

    def __init__(
        self,
        members: Members,
        control: Segment,
        links: MemoryLinks,
        ranks: Sequence[int],
        policy: SpinPolicy,
        find_dead: Callable[[], Sequence[int]],
        stall_timeout: float,
    ) -> None:
        """Use `control`, a segment of `SegmentLayout.size` zero bytes. `links` lead to the other members.
        `ranks` are the members' ranks in the group, which `find_dead` returns."""
        self.members = members
        #: This member's number on the host.
        self.member = members.rank
        self.ranks = ranks
        #: The shards of this member.
        self.own_shards = list(members.shards[members.rank])
        #: How long this process has waited for others.
        self.wait_stats = WaitStats()
        layout = SegmentLayout(members.size, members.num_shards)
        self._control = control
        self._links = links
        data = control.array()
        #: The compiled functions.
        self.kernels = native.load_kernels()
        member = members.rank
        #: The barrier of all operations.
        self.barrier = ShmBarrier(control, 0, member, ranks, policy, find_dead, stall_timeout)
        self._struct = self.barrier.struct
        self._mismatch_barrier = ShmBarrier(
            control, layout.mismatch_barrier, member, ranks, policy, find_dead, stall_timeout
        )
        slots = data[layout.slots : layout.size].reshape(2, members.num_shards, SLOT_BYTES)
        #: `slots[parity][shard]`: uint8[SLOT_BYTES].
        self.slots = (slots[0], slots[1])
        common = data[layout.common : layout.slots].reshape(2, SLOT_BYTES)
        #: `common[parity]`: one slot for all members.
        self.common = (common[0], common[1])
        weights = data[layout.weights : layout.progress].view(np.float64).reshape(2, -1)
        self._weights = (weights[0][: members.num_shards], weights[1][: members.num_shards])
        self._directory = data[layout.directory :][: DIRECTORY_BYTES * members.size].reshape(members.size, -1)
        #: `scratch[member]`: uint8[SCRATCH_BYTES], where that member computes sums.
        self.scratch = data[layout.scratch : layout.common].reshape(members.size, SCRATCH_BYTES)
        #: Words of all members' progress, LINE // 8 for each; see `shm_reductions`.
        self.progress = as_words(data[layout.progress : layout.directory])
        #: Address of this member's progress word.
        self.progress_address = control.address + layout.progress + LINE * member
        self._buffers: list[Region] = []
        self._staging: Region | None = None
        self._common_region: Region | None = None

    # Synchronization

    def synchronize(self, signature: int, label: Callable[[], str], state: int | None = None) -> None:
        """Wait for all members. Raise Mismatch if another one calls something else, MemberLost.

        `state`: what compiled code that began this phase returned; None: nobody has begun it.
        """
        if not self.agree(signature, label, state):
            raise ExchangeError(
                "All ranks must pass the same buffer to one operation. "
                f"Received: different buffers for {label()}. Allocate buffers in the same order on all ranks"
            )

    def agree(self, signature: int, label: Callable[[], str], state: int | None = None) -> bool:
        """Wait for all members; return True if all came with the same `signature`.

        False: all called the same operation, but their arrays are in different places, so that it needs
        staging. `state` as for `synchronize`. Raises Mismatch if operations differ, MemberLost.
        """
        barrier = self.barrier
        try:
            if state is None:
                barrier.wait(signature)
            else:
                barrier.complete(state, signature)
        except SignatureMismatch:
            self._compare_labels(label())
            return False
        except MemberLost:
            self.make_buffers_private()
            raise
        self.wait_stats.seconds += barrier.waited
        self.wait_stats.last_rank = self.ranks[barrier.last]
        return True

    def record_last_rank(self) -> None:
        """Record who came last to a phase that compiled code did alone."""
        last = self._struct.last
        self.wait_stats.last_rank = self.ranks[self.member if last < 0 else last // MEMBER_WORDS]

    def _compare_labels(self, label: str) -> None:
        """Raise Mismatch if another member called something else. All members come here together: each writes
        what it called, and reads what the others called."""
        self._write_directory(label.encode()[:DIRECTORY_BYTES])
        self._mismatch_barrier.wait(0)
        called = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in self._directory]
        self._mismatch_barrier.wait(1)
        for member, other in enumerate(called):
            if other != label:
                raise mismatch_error(self.ranks[self.member], label, self.ranks[member], other)

    def _write_directory(self, text: bytes) -> None:
        row = self._directory[self.member]
        row[:] = np.frombuffer(text.ljust(DIRECTORY_BYTES, b"\0"), np.uint8)

    def set_stall_timeout(self, stall_timeout: float) -> None:
        """Set the seconds after which a member that doesn't arrive is evicted."""
        self.barrier.stall_timeout = self._mismatch_barrier.stall_timeout = stall_timeout

    def set_on_sleep(self, on_sleep: Callable[[int], None]) -> None:
        """Have `on_sleep` called regularly while this member sleeps, with the rank that it waits for."""
        self.barrier.on_sleep = self._mismatch_barrier.on_sleep = on_sleep

    # Weights

    def publish_weights(self, weights: Sequence[float] | None) -> None:
        """Write the weights of this member's shards, before the next phase."""
        if weights is not None:
            self._weights[(self.barrier.phase + 1) & 1][self.own_shards] = weights

    def read_factors(self, weights: Sequence[float] | None, dtype: np.dtype) -> list[np.generic] | None:
        """Return all shards' factors, after the phase that `weights` were published for. None: there are no
        weights, or all are 0."""
        if weights is None:
            return None
        return compute_factors(self._weights[self.barrier.phase & 1].tolist(), dtype)

    # Memory

    def allocate_buffer(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        """Return this member's part of a new buffer; see `Transport.allocate`."""
        region = self._allocate(size, keep)
        self._buffers.append(region)
        return region.parts[self.member]

    def find_buffer(self, array: np.ndarray) -> tuple[int, int] | None:
        """Return (number of the buffer, offset) where `array` begins, or None if it is in no buffer."""
        for number, region in enumerate(self._buffers):
            offset = region.find_offset(array)
            if offset is not None:
                return number, offset
        return None

    def get_buffer(self, number: int) -> Region:
        """Return the region of a buffer."""
        return self._buffers[number]

    def get_staging(self, row_bytes: int) -> Region:
        """Return the region for arrays from elsewhere, with room for each member's rows. All members call it
        together; it grows when needed."""
        count = max(1, len(self.own_shards))
        if self._staging is None or row_bytes > self._staging.size // count:
            self._staging = self._allocate(round_up(row_bytes, 4096) * count)
        return self._staging

    def get_common_memory(self, size: int) -> np.ndarray:
        """Return `size` bytes or more that all members may write to. All members call it together."""
        if self._common_region is None or self._common_region.size < size:
            self._common_region = self._allocate(round_up(size, 4096))
        return self._common_region.parts[0]

    def _allocate(self, size: int, keep: np.ndarray | None = None) -> Region:
        """Create a segment, hand it to all members and map theirs."""
        file = create("insitu-buffer", size)
        received = {self.member: (file, size)}
        segments: dict[int, Segment] = {}
        try:
            if keep is not None:
                fill(file, keep)
            received |= self._links.swap(
                file, size, lambda: self.synchronize(sign("buffer"), lambda: "buffer")
            )
            for member in range(self.members.size):
                theirs, length = received.pop(member)
                segments[member] = adopt(theirs, length, keep if member == self.member else None)
        finally:
            for theirs, _ in received.values():
                os.close(theirs)
        self.synchronize(sign("mapped"), lambda: "buffer")
        for segment in segments.values():
            segment.close_file()
        parts = tuple(segments[member].array() for member in range(self.members.size))
        return Region(parts, segments[self.member], size)

    # Loss

    def announce_loss(self, rank: int) -> None:
        """Report to all members that `rank`, on another host, was lost."""
        self.barrier.announce_loss(rank)
        self.make_buffers_private()

    def make_buffers_private(self) -> None:
        """Make this member's buffers private after a loss: a process that was stopped and wakes up later
        can't change them."""
        for region in self._buffers:
            region.own.make_private()

    def close(self) -> None:
        """Report to the others that this member leaves."""
        self.barrier.leave()
        self._mismatch_barrier.leave()
        self._links.close()
