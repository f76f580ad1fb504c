"""The transport between processes of one host: shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from insitu.exchange.plan import ReducePlan, Reduction, RunReduction, WaitStats, split_chunks
from insitu.exchange.shm_layout import SLOT_BYTES
from insitu.exchange.shm_reductions import (
    StagedReduction,
    copy_rows,
    prepare_buffer_reduction,
    prepare_slot_reduction,
)
from insitu.exchange.shm_session import ShmSession, sign

_SMALL_BYTES = 8 * 1024
"""Rows up to this size are reduced through the slots. There each member reads all rows; for larger ones that
costs more than a second barrier."""


class SharedMemoryTransport:
    """A Transport for members of one host."""

    name = "shm"

    def __init__(self, session: ShmSession) -> None:
        self.session = session

    @property
    def wait_stats(self) -> WaitStats:
        """How long this process has waited for others."""
        return self.session.wait_stats

    def allocate(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        """See Transport."""
        return self.session.allocate_buffer(size, keep)

    def prepare(self, reduction: Reduction) -> RunReduction:
        """See Transport."""
        if reduction.row_bytes <= _SMALL_BYTES:
            return prepare_slot_reduction(self.session, reduction).run
        location = self._find_buffer(reduction)
        if location is None:
            return StagedReduction(self.session, reduction, sign(str(reduction))).run
        return prepare_buffer_reduction(self.session, reduction, *location).run

    def _find_buffer(self, reduction: Reduction) -> tuple[int, int] | None:
        return self.session.find_buffer(reduction.rows[0] if reduction.rows else reduction.result)

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray, label: str) -> None:
        """See Transport."""
        session, signature = self.session, sign(label)
        for low, high in split_chunks(0, out.shape[1], SLOT_BYTES) or [(0, 0)]:
            slots = session.slots[(session.barrier.phase + 1) & 1]
            for shard, row in zip(session.own_shards, rows, strict=True):
                slots[shard, : high - low] = row[low:high]
            session.synchronize(signature, lambda: label)
            out[:, low:high] = slots[:, : high - low]

    def broadcast(self, data: np.ndarray, root: int, label: str) -> None:
        """See Transport."""
        session = self.session
        if len(data) <= SLOT_BYTES:
            source = session.common[(session.barrier.phase + 1) & 1][: len(data)]
        else:
            session.synchronize(sign(label), lambda: label)
            source = session.get_staging(len(data)).parts[root][: len(data)]
        if session.member == root:
            source[...] = data
        session.synchronize(sign(label + " ready"), lambda: label)
        if session.member != root:
            data[...] = source

    def close(self) -> None:
        """See Transport."""
        self.session.close()

    # For the transport over several hosts

    def synchronize(self, label: str) -> None:
        """Wait for all members."""
        self.session.synchronize(sign(label), lambda: label)

    def map_rows(self, reduction: Reduction) -> tuple[object, list[np.ndarray], np.ndarray]:
        """Return all members' rows in shared memory, and memory for the result.

        The first value changes if and only if the others do; the second are all shards' rows; the third is
        one row that all members share. Rows are copied if not all members' are at the same place in one
        buffer.
        """
        session = self.session
        location = self._find_buffer(reduction)
        same = session.agree(sign(f"{reduction} {location}"), reduction.__str__)
        common = session.get_common_memory(reduction.row_bytes)
        if same and location is not None:
            region, offset = session.get_buffer(location[0]), location[1]
        else:
            region, offset = session.get_staging(reduction.row_bytes), 0
            copy_rows(session, reduction, region)
            session.synchronize(sign("copied in"), reduction.__str__)
        parts = [part[offset:] for part in region.parts]
        plan = ReducePlan(reduction, session.members, parts, session.scratch)
        return (region, common), plan.rows, common[: reduction.row_bytes].view(reduction.dtype)
