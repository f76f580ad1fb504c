"""Messages over a socket: whole, in order, and without waiting."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from insitu.cluster.engines.channel import Channel, ChannelClosed, open_channel_pair

Pair = tuple[Channel, Channel]
RawPair = tuple[socket.socket, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    first, second = open_channel_pair()
    yield first, second
    first.close()
    second.close()


@pytest.fixture
def raw_pair() -> Iterator[RawPair]:
    """A socket to write bytes to, and the channel at its other end, which takes lines of 20 bytes."""
    raw, connection = socket.socketpair()
    channel = Channel(connection, max_line_bytes=20)
    yield raw, channel
    raw.close()
    channel.close()


def test_messages_come_whole_and_in_order(pair: Pair):
    pair[0].send({"do": "first"})
    pair[0].send({"text": "é\n"})
    assert pair[1].receive() == [{"do": "first"}, {"text": "é\n"}]
    assert pair[1].receive() == []


def test_a_message_waits_for_its_end(raw_pair: RawPair):
    raw, channel = raw_pair
    raw.send(b'{"a":')
    assert channel.receive() == []
    raw.send(b" 1}\n")
    assert channel.receive() == [{"a": 1}]


def test_what_the_other_side_has_no_room_for_goes_later(pair: Pair):
    sender, receiver = pair
    message = {"data": "x" * (2 << 20)}
    sender.send(message)
    assert sender.unsent_bytes > 0 and not sender.flush()
    received = []
    for _ in range(10_000):
        sender.flush()
        received += receiver.receive()
        if received:
            break
    assert received == [message]
    assert sender.unsent_bytes == 0 and sender.flush()


def test_what_was_sent_before_the_end_is_received(pair: Pair):
    pair[0].send({"do": "finish"})
    pair[0].close()
    assert pair[1].receive() == [{"do": "finish"}]
    with pytest.raises(ChannelClosed):
        pair[1].receive()
    with pytest.raises(ChannelClosed):
        pair[1].send({})


@pytest.mark.parametrize("line", [b"hello", b"[1]", b"1", b"\xff", b"[" * 5])
def test_a_line_that_is_no_message_ends_the_channel(raw_pair: RawPair, line: bytes):
    raw, channel = raw_pair
    raw.send(b'{"a": 1}\n' + line + b'\n{"b": 2}\n')
    assert channel.receive() == [{"a": 1}]
    with pytest.raises(ChannelClosed):
        channel.receive()


def test_a_line_that_is_too_long_ends_the_channel(raw_pair: RawPair):
    raw, channel = raw_pair
    raw.send(b'{"a": 1}\n' * 5)
    assert channel.receive() == [{"a": 1}] * 5
    raw.send(b"x" * 21)
    with pytest.raises(ChannelClosed):
        channel.receive()
