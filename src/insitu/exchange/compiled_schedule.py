"""A schedule as `kernels.c` sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.exchange import native
from insitu.exchange.native import address_of, address_table
from insitu.exchange.plan import Schedule, Transfer

DONE, WAITING, AGREED, MISMATCH = 0, 1, 2, 3
"""The states that a call returns: all is done; a peer is late; all have agreed and the factors must be set; a
peer's header differs."""
PIECE_BYTES = 8192
"""Bytes that are summed at once: the sum stays in the first-level cache from one row to the next."""


class _Transfer(ctypes.Structure):
    """`struct transfer`."""

    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("gate", ctypes.c_uint64))


class _TransferQueue(ctypes.Structure):
    """`struct transfer_queue`."""

    _fields_ = (
        ("transfers", ctypes.POINTER(_Transfer)),
        *((name, ctypes.c_uint64) for name in ("count", "current", "offset")),
    )


class _Peer(ctypes.Structure):
    """`struct peer`."""

    _fields_ = (
        ("socket", ctypes.c_int64),
        ("ended", ctypes.c_uint64),
        ("preamble", ctypes.c_uint64),
        ("needs", ctypes.c_void_p),
        ("out", _TransferQueue),
        ("into", _TransferQueue),
    )


class _ScheduleStep(ctypes.Structure):
    """`struct step`."""

    _fields_ = (("out", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("length", ctypes.c_uint64))


class _Schedule(ctypes.Structure):
    """`struct schedule`."""

    _fields_ = (
        ("peers", ctypes.POINTER(_Peer)),
        ("peers_count", ctypes.c_uint64),
        ("steps", ctypes.POINTER(_ScheduleStep)),
        *((name, ctypes.c_uint64) for name in ("steps_count", "itemsize", "piece")),
        ("sum", native.Sum),
        ("header", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("header_bytes", "stop_when_agreed", "skip_steps", "in_place")),
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("bytes", "max_polls", "yields", "done", "agreed", "moved")),
        ("waited", ctypes.c_double),
        ("last", ctypes.c_int64),
        ("mismatched", ctypes.c_int64),
    )


class CompiledPeer:
    """The transfers under way with one peer; PendingTransfers for `TcpSession.sleep_until`."""

    def __init__(self, kernels: native.Kernels, connection: Any, schedule: _Schedule, number: int) -> None:
        self.connection = connection
        self._kernels, self._schedule, self._number = kernels, schedule, number
        self._peer = schedule.peers[number]

    def _is_open(self, queue: _TransferQueue) -> bool:
        current = queue.current
        return bool(current < queue.count and queue.transfers[current].gate <= self._schedule.done)

    @property
    def ended(self) -> bool:
        """See PendingTransfers."""
        return bool(self._peer.ended)

    @property
    def outgoing(self) -> bool:
        """See PendingTransfers."""
        return self._is_open(self._peer.out)

    @property
    def incoming(self) -> bool:
        """See PendingTransfers."""
        return self._is_open(self._peer.into)

    @property
    def idle(self) -> bool:
        """See PendingTransfers."""
        return not self.outgoing and not self.incoming

    def receive_some(self) -> bool:
        """See PendingTransfers."""
        return bool(self._kernels.receive_from(ctypes.addressof(self._schedule), self._number))


class CompiledSchedule:
    """One schedule for `kernels.run_schedule`. Keeps everything that it points to."""

    def __init__(
        self,
        kernels: native.Kernels,
        schedule: Schedule,
        connections: Sequence[Any],
        headers: tuple[np.ndarray, Sequence[np.ndarray]],
        total: native.Sum,
        poll_limit: tuple[int, bool],
    ) -> None:
        """Compile `schedule` for the connections to `schedule.peers`, in that order.

        `headers` are this member's own, and memory for those of the peers. `poll_limit`: how often to poll
        all connections before returning WAITING, and whether to yield the processor in between.
        """
        self._kept: list[Any] = [schedule, connections, headers]
        own, theirs = headers
        header_gate = int(schedule.delay_header)
        peers = (_Peer * len(connections))()
        for struct, peer, connection, header in zip(peers, schedule.peers, connections, theirs, strict=True):
            struct.socket, struct.preamble = connection.fileno(), schedule.preamble[peer]
            needs = np.array([step.needs[peer] for step in schedule.steps], np.uint64)
            struct.needs = address_of(self._keep(needs))
            struct.out = self._make_queue([Transfer(own, header_gate), *schedule.sends[peer]])
            struct.into = self._make_queue([Transfer(header), *schedule.receives[peer]])
        steps = (_ScheduleStep * len(schedule.steps))()
        for place, step in zip(steps, schedule.steps, strict=True):
            rows = self._keep(address_table(step.rows))
            place.out, place.rows, place.length = address_of(step.out), address_of(rows), step.out.size
        #: The structure that compiled code reads and writes.
        self.struct = _Schedule(
            peers=peers, peers_count=len(peers), steps=steps, steps_count=len(steps), sum=total
        )
        self.struct.header, self.struct.header_bytes = address_of(own), own.nbytes
        self.struct.in_place = schedule.in_place
        self.struct.max_polls, self.struct.yields = poll_limit
        if schedule.steps:
            self.struct.itemsize = schedule.steps[0].out.itemsize
            self.struct.piece = PIECE_BYTES // self.struct.itemsize
        #: The address of `struct`.
        self.address = ctypes.addressof(self.struct)
        #: The transfers with each peer.
        self.peers = [CompiledPeer(kernels, c, self.struct, number) for number, c in enumerate(connections)]

    def set_copy_at_end(self, source: np.ndarray, target: np.ndarray) -> None:
        """Have `source` copied to `target` at the end."""
        self.struct.source, self.struct.target = address_of(source), address_of(target)
        self.struct.bytes = target.nbytes

    def _keep(self, array: np.ndarray) -> np.ndarray:
        self._kept.append(array)
        return array

    def _make_queue(self, transfers: Sequence[Transfer]) -> _TransferQueue:
        places = (_Transfer * len(transfers))()
        for place, transfer in zip(places, transfers, strict=True):
            place.at, place.bytes, place.gate = address_of(transfer.data), transfer.data.nbytes, transfer.gate
        return _TransferQueue(places, len(places), 0, 0)
