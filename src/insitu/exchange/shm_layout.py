"""The layout of the memory that the members of one host share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from insitu.exchange.memory import Segment
from insitu.exchange.plan import SCRATCH_BYTES
from insitu.exchange.shm_barrier import LINE, count_barrier_bytes

SLOT_BYTES = 64 * 1024
"""Bytes of a slot."""
DIRECTORY_BYTES = 256
"""Bytes of a member's directory entry: where its new segment is, or which operation it called, as text."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Byte offsets in the control segment that all members map.

    It holds, in this order: two barriers, the weights, the members' progress, the directory, the scratch
    memory, two common slots, and the slots of all shards. Memory with two halves has one for even and one for
    odd phases of the barrier.
    """

    #: The number of members.
    members: int
    #: The number of shards of all members together.
    shards: int

    @property
    def mismatch_barrier(self) -> int:
        """The second barrier, where members compare operations that differ. The first one is at 0."""
        return round_up(count_barrier_bytes(self.members))

    @property
    def weights(self) -> int:
        """float64[2, shards], rounded up to cache lines."""
        return 2 * self.mismatch_barrier

    @property
    def progress(self) -> int:
        """A cache line per member: how far it is with its part, and how far those are who finish it."""
        return self.weights + 2 * round_up(8 * self.shards)

    @property
    def directory(self) -> int:
        """DIRECTORY_BYTES per member."""
        return self.progress + LINE * self.members

    @property
    def scratch(self) -> int:
        """SCRATCH_BYTES per member."""
        return round_up(self.directory + DIRECTORY_BYTES * self.members, 4096)

    @property
    def common(self) -> int:
        """Two slots that the root of a broadcast writes."""
        return self.scratch + SCRATCH_BYTES * self.members

    @property
    def slots(self) -> int:
        """Two slots per shard."""
        return self.common + 2 * SLOT_BYTES

    @property
    def size(self) -> int:
        """Bytes of the whole segment."""
        return self.slots + 2 * self.shards * SLOT_BYTES


def round_up(size: int, unit: int = LINE) -> int:
    """Return the smallest multiple of `unit` that is not less than `size`."""
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that all members allocated together and mapped."""

    #: `parts[m]` is the part of member m, mapped here.
    parts: tuple[np.ndarray, ...]
    #: The segment of this member's own part.
    own: Segment
    #: Bytes of this member's own part.
    size: int

    def find_offset(self, array: np.ndarray) -> int | None:
        """Return the offset of `array` in this member's part, or None if it is elsewhere."""
        start = array.__array_interface__["data"][0] - self.own.address
        return start if start >= 0 and start + max(array.nbytes, 1) <= self.size else None
