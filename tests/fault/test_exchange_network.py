"""The network fails: a link is cut, a host vanishes, a connection is half open."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from exchange_ranks import SECRET, in_threads, ranks

from insitu import exchange
from insitu.base.errors import PeerLost, StaleGeneration
from insitu.exchange.peer_connections import PeerConnections, is_unreachable

HOSTS = ("10.213.9.1", "10.213.9.2")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces that a veth pair joins."""
    if not shutil.which("ip"):
        pytest.skip("`ip` is not installed")
    names = (f"insitu-{os.getpid()}-0", f"insitu-{os.getpid()}-1")
    with contextlib.ExitStack() as stack:
        for name in names:
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces can't be made here: {error.stderr.decode().strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True, check=False)
        try:
            _ip("link", "add", "in0", "netns", names[0], "type", "veth", "peer", "in1", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"a veth pair can't be made here: {error.stderr.decode().strip()}")
        for index, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"{HOSTS[index]}/24", "dev", f"in{index}")
            _ip("-n", name, "link", "set", f"in{index}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names


def _enter(namespace: str) -> None:
    """Moves this process into a network namespace."""
    import ctypes

    file = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns failed")
    finally:
        os.close(file)


def _until_cut(pipe: Any, rank: int, addresses: list[str], names: tuple[str, str], size: int) -> Any:
    _enter(names[rank])
    addresses = [f"{HOSTS[r]}:{29500 + r}" for r in range(2)]
    with exchange.join(rank, addresses, secret=SECRET, transport="tcp") as group:
        buffer = group.buffer(size, np.float32)
        while True:
            buffer[:] = before = group.last_completed + 2.0
            try:
                group.all_reduce(buffer)
            except PeerLost as lost:
                values = set(np.unique(buffer).tolist())
                return lost.rank, values, before, group.last_completed == lost.sequence
            if group.last_completed == 5:
                pipe.send(("ready", group.transport))


@pytest.mark.parametrize("size", [10, 2_000_000])
def test_cut_network_is_noticed_and_leaves_buffers_whole(namespaces: tuple[str, str], size: int) -> None:
    with ranks(2, _until_cut, namespaces, size) as processes:
        assert [process.receive() for process in processes] == ["tcp", "tcp"]
        _ip("-n", namespaces[0], "link", "set", "in0", "down")
        for rank, process in enumerate(processes):
            lost, values, before, completed = process.result()
            assert lost == 1 - rank
            assert values == ({2 * before} if completed else {before})


def _until_told(pipe: Any, rank: int, addresses: list[str], names: tuple[str, str]) -> int:
    """Reduces until the other side is told to stop; rank 0 waits in between, as when the other one
    computes."""
    _enter(names[rank])
    addresses = [f"{HOSTS[r]}:{29500 + r}" for r in range(2)]
    with exchange.join(rank, addresses, secret=SECRET, transport="tcp") as group:
        total, stop, turns = np.zeros(100_000, np.float32), np.zeros(1, np.float32), 0
        while not stop[0]:
            turns += 1
            total[:] = 1
            group.all_reduce(total)
            assert (total == 2).all()
            stop[0] = rank == 0 and bool(pipe.poll(0)) and pipe.recv() == "stop"
            group.all_reduce(stop)
            if turns == 20:
                pipe.send(("ready", None))
        return turns


@pytest.mark.parametrize("seconds", [0.3, 2.0])
def test_a_link_that_is_away_for_a_moment_is_no_loss(namespaces: tuple[str, str], seconds: float) -> None:
    """0.3 s were taken for the death of the other rank."""
    with ranks(2, _until_told, namespaces) as processes:
        for process in processes:
            process.receive()
        _ip("-n", namespaces[0], "link", "set", "in0", "down")
        time.sleep(seconds)  # the fault itself
        _ip("-n", namespaces[0], "link", "set", "in0", "up")
        processes[0].send("stop")
        done = [process.result() for process in processes]
    assert done[0] == done[1] > 20


def _with_any_transport(
    pipe: Any, rank: int, addresses: list[str], names: tuple[str, str]
) -> tuple[str, float]:
    _enter(names[rank])
    addresses = [f"{HOSTS[r]}:{29500 + r}" for r in range(2)]
    with exchange.join(rank, addresses, secret=SECRET) as group:
        return group.transport, float(group.all_reduce(np.ones(3, np.float32))[0])


def test_hosts_that_only_look_alike_use_tcp(namespaces: tuple[str, str]) -> None:
    """Boot, process ids and user are the same, as in clones of a machine or in containers: each tried to
    open the
    other's descriptors."""
    with ranks(2, _with_any_transport, namespaces) as processes:
        assert [process.result() for process in processes] == [("tcp", 2.0)] * 2


def _half_open(pipe: Any, rank: int, addresses: list[str]) -> int:
    """Rank 1 continues living, but its data connection is closed for writing."""
    with exchange.join(rank, addresses, secret=SECRET, transport="tcp", stall_timeout=20) as group:
        group.barrier()
        if rank == 1:
            group._transport.session.channel(0).connection.shutdown(1)  # type: ignore[attr-defined]
            pipe.recv()
            return -1
        with pytest.raises(PeerLost) as caught:
            group.all_reduce(np.ones(1000, np.float32))
        return caught.value.rank


def test_half_open_connection_is_a_lost_peer() -> None:
    with ranks(2, _half_open) as processes:
        assert processes[0].result() == 1
        processes[1].send("enough")
        assert processes[1].result() == -1


def _on_two_hosts(pipe: Any, rank: int, addresses: list[str]) -> Any:
    """Ranks 0 and 1 believe to be on one host, ranks 2 and 3 on another."""
    with (
        mock.patch("insitu.exchange.memory.read_host_identity", lambda: f"host {rank // 2}"),
        exchange.join(rank, addresses, secret=SECRET) as group,
    ):
        buffer = group.buffer(100_000, np.float32)
        assert group.transport == "shm+tcp"
        while True:
            buffer[:] = before = group.last_completed + 2.0
            try:
                group.all_reduce(buffer)
            except PeerLost as lost:
                whole = set(np.unique(buffer).tolist())
                completed = group.last_completed == lost.sequence
                return lost.rank, whole == ({4 * before} if completed else {before})
            if group.last_completed == 10:
                pipe.send(("ready", None))


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_all_hosts_learn_of_a_loss_on_another(victim: int) -> None:
    with ranks(4, _on_two_hosts) as processes:
        for process in processes:
            process.receive()
        os.kill(processes[victim].pid, signal.SIGKILL)
        for rank, process in enumerate(processes):
            if rank != victim:
                assert process.result() == (victim, True)


def _until_lost(pipe: Any, rank: int, addresses: list[str], size: int) -> int:
    with (
        mock.patch("insitu.exchange.memory.read_host_identity", lambda: f"host {rank // 2}"),
        exchange.join(rank, addresses, secret=SECRET, stall_timeout=2.0) as group,
    ):
        buffer = group.buffer(size, np.float32)
        try:
            while True:
                group.all_reduce(buffer)
                if group.last_completed == 10:
                    pipe.send(("ready", None))
        except PeerLost as lost:
            pipe.send(("lost", None))
            pipe.recv()  # lives on, so that nobody takes the end of this one for the reason
            return lost.rank


@pytest.mark.parametrize(
    ("victim", "size"),
    [
        (0, 10),
        (1, 100_000),
        (3, 10),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(0, 100_000), (1, 10), (3, 100_000)]),
    ],
)
def test_all_hosts_name_the_stuck_rank_on_another(victim: int, size: int) -> None:
    with ranks(4, _until_lost, size) as processes:
        for process in processes:
            process.receive()
        os.kill(processes[victim].pid, signal.SIGSTOP)
        survivors = [process for rank, process in enumerate(processes) if rank != victim]
        for process in survivors:
            process.receive()
        for process in survivors:
            process.send("enough")
        assert [process.result() for process in survivors] == [victim] * 3


def test_all_waiting_ranks_name_the_stuck_one() -> None:
    """In a chain the first waits for the second, which waits for the third, which is stuck."""
    stuck = threading.Event()

    def run(rank: int, addresses: list[str]) -> int | None:
        with exchange.join(rank, addresses, transport="tcp", stall_timeout=2.0) as group:
            group.barrier()
            if rank == 2:
                assert stuck.wait(60)
                return None
            try:
                with pytest.raises(PeerLost, match=r"made no progress|was lost") as caught:
                    group.all_reduce(np.ones(500_000, np.float32))
                return caught.value.rank
            finally:
                if rank == 0:
                    stuck.set()

    with mock.patch("insitu.exchange.tcp.choose_algorithm", lambda *_: "chain"):
        assert in_threads(3, run) == [2, 2, None]


def test_peer_that_sends_heartbeats_is_not_stuck() -> None:
    connections = PeerConnections(0, {}, {}, 1.0)
    connections._last_frame_at = {1: 99.9, 2: 99.8}
    connections._waits_for = {1: 3, 2: 1}
    assert connections._find_stuck([2], 100.0) == 3
    connections._waits_for = {1: 0, 2: 1}
    assert connections._find_stuck([2], 100.0) == 1


def test_stopped_process_is_not_an_unreachable_host() -> None:
    """Its kernel acknowledges, however long it says nothing itself."""
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        assert not is_unreachable(here, -1), "not TCP: nothing is known of it"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
        with caller, called, mock.patch("insitu.exchange.peer_connections._ACK_TIMEOUT_MS", -1):
            connections = PeerConnections(0, {1: caller}, {1: caller}, 60.0)
            connections._check_hosts(100.0)
            deadline = time.monotonic() + 30
            while is_unreachable(caller, -1):  # until the acknowledgement has come
                assert time.monotonic() < deadline
            connections._check_hosts(100.2)
            assert connections._ended == set()


@pytest.mark.slow
def test_unread_heartbeats_are_no_loss() -> None:
    """A peer that computes for long leaves its kernel no room for them."""

    def shrink_buffer(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def run(rank: int, addresses: list[str]) -> float:
        with exchange.join(rank, addresses, transport="tcp") as group:
            group.barrier()
            if rank == 1:
                connections = group._transport.session._connections  # type: ignore[attr-defined]
                _await_no_more(connections._control[0])
            return float(group.all_reduce(np.ones(10, np.float32))[0])

    with (
        mock.patch("insitu.exchange.tcp_tuning.choose_before_connect", shrink_buffer),
        mock.patch("insitu.exchange.peer_connections._HEARTBEAT_INTERVAL", 0.001),
    ):
        assert in_threads(2, run) == [2.0, 2.0]


def _await_no_more(connection: socket.socket) -> None:
    """Until nothing more has come to it for a second, which is longer than any kernel's or peer's limit."""
    deadline, until, before = time.monotonic() + 40, 0.0, 0
    while not before or time.monotonic() < until:
        assert time.monotonic() < deadline
        (come,) = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
        if come != before:
            until, before = time.monotonic() + 1.0, come


def test_a_member_that_never_waits_still_reads_control_frames() -> None:
    ready = threading.Barrier(2)

    def run(rank: int, addresses: list[str]) -> None:
        with exchange.join(rank, addresses, transport="tcp") as group:
            group.barrier()
            session = group._transport.session  # type: ignore[attr-defined]
            connections = session._connections
            before = connections._last_frame_at.copy()
            ready.wait(30)
            if rank == 0:
                connections._check_hosts(time.monotonic())
            else:
                select.select([connections._control[0]], [], [], 30)
                for _ in range(16):
                    session.next_sequence()
                assert connections._last_frame_at[0] > before[0]

    in_threads(2, run)


def test_a_wait_ends_at_once_where_others_go_on_in_a_later_generation() -> None:
    """Though the host that is waited for would count as lost only much later."""
    superseded, done = threading.Event(), threading.Event()

    def run(rank: int, addresses: list[str]) -> str:
        options: dict[str, Any] = {"transport": "tcp", "is_superseded": superseded.is_set}
        with exchange.join(rank, addresses, stall_timeout=100.0, **options) as group:
            group.barrier()
            if rank == 1:
                assert done.wait(60)
                return ""
            threading.Timer(0.2, superseded.set).start()
            try:
                with pytest.raises(StaleGeneration, match="waited for one that has been replaced") as raised:
                    group.all_reduce(np.ones(10, np.float32))
            finally:
                done.set()
            return type(raised.value).__name__

    assert in_threads(2, run) == ["StaleGeneration", ""]
