"""Performs a schedule again and again: in compiled code where that can be had, else in Python, to the same
bits and with the same bytes on the wire."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from insitu.exchange import native
from insitu.exchange.arithmetic import Factors, Reducer, coefficients
from insitu.exchange.compiled_schedule import AGREED, DIFFERENT, WAITING, CompiledSchedule
from insitu.exchange.schedule import Schedule, ScheduleStep
from insitu.exchange.tcp_session import TcpSession, as_bytes
from insitu.exchange.transport import Reduction

_BRIEF_BYTES = 256 * 1024
"""Rows up to this size are reduced without letting other threads run."""


class ScheduleRunner:
    """One reduction over a stream. `run` returns False where all weights were 0: then the result means
    nothing and, where it was put together elsewhere, isn't copied to its place."""

    def __init__(
        self, stream: TcpSession, reduction: Reduction, reducer: Reducer, schedule: Schedule
    ) -> None:
        self._stream = stream
        self._reduction = reduction
        self._reducer = reducer
        self._schedule = schedule
        self._text = str(reduction)
        self._weighted = reduction.op == "weighted_mean"
        self._peers = schedule.peers
        self._wire: CompiledSchedule | None = None
        kernels = stream.kernels
        if kernels is not None and native.supports(reduction.dtype) and schedule.peers:
            self._prepare(kernels)

    def _prepare(self, kernels: native.Kernels) -> None:
        stream, schedule, dtype = self._stream, self._schedule, self._reduction.dtype
        shards = stream.members.num_shards
        self._factors = np.zeros(shards) if self._weighted else None
        total = native.sum_of(self._reduction.op, dtype, shards, self._factors)
        connections = [stream.channel(peer).connection for peer in schedule.peers]
        headers = stream.new_headers(self._text, schedule.peers)
        self._wire = wire = CompiledSchedule(kernels, schedule, connections, headers, total, stream.looks)
        wire.round.pauses = self._weighted and bool(schedule.steps)
        if schedule.deliver is not None and not self._weighted:
            wire.copy_at_the_end(*schedule.deliver)
        brief = self._reduction.row_bytes <= _BRIEF_BYTES and not stream.threads
        self._begin = kernels.round if brief else kernels.long_round
        self._go_on = kernels.round_on if brief else kernels.long_round_on
        self._headers = headers

    def run(self, weights: Sequence[float] | None) -> bool:
        if weights is not None:
            self._stream.weights_of(self._stream.members.rank)[:] = weights
        wire = self._wire
        if wire is None:
            meant = self._perform()
        else:
            self._compiled(wire)
            if weights is None:
                return True
            meant = self.factors() is not None
        if meant and self._schedule.deliver is not None:
            source, target = self._schedule.deliver
            np.copyto(target, source)
        return meant

    def factors(self) -> Factors | None:
        return coefficients(self._stream.weights(), self._reduction.dtype)

    # In compiled code

    def _compiled(self, wire: CompiledSchedule) -> None:
        stream, account = self._stream, self._stream.account
        state = self._begin(wire.address, stream.count())
        if state:
            self._see_to(wire, state)
        account.waiting += wire.round.waited
        last = wire.round.last
        account.last = stream.rank_of(self._peers[last] if last >= 0 else stream.members.rank)

    def _see_to(self, wire: CompiledSchedule, state: int) -> None:
        """Whatever it came back with before it was through. Raises MemberLost, Mismatch."""
        while state:
            if state == DIFFERENT:
                number = wire.round.different
                raise self._stream.mismatch(
                    self._peers[number],
                    self._headers[0].tobytes(),
                    self._headers[1][number].tobytes(),
                )
            if state == AGREED:
                factors = self.factors()
                wire.round.skips, wire.round.pauses = factors is None, False
                if factors is not None and self._factors is not None:
                    self._factors[:] = factors
                state = self._go_on(wire.address, 0)
                wire.round.pauses = True
            elif state == WAITING:
                state = self._wait(wire)

    def _wait(self, wire: CompiledSchedule) -> int:
        """Sleeps until there is something to do, and goes on; until it isn't waiting any more."""
        state = WAITING

        def move() -> tuple[bool, bool]:
            nonlocal state
            state = self._go_on(wire.address, 0)
            return state != WAITING, bool(wire.round.moved)

        self._stream.attend(dict(zip(self._peers, wire.lines, strict=True)), move)
        return state

    # In Python

    def _perform(self) -> bool:
        """Whether the weights mean anything."""
        stream, schedule, steps = self._stream, self._schedule, self._schedule.steps
        stream.begin(self._text, schedule.greeting)
        out, into = ({peer: iter(flow) for peer, flow in f.items()} for f in (schedule.out, schedule.into))
        next_out = {peer: next(flow, None) for peer, flow in out.items()}
        next_into = {peer: next(flow, None) for peer, flow in into.items()}
        done, agreed = 0, False
        factors: Factors | None = None

        def open_up() -> None:
            for peer in schedule.peers:
                channel = stream.channel(peer)
                while (segment := next_out[peer]) is not None and segment.gate <= done:
                    channel.send(as_bytes(segment.data))
                    next_out[peer] = next(out[peer], None)
                while (segment := next_into[peer]) is not None and segment.gate <= done:
                    channel.receive(as_bytes(segment.data))
                    next_into[peer] = next(into[peer], None)

        def step() -> bool:
            nonlocal done, agreed, factors
            if not agreed:
                agreed = stream.agreed()
                if not agreed:
                    return False
                factors = self.factors() if self._weighted and steps else None
            before = done
            while done < len(steps) and self._has_come(steps[done]):
                if factors is not None or not self._weighted:
                    self._reducer.reduce(steps[done].rows, steps[done].out, factors)
                done += 1
            if done != before:
                open_up()
            return done == len(steps) and stream.idle()

        open_up()
        stream.pump(step)
        return not self._weighted or self.factors() is not None

    def _has_come(self, step: ScheduleStep) -> bool:
        stream = self._stream
        if any(stream.channel(peer).received < count for peer, count in step.needs.items()):
            return False
        return not self._schedule.in_place or stream.idle()
