"""Sending and receiving over all connections, and noticing who is lost."""

from __future__ import annotations

import socket

import pytest
from exchange_sessions import peer_connections, run_together
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.exchange.peer_connections import DataChannel, PeerConnections
from insitu.exchange.plan.transport import MemberLost, Mismatch


@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), max_size=40), st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_channel_fills_buffers_in_order(sent: list[int], cuts: list[int]) -> None:
    data = bytes(number % 251 for number in range(sum(sent)))
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        sender, receiver = DataChannel(here), DataChannel(there)
        at = 0
        for size in sent:
            sender.send(memoryview(data[at : at + size]))
            at += size
        buffers, left = [], len(data)
        for size in [*cuts, len(data)]:
            if left:
                buffers.append(bytearray(min(size, left)))
                left -= len(buffers[-1])
                receiver.receive(memoryview(buffers[-1]))
        while not (sender.idle and receiver.idle):
            sender.send_some()
            receiver.receive_some()
        assert b"".join(buffers) == data
        assert (sender.sent, receiver.received) == (len(sent), len(buffers))
        assert not receiver.receive_some(), "nothing is queued"


def test_channel_ends_with_its_connection() -> None:
    here, there = socket.socketpair()
    with here:
        here.setblocking(False)
        channel = DataChannel(here)
        channel.receive(memoryview(bytearray(3)))
        assert not channel.receive_some() and not channel.ended
        there.close()
        assert not channel.receive_some() and channel.ended


def _receive(connections: PeerConnections, peer: int) -> None:
    channel = connections.channels[peer]
    channel.receive(memoryview(bytearray(5)))
    connections.run_until(lambda: channel.idle)


def test_peer_that_leaves_is_lost() -> None:
    with peer_connections(2) as (first, second):
        second.close()
        with pytest.raises(MemberLost) as caught:
            _receive(first, 1)
    assert (caught.value.rank, caught.value.reason) == (1, "left the group")


def test_bytes_of_a_peer_that_has_left_may_come_after_its_last_frame() -> None:
    """They take another connection. Where a packet is lost on it, the control frames are faster."""
    with peer_connections(2) as (first, second):
        last = second.channels[0].connection.dup()
        second.close()
        buffer = bytearray(5)
        channel = first.channels[1]
        channel.receive(memoryview(buffer))

        def advance() -> bool:
            if first._ended and last.fileno() >= 0:
                last.send(b"bytes")
                last.close()
            return channel.idle

        first.run_until(advance)
        assert buffer == b"bytes"
        with pytest.raises(MemberLost, match="left the group"):
            _receive(first, 1)


def test_peer_without_progress_is_lost() -> None:
    with (
        peer_connections(2, stall_timeout=0.2) as (first, _),
        pytest.raises(MemberLost, match=r"made no progress for 0\.2 s"),
    ):
        _receive(first, 1)
    assert first.waited > 0.1


def test_all_name_the_rank_that_one_reports() -> None:
    """Member 2 waits for member 1, which lost member 0 and leaves."""
    with peer_connections(3) as connections:

        def report() -> None:
            connections[1].report_lost(0, "died")
            connections[1].close()

        result, _ = run_together([lambda: _receive(connections[2], 1), report])
    assert isinstance(result, MemberLost) and (result.rank, result.reason) == (0, "was lost")


def test_member_that_the_others_lost_is_evicted() -> None:
    with peer_connections(2) as (first, second):
        second.report_lost(0, "made no progress")
        with pytest.raises(MemberLost) as caught:
            _receive(first, 1)
    assert (caught.value.rank, caught.value.reason) == (0, "was evicted by the other ranks")


def test_reported_mismatch_is_raised() -> None:
    with peer_connections(3) as connections:
        connections[1].report_mismatch(2)
        with pytest.raises(Mismatch, match="operation of rank 2 that is another one than that of rank 1"):
            _receive(connections[0], 1)


def test_threads_of_one_process_do_not_poll_in_compiled_code() -> None:
    with peer_connections(2) as (first, _):
        assert first.poll_limit == (0, False)
