"""A peer dies, stops or leaves: the others hear of it, in time, and by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from exchange_ranks import SECRET, Rank, ranks, without_main
from numpy_reference import step_through_sums, sums_in_python

from insitu import exchange
from insitu.base.errors import ExchangeError, JoinTimeout, PeerLost
from insitu.cluster.chaos.injector import blackhole_connections
from insitu.exchange.shm import SharedMemoryTransport
from insitu.exchange.tcp import TcpTransport

NAMES = ["worker:0", "worker:1", "worker:2"]
VICTIM = 1
TRANSPORTS = ["shm", "tcp"]


def _reduce_for_ever(
    pipe: Any, rank: int, addresses: list[str], size: int, transport: str, stall: float
) -> Any:
    group = exchange.join(
        rank,
        addresses,
        secret=SECRET,
        tasks=NAMES,
        stall_timeout=stall,
        transport=transport,  # type: ignore[arg-type]
    )
    with group:
        buffer = group.buffer(size, np.float32)
        before = 0.0
        while True:
            buffer[:] = before = float(group.last_completed + 2)
            try:
                group.all_reduce(buffer)
            except PeerLost as lost:
                whole = bool((buffer == buffer[0]).all())
                after = float(buffer[0])
                with pytest.raises(ExchangeError, match="broken"):
                    group.barrier()
                return lost, group.last_completed, (whole, before, after)
            if group.last_completed == 20:
                pipe.send(("ready", None))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [100, 300_000], ids=["small", "large"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_survivors_get_peer_lost(how: signal.Signals, size: int, transport: str) -> None:
    stall = 2.0 if how is signal.SIGSTOP else 600.0
    with ranks(3, _reduce_for_ever, size, transport, stall) as processes:
        for process in processes:
            process.receive()
        os.kill(processes[VICTIM].pid, how)
        for survivor in (processes[0], processes[2]):
            lost, completed, (whole, before, after) = survivor.result()
            assert (lost.rank, lost.task, lost.operation) == (VICTIM, "worker:1", "all_reduce")
            assert lost.sequence > 20
            assert lost.last_completed == completed
            assert whole
            assert after == (3 * before if completed == lost.sequence else before)


def test_death_on_one_host_is_seen_without_a_connection() -> None:
    with ranks(3, _reduce_for_ever, 100, "shm", 600.0) as processes:
        for process in processes:
            process.receive()
        # What is sent to them doesn't arrive, and nobody is told.
        try:
            assert all(blackhole_connections(process.pid) for process in processes)
        except PermissionError as error:
            pytest.skip(f"packet filters are kept from users here: {error}")
        os.kill(processes[VICTIM].pid, signal.SIGKILL)
        for survivor in (processes[0], processes[2]):
            lost, _, (whole, _, _) = survivor.result()
            assert (lost.rank, lost.task) == (VICTIM, "worker:1") and whole


def _reduce_with_algorithm(
    pipe: Any, rank: int, addresses: list[str], size: int, algorithm: str, compiled: bool
) -> Any:
    from insitu.exchange import tcp

    tcp.choose_algorithm = lambda *_: algorithm  # type: ignore[assignment,return-value]
    with sums_in_python(lambda: not compiled):
        return _reduce_for_ever(pipe, rank, addresses, size, "tcp", 600.0)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("size", [100, 100_000], ids=["small", "middle"])
@pytest.mark.parametrize("algorithm", ["gather", "star", "direct"])
def test_survivors_get_peer_lost_with_each_algorithm(
    algorithm: str, size: int, victim: int, compiled: bool
) -> None:
    with ranks(3, _reduce_with_algorithm, size, algorithm, compiled) as processes:
        for process in processes:
            process.receive()
        os.kill(processes[victim].pid, signal.SIGKILL)
        for rank in {0, 1, 2} - {victim}:
            lost, completed, (whole, before, after) = processes[rank].result()
            assert lost.rank == victim
            assert whole
            assert after == (3 * before if completed == lost.sequence else before)


def _answer_half(pipe: Any, rank: int, addresses: list[str], compiled: bool) -> Any:
    """Rank 0 adds up for all, and dies when it has sent half of a sum."""
    from insitu.exchange import peer_connections, tcp

    tcp.choose_algorithm = lambda *_: "star"  # type: ignore[assignment,return-value]
    in_python = sums_in_python(lambda: not compiled or rank == 0)
    with in_python, exchange.join(rank, addresses, secret=SECRET, transport="tcp") as group:
        buffer = group.buffer(25_000, np.float32)
        buffer[:] = np.arange(25_000) + rank
        before = buffer.copy()
        whole = peer_connections.DataChannel.send_some

        def send_some(channel: peer_connections.DataChannel) -> bool:
            if channel.sent and channel.outgoing:  # after the header
                channel.connection.send(channel.outgoing[0][: len(channel.outgoing[0]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(channel)

        if rank == 0:
            peer_connections.DataChannel.send_some = send_some  # type: ignore[method-assign]
        with pytest.raises(PeerLost) as caught:
            group.all_reduce(buffer)
        return caught.value.rank, group.last_completed < caught.value.sequence, bool((buffer == before).all())


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
def test_half_a_received_sum_leaves_the_rows_unchanged(compiled: bool) -> None:
    with ranks(3, _answer_half, compiled) as processes:
        assert processes[1].result() == (0, True, True)
        assert processes[2].result() == (0, True, True)
        processes[0].process.join(30)
        assert processes[0].process.exitcode == -signal.SIGKILL, "the fault wasn't injected"


def _leave_early(pipe: Any, rank: int, addresses: list[str], transport: str) -> Any:
    with exchange.join(rank, addresses, secret=SECRET, tasks=NAMES[:2], transport=transport) as group:  # type: ignore[arg-type]
        group.barrier()
        if rank == VICTIM:
            return None
        with pytest.raises(PeerLost, match="worker:1 left the group") as caught:
            group.barrier()
        return caught.value.rank


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_peer_lost_names_a_peer_that_leaves(transport: str) -> None:
    with ranks(2, _leave_early, transport) as processes:
        assert [process.result() for process in processes] == [VICTIM, None]


def _recover(pipe: Any, rank: int, addresses: list[str], transport: str, replacement: bool = False) -> Any:
    """Reduces until a peer is lost, then continues with its replacement, in the same buffers."""
    generation = 7 if replacement else 3
    with exchange.join(
        rank,
        addresses,
        secret=SECRET,
        tasks=NAMES,
        transport=transport,
        generation=generation,  # type: ignore[arg-type]
    ) as group:
        buffers = [group.buffer(size, np.float32) for size in (50, 200_000)]
        survived = False
        if not replacement:
            try:
                while True:
                    buffers[0][:] = buffers[1][:] = rank
                    group.all_reduce(buffers[0])
                    group.all_reduce(buffers[1])
                    if group.last_completed == 21:
                        pipe.send(("ready", None))
            except PeerLost:
                survived = True
            buffers[1][:] = 100 + rank
            group.rejoin(7)
        else:
            buffers[1][:] = 100 + rank
        assert group.generation == 7
        for _ in range(3):
            buffers[0][:] = rank
            group.all_reduce(buffers[0])
        group.all_reduce(buffers[1])
        assert (buffers[0] == 3).all()
        assert (buffers[1] == 303).all()
        return survived, group.last_completed


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_survivors_continue_with_a_replacement(transport: str) -> None:
    with ranks(3, _recover, transport) as processes:
        for process in processes:
            process.receive()
        os.kill(processes[VICTIM].pid, signal.SIGKILL)
        with without_main():
            new = Rank(_recover, (VICTIM, processes[VICTIM].arguments[1], transport, True))
        try:
            assert processes[0].result() == processes[2].result() == (True, 5)
            assert new.result() == (False, 5)
        finally:
            new.end()


def _die_at(place: str, piece: int) -> None:
    """Makes this process kill itself in the middle of its part of the next large reduction: while it sums a
    piece, or when it has copied half of the sum over the first member's rows."""
    from insitu.exchange import shm_reductions
    from insitu.exchange.plan.arithmetic import Reducer

    seen = 0

    class Summing(Reducer):
        def bind(self, rows: Any, out: Any) -> Any:
            return lambda factors: self.reduce(rows, out, factors)

        def reduce(self, rows: Any, out: Any, factors: Any = None) -> None:
            nonlocal seen
            super().reduce(rows, out, factors)
            seen += 1
            if place == "summing" and seen == piece + 1:
                out[len(out) // 2 :] = np.nan
                os.kill(os.getpid(), signal.SIGKILL)

    def copy_to_targets(total: Any, targets: Any) -> None:
        if place == "copying" and seen == piece + 1:
            targets[0][: len(total) // 2] = total[: len(total) // 2]
            os.kill(os.getpid(), signal.SIGKILL)
        whole(total, targets)

    whole = shm_reductions.copy_to_targets
    shm_reductions.Reducer = Summing  # type: ignore[misc]
    shm_reductions.copy_to_targets = copy_to_targets


def _lose_one_in_the_middle(
    pipe: Any, rank: int, addresses: list[str], place: str, piece: int, compiled: bool
) -> Any:
    if rank == VICTIM or not compiled:
        step_through_sums()
    if rank == VICTIM:
        _die_at(place, piece)
    with exchange.join(rank, addresses, secret=SECRET, transport="shm") as group:
        buffer = group.buffer(2_000_000, np.float32)
        buffer[:] = np.arange(2_000_000) % 1000 + rank
        with pytest.raises(PeerLost) as caught:
            group.all_reduce(buffer)
        want = 3 * (np.arange(2_000_000) % 1000) + 3
        return caught.value.rank, group.last_completed == caught.value.sequence, bool((buffer == want).all())


@pytest.mark.parametrize("place", ["summing", "copying"])
@pytest.mark.parametrize(("piece", "compiled"), [(0, True), (2, False), (2, True)])
def test_survivors_finish_the_part_of_a_lost_member(place: str, piece: int, compiled: bool) -> None:
    with ranks(3, _lose_one_in_the_middle, place, piece, compiled) as processes:
        assert processes[0].result() == (VICTIM, True, True)
        assert processes[2].result() == (VICTIM, True, True)
        processes[VICTIM].process.join(30)
        assert processes[VICTIM].process.exitcode == -signal.SIGKILL, "the fault wasn't injected"


def _come_late_to_the_barrier(pipe: Any, rank: int, addresses: list[str]) -> Any:
    """Rank 1 dies at work; rank 2 learns of it when it still has to see that all came to begin."""
    from insitu.exchange.shm_barrier import ShmBarrier

    with exchange.join(rank, addresses, secret=SECRET, transport="shm") as group:
        if rank == VICTIM:
            _die_at("summing", 0)
            step_through_sums()
        buffer = group.buffer(500_000, np.float32)
        buffer[:] = rank
        wait = ShmBarrier._wait_for_missing

        def slowly(self: ShmBarrier, word: int, excused: Any) -> None:
            pipe.send(("waits", None))
            wait(self, word, excused)
            deadline = time.monotonic() + 30
            while not self._words[self._loss_flag]:
                assert time.monotonic() < deadline, "nobody was evicted"
            ShmBarrier._wait_for_missing = wait  # type: ignore[method-assign]

        if rank == 2:
            ShmBarrier._wait_for_missing = slowly  # type: ignore[method-assign]
        else:
            pipe.recv()
        with pytest.raises(PeerLost) as caught:
            group.all_reduce(buffer)
        whole = bool((buffer == 3).all())
        return caught.value.rank, group.last_completed == caught.value.sequence, whole


def test_member_that_sees_a_loss_before_its_part_still_takes_part() -> None:
    with ranks(3, _come_late_to_the_barrier) as processes:
        processes[2].receive()
        processes[0].send("go")
        processes[VICTIM].send("go")
        assert processes[0].result() == (VICTIM, True, True)
        assert processes[2].result() == (VICTIM, True, True)
        processes[VICTIM].process.join(30)
        assert processes[VICTIM].process.exitcode == -signal.SIGKILL, "the fault wasn't injected"


def _stopped_while_forming(pipe: Any, rank: int, addresses: list[str], transport: str) -> Any:
    if rank == 1:
        measure, allocate = TcpTransport._measure_costs, SharedMemoryTransport.allocate

        def stop(transport: Any, *arguments: Any) -> Any:
            pipe.send(("forming", None))
            os.kill(os.getpid(), signal.SIGSTOP)
            return (measure if isinstance(transport, TcpTransport) else allocate)(transport, *arguments)

        TcpTransport._measure_costs = SharedMemoryTransport.allocate = stop  # type: ignore[assignment, method-assign]
    with pytest.raises(JoinTimeout) as caught:
        exchange.join(rank, addresses, transport=transport, timeout=2.0, stall_timeout=600.0)  # type: ignore[arg-type]
    return caught.value.missing


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_peer_stopped_while_the_group_forms_is_missing_at_the_deadline(transport: str) -> None:
    with ranks(2, _stopped_while_forming, transport) as processes:
        processes[1].receive()
        assert processes[0].result() == (1,)


def _forks(pipe: Any, rank: int, addresses: list[str]) -> Any:
    """Rank 1 leaves a child behind that lives on."""
    with exchange.join(rank, addresses, transport="tcp", stall_timeout=600.0) as group:
        group.barrier()
        if rank == 1:
            here, there = os.pipe()
            child = os.fork()
            if not child:
                try:
                    group.barrier()
                except ExchangeError as error:
                    os.write(there, str(error).encode())
                group.close()
                os.close(there)
                signal.pause()
            os.close(there)
            with open(here, encoding="utf-8") as said:
                text = said.read()
            pipe.send(("forked", (child, text)))
            signal.pause()
        with pytest.raises(PeerLost, match="rank 1 died"):
            group.barrier()
        return "noticed"


def test_forked_process_does_not_hide_the_death_of_its_parent() -> None:
    with ranks(2, _forks) as processes:
        child, text = processes[1].receive()
        try:
            assert "forked" in text
            os.kill(processes[1].pid, signal.SIGKILL)
            assert processes[0].result() == "noticed"
        finally:
            os.kill(child, signal.SIGKILL)
