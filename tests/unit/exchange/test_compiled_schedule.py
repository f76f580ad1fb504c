"""A schedule as compiled code sees it."""

from __future__ import annotations

import socket

import numpy as np

from insitu.exchange import native
from insitu.exchange.plan.schedule import Schedule, ScheduleStep, Transfer
from insitu.exchange.schedule_runner import DONE, WAITING, CompiledSchedule


def test_transfers_are_open_once_their_gate_is_passed() -> None:
    """One peer sends a row; the sum is sent back after the step."""
    kernels = native.load_kernels()
    own, received, total = np.ones(4, np.float32), np.empty(4, np.float32), np.empty(4, np.float32)
    step = ScheduleStep([own, received], total, {1: 2})
    schedule = Schedule({1: [Transfer(total, 1)]}, {1: [Transfer(received)]}, {1: 1}, [step])
    header = np.arange(16, dtype=np.uint8)
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        sum_ = native.describe_sum("sum", own.dtype, 2, None)
        headers = (header.copy(), [np.zeros_like(header)])
        compiled = CompiledSchedule(kernels, schedule, [here], headers, sum_, (3, False))
        (peer,) = compiled.peers
        assert kernels.run_schedule(compiled.address, 7) == WAITING
        assert not peer.outgoing and peer.incoming and not peer.idle and not peer.ended
        sent = there.recv(100)
        assert int.from_bytes(sent[4:12], "big") == 7, "the number of the operation is part of the header"
        there.sendall(sent + np.full(4, 2, np.float32).tobytes())
        assert kernels.resume_schedule(compiled.address, 0) == DONE
        assert np.frombuffer(there.recv(100), np.float32).tolist() == [3.0] * 4
        assert peer.idle
