"""Runs a schedule many times: in compiled code where there is a compiler, else in Python.

Both give the same bits and send the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from insitu.exchange import native
from insitu.exchange.compiled_schedule import AGREED, MISMATCH, WAITING, CompiledSchedule
from insitu.exchange.plan import Factors, Reducer, Reduction, Schedule, ScheduleStep, compute_factors
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
