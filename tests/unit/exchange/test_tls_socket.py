"""Encrypted sockets."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tls_peers import handshake

from insitu.exchange.tls import TlsSettings, load_identity
from insitu.exchange.tls_socket import TlsSocket, is_encrypted, post

SMALL = 5000
"""Bytes of the system's buffers in these tests: less than a record, so that each is sent in parts."""


@contextlib.contextmanager
def pair(buffers: int = 0) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """Yield (the end that dialled, the end that accepted)."""
    ends = socket.socketpair()
    for end in ends:
        if buffers:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
    identity = load_identity(TlsSettings())
    with (
        TlsSocket(ends[0], identity.client, accepted=False) as dialled,
        TlsSocket(ends[1], identity.server, accepted=True) as accepted,
    ):
        handshake(dialled, accepted)
        yield dialled, accepted


def is_readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def move(sender: TlsSocket, receiver: TlsSocket, data: bytes, cuts: list[int], read: int) -> bytes:
    """Send `data`, as buffers that are cut off at `cuts`, and receive with buffers of `read` bytes."""
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    queue = [memoryview(data)[low:high] for low, high in itertools.pairwise(bounds)]
    arrived = bytearray()
    for _ in range(100_000):
        if queue:
            with contextlib.suppress(BlockingIOError):
                count = sender.sendmsg(queue[:16]) if len(queue) > 1 else sender.send(queue[0])
                while queue and count >= len(queue[0]):
                    count -= len(queue.pop(0))
                if count:
                    queue[0] = queue[0][count:]
        parts = [bytearray(read), bytearray(1), bytearray(2 * read)]
        with contextlib.suppress(BlockingIOError):
            count = receiver.recvmsg_into(parts)[0]
            arrived += b"".join(parts)[:count]
        if not queue and len(arrived) == len(data):
            return bytes(arrived)
    raise AssertionError(f"{len(arrived)} of {len(data)} bytes arrived")


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 300_000),
    st.lists(st.integers(0, 300_000), max_size=20),
    st.integers(1, 70_000),
    st.sampled_from([0, SMALL]),
    st.booleans(),
)
def test_all_bytes_arrive_in_order(size: int, cuts: list[int], read: int, buffers: int, ahead: bool) -> None:
    data = np.random.default_rng(size).bytes(size)
    with pair(buffers) as (dialled, accepted):
        accepted.read_ahead = ahead
        assert move(dialled, accepted, data, cuts, read) == data
        assert move(accepted, dialled, data[:1000], cuts, read) == data[:1000]


def test_bytes_count_as_sent_only_once_the_system_has_them() -> None:
    """A caller that has sent all doesn't call again, so nothing may stay behind with it."""
    data = bytes(range(256)) * 400
    with pair(SMALL) as (dialled, accepted):
        with pytest.raises(BlockingIOError):
            dialled.send(data)
        assert dialled.has_unsent
        arrived = bytearray()
        sent = 0
        while not sent:
            with contextlib.suppress(BlockingIOError):
                arrived += accepted.recv(1 << 16)
            with contextlib.suppress(BlockingIOError):
                sent = dialled.send(data)
        assert sent == len(data) and not dialled.has_unsent
        while is_readable(accepted):
            arrived += accepted.recv(1 << 16)
        assert bytes(arrived) == data


def test_short_messages_that_the_system_does_not_take_are_sent_with_the_next() -> None:
    with pair(SMALL) as (dialled, accepted):
        frames = [number.to_bytes(8, "big") for number in range(2000)]
        arrived = bytearray()
        for frame in frames:
            post(dialled, frame)
        assert dialled.has_unsent
        while len(arrived) < 8 * 2001:
            with contextlib.suppress(BlockingIOError):
                arrived += accepted.recv(4096)
            if len(frames) == 2000:
                frames.append(b"the last")
                post(dialled, frames[-1])
            with contextlib.suppress(BlockingIOError):
                dialled._flush()
        assert bytes(arrived) == b"".join(frames)


def test_nothing_is_received_unasked_after_the_handshake() -> None:
    """A byte on a connection on which nothing is sent means that its peer has ended."""
    with pair() as (dialled, accepted):
        dialled.send(b"x")
        assert accepted.recv(1) == b"x"
        assert not is_readable(dialled) and not is_readable(accepted)
        accepted.close()
        assert is_readable(dialled) and dialled.recv(1) == b""


def test_no_record_beyond_the_next_is_taken_from_the_system() -> None:
    """Who waits with a selector after the handshake must hear of what has arrived."""
    with pair() as (dialled, accepted):
        dialled.send(b"one")
        dialled.send(b"two")
        assert accepted.recv(3) == b"one"
        assert is_readable(accepted) and not accepted.has_buffered
        assert accepted.recv(3) == b"two"
        accepted.read_ahead = True
        for word in (b"three", b"four"):
            dialled.send(word)
        assert accepted.recv(5) == b"three"
        assert accepted.has_buffered and not is_readable(accepted)
        assert accepted.recv(4) == b"four"
        assert not accepted.has_buffered


@pytest.mark.parametrize("ahead", [False, True])
def test_a_changed_byte_ends_the_connection(ahead: bool) -> None:
    with pair() as (dialled, accepted):
        accepted.read_ahead = ahead
        dialled.send(b"before")
        assert accepted.recv(6) == b"before"
        dialled._tls.write(b"weights")
        record = bytearray(dialled._outgoing.read())
        record[-1] ^= 1
        socket.socket.send(dialled, record)
        with pytest.raises(OSError, match=r"(?i)mac|decrypt"):
            accepted.recv(7)
        with pytest.raises(OSError, match=r"SSL|protocol"):
            accepted.recv(7)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_end_within_a_record_is_an_end(ahead: bool) -> None:
    with pair() as (dialled, accepted):
        accepted.read_ahead = ahead
        dialled._tls.write(b"weights")
        socket.socket.send(dialled, dialled._outgoing.read()[:-3])
        dialled.shutdown(socket.SHUT_RDWR)
        assert accepted.recv(7) == b""


def test_a_peer_of_an_older_tls_is_refused() -> None:
    import ssl

    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    ends = socket.socketpair()
    with (
        TlsSocket(ends[0], old, accepted=False) as dialled,
        TlsSocket(ends[1], load_identity(TlsSettings()).server, accepted=True) as accepted,
    ):
        assert not dialled.advance_handshake()
        with pytest.raises(ssl.SSLError, match=r"(?i)unsupported_protocol|version"):
            accepted.advance_handshake()


def test_no_call_passes_the_encryption_by() -> None:
    with pair() as (dialled, accepted):
        for call in ("sendall", "sendto", "sendfile", "makefile", "recvmsg", "recvfrom", "recvfrom_into"):
            with pytest.raises(NotImplementedError, match="pass the encryption by"):
                getattr(dialled, call)(b"word")
        assert not is_readable(accepted)


def test_plain_sockets_are_told_apart() -> None:
    plain, other = socket.socketpair()
    with plain, other, pair() as (dialled, _):
        assert not is_encrypted([plain, other]) and is_encrypted([plain, dialled])
        post(plain, b"word")
        assert other.recv(10) == b"word"
