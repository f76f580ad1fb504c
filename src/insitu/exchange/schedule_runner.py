"""Runs a schedule many times: in compiled code, or in Python if it is encrypted or of half precision.

Both give the same bits and send the same bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.exchange import native
from insitu.exchange.native import address_of, address_table
from insitu.exchange.plan import (
    Factors,
    Reducer,
    Reduction,
    Schedule,
    ScheduleStep,
    Transfer,
    compute_factors,
)
from insitu.exchange.tcp_session import TcpSession, as_bytes


class ScheduleRunner:
    """One reduction over TCP.

    `run` returns False if all weights were 0. Then the result is undefined; if it is computed elsewhere, it
    isn't copied to its target.
    """

    def __init__(
        self, session: TcpSession, reduction: Reduction, reducer: Reducer, schedule: Schedule
    ) -> None:
        self._session = session
        self._reduction = reduction
        self._reducer = reducer
        self._schedule = schedule
        self._label = str(reduction)
        self._weighted = reduction.op == "weighted_mean"
        self._peers = schedule.peers
        self._compiled: CompiledSchedule | None = None
        kernels = session.kernels
        if kernels is not None and native.supports(reduction.dtype) and schedule.peers:
            self._compile(kernels)

    def _compile(self, kernels: native.Kernels) -> None:
        session, schedule, dtype = self._session, self._schedule, self._reduction.dtype
        shards = session.members.num_shards
        self._factors = np.zeros(shards) if self._weighted else None
        total = native.describe_sum(self._reduction.op, dtype, shards, self._factors)
        connections = [session.channel(peer).connection for peer in schedule.peers]
        headers = session.make_headers(self._label, schedule.peers)
        compiled = CompiledSchedule(kernels, schedule, connections, headers, total, session.poll_limit)
        self._compiled = compiled
        compiled.struct.stop_when_agreed = self._weighted and bool(schedule.steps)
        if schedule.copy_at_end is not None and not self._weighted:
            compiled.set_copy_at_end(*schedule.copy_at_end)
        hold = self._reduction.row_bytes <= native.HOLD_GIL_BYTES and not session.threads
        self._start = kernels.run_schedule if hold else kernels.run_schedule_nogil
        self._resume = kernels.resume_schedule if hold else kernels.resume_schedule_nogil
        self._headers = headers

    def run(self, weights: Sequence[float] | None) -> bool:
        """Reduce; see RunReduction."""
        if weights is not None:
            self._session.get_weights(self._session.members.rank)[:] = weights
        compiled = self._compiled
        if compiled is None:
            defined = self._run_in_python()
        else:
            self._run_compiled(compiled)
            if weights is None:
                return True
            defined = self._compute_factors() is not None
        if defined and self._schedule.copy_at_end is not None:
            source, target = self._schedule.copy_at_end
            np.copyto(target, source)
        return defined

    def _compute_factors(self) -> Factors | None:
        return compute_factors(self._session.collect_weights(), self._reduction.dtype)

    # In compiled code

    def _run_compiled(self, compiled: CompiledSchedule) -> None:
        session, stats = self._session, self._session.wait_stats
        state = self._start(compiled.address, session.next_sequence())
        if state:
            self._handle_state(compiled, state)
        stats.seconds += compiled.struct.waited
        last = compiled.struct.last
        stats.last_rank = session.get_rank(self._peers[last] if last >= 0 else session.members.rank)

    def _handle_state(self, compiled: CompiledSchedule, state: int) -> None:
        """Run the rest of an operation that compiled code left with `state`. Raises MemberLost, Mismatch."""
        while state:
            if state == MISMATCH:
                number = compiled.struct.mismatched
                raise self._session.report_mismatch(
                    self._peers[number],
                    self._headers[0].tobytes(),
                    self._headers[1][number].tobytes(),
                )
            if state == AGREED:
                factors = self._compute_factors()
                compiled.struct.skip_steps, compiled.struct.stop_when_agreed = factors is None, False
                if factors is not None and self._factors is not None:
                    self._factors[:] = factors
                state = self._resume(compiled.address, 0)
                compiled.struct.stop_when_agreed = True
            elif state == WAITING:
                state = self._sleep(compiled)

    def _sleep(self, compiled: CompiledSchedule) -> int:
        """Sleep and resume until the state is another one than WAITING; return it."""
        state = WAITING

        def resume() -> tuple[bool, bool]:
            nonlocal state
            state = self._resume(compiled.address, 0)
            return state != WAITING, bool(compiled.struct.moved)

        self._session.sleep_until(dict(zip(self._peers, compiled.peers, strict=True)), resume)
        return state

    # In Python

    def _run_in_python(self) -> bool:
        """Return False if all weights were 0."""
        session, schedule, steps = self._session, self._schedule, self._schedule.steps
        session.begin(self._label, schedule.preamble)
        sends, receives = (
            {peer: iter(queue) for peer, queue in queues.items()}
            for queues in (schedule.sends, schedule.receives)
        )
        next_send = {peer: next(queue, None) for peer, queue in sends.items()}
        next_receive = {peer: next(queue, None) for peer, queue in receives.items()}
        done, agreed = 0, False
        factors: Factors | None = None

        def queue_transfers() -> None:
            """Queue the transfers whose gate is open."""
            for peer in schedule.peers:
                channel = session.channel(peer)
                while (transfer := next_send[peer]) is not None and transfer.gate <= done:
                    channel.send(as_bytes(transfer.data))
                    next_send[peer] = next(sends[peer], None)
                while (transfer := next_receive[peer]) is not None and transfer.gate <= done:
                    channel.receive(as_bytes(transfer.data))
                    next_receive[peer] = next(receives[peer], None)

        def advance() -> bool:
            """Run the steps that can be run; return True when all is done."""
            nonlocal done, agreed, factors
            if not agreed:
                agreed = session.have_agreed()
                if not agreed:
                    return False
                factors = self._compute_factors() if self._weighted and steps else None
            before = done
            while done < len(steps) and self._is_ready(steps[done]):
                if factors is not None or not self._weighted:
                    self._reducer.reduce(steps[done].rows, steps[done].out, factors)
                done += 1
            if done != before:
                queue_transfers()
            return done == len(steps) and session.is_idle()

        queue_transfers()
        session.run_until(advance)
        return not self._weighted or self._compute_factors() is not None

    def _is_ready(self, step: ScheduleStep) -> bool:
        session = self._session
        if any(session.channel(peer).received < count for peer, count in step.needs.items()):
            return False
        return not self._schedule.in_place or session.is_idle()


# A schedule as `kernels.c` sees it


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
