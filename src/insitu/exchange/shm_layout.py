"""Where things lie in the memory that members of one host share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from insitu.exchange.memory import Segment
from insitu.exchange.plan import SCRATCH_BYTES
from insitu.exchange.shm_barrier import LINE, meeting_bytes

SLOT_BYTES = 64 * 1024
"""Room of a slot."""
DIRECTORY_BYTES = 256
"""Per member: where its new segment is, or what it came for, in words."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where things lie in the control segment that all members map. All values are byte offsets."""

    members: int
    shards: int

    @property
    def weights(self) -> int:
        return 2 * round_up(meeting_bytes(self.members))

    @property
    def work(self) -> int:
        """Two words per member: how far it is with its part, and how far the others are who finish it."""
        return self.weights + 2 * round_up(8 * self.shards)

    @property
    def directory(self) -> int:
        return self.work + LINE * self.members

    @property
    def scratch(self) -> int:
        return round_up(self.directory + DIRECTORY_BYTES * self.members, 4096)

    @property
    def common(self) -> int:
        return self.scratch + SCRATCH_BYTES * self.members

    @property
    def slots(self) -> int:
        return self.common + 2 * SLOT_BYTES

    @property
    def size(self) -> int:
        return self.slots + 2 * self.shards * SLOT_BYTES


def round_up(size: int, unit: int = LINE) -> int:
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that all members made together: `parts[m]` is that of member m, mapped here. `compiled`: all of
    them have compiled code, so that they agree on the size of pieces."""

    parts: tuple[np.ndarray, ...]
    own: Segment
    size: int
    compiled: bool

    def offset_of(self, array: np.ndarray) -> int | None:
        """Where in this member's part `array` begins, or None where it doesn't lie in it."""
        start = array.__array_interface__["data"][0] - self.own.address
        return start if start >= 0 and start + max(array.nbytes, 1) <= self.size else None
