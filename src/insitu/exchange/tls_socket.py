"""A non-blocking socket that encrypts what it sends.

It is used as a plain one, with two differences:

- After BlockingIOError, `send` and `sendmsg` must be called again with the same bytes, or with more behind
  them. They count bytes as sent only when the system has taken all that was made of them. So a caller who
  has sent all may stop calling.
- With `read_ahead` the socket may hold bytes that no selector knows of. Then `has_buffered` is true, and the
  caller must receive again before it waits.

A peer that leaves closes the connection, as without TLS: messages have lengths, so one that was cut off is
seen, and `close_notify` isn't needed.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

from insitu.exchange.forks import close_in_children

TLS_FIRST_BYTE = b"\x16"
"""First byte of each TLS connection: that of a handshake record."""
_HEADER_BYTES = 5
"""Bytes of a record's header: type, version, and the length that follows."""
_WRITE_BYTES = 1 << 17
"""Bytes that are encrypted for one call of `send` at most: eight records."""
_READ_BYTES = 1 << 17
"""Bytes that are received at once with `read_ahead`."""
_READS_PER_TURN = 64
"""Reads in the handshake before others have their turn, however much a caller sends."""
_JOINED_BYTES = 4096
"""Buffers up to this size share a record with those beside them."""


class TlsSocket(socket.socket):
    """One encrypted connection. Not for several threads."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, accepted: bool) -> None:
        """Take over `connection`, which is closed for its caller. Call `advance_handshake` next."""
        super().__init__(fileno=connection.detach())
        self.setblocking(False)
        close_in_children(self)
        #: True: receive as much as there is at once. Set by the owner once the handshake is over, as it then
        #: must look at `has_buffered`.
        self.read_ahead = False
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=accepted)
        #: Encrypted bytes that the system hasn't taken yet.
        self._unsent = memoryview(b"")
        #: Bytes of the caller that they stand for, and that it doesn't know to be sent.
        self._uncounted = 0
        #: Memory for what is received with `read_ahead`.
        self._buffer = memoryview(b"")
        #: Without: what has arrived of the header of the next record, and what is missing of its content.
        self._header = b""
        self._missing = 0

    # Handshake

    def advance_handshake(self) -> bool:
        """Send and receive without waiting. Return whether TLS's handshake is done.

        Raises ssl.SSLError if the peer can't be spoken with, OSError if the connection has ended.
        """
        for _ in range(_READS_PER_TURN):
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                try:
                    self._flush()
                    if not self._receive():
                        raise ConnectionError("the connection ended in the handshake of TLS") from None
                except BlockingIOError:
                    return False
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush()  # which sends the peer the reason
                raise
            else:
                with contextlib.suppress(BlockingIOError):
                    self._flush()
                return True
        return False

    def get_peer_certificate(self) -> bytes:
        """Return the peer's certificate as DER; b"" if it has shown none."""
        return self._tls.getpeercert(binary_form=True) or b""

    @property
    def has_unsent(self) -> bool:
        """True while encrypted bytes wait for the system."""
        return bool(self._unsent) or bool(self._outgoing.pending)

    # Sending

    def send(self, data: Any, flags: int = 0) -> int:
        """Send bytes; see the module for what differs from a plain socket."""
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        """Send bytes; see the module for what differs from a plain socket."""
        self._flush()
        if not self._uncounted:
            self._uncounted = self._encrypt(buffers)
            self._flush()
        count, self._uncounted = self._uncounted, 0
        return count

    def post(self, data: bytes) -> None:
        """Send a short message. Bytes that the system doesn't take now are sent with the next one."""
        self._tls.write(data)
        with contextlib.suppress(BlockingIOError):
            self._flush()

    def _encrypt(self, buffers: Iterable[Any]) -> int:
        """Encrypt the first bytes of all buffers together. Return how many."""
        left, joined = _WRITE_BYTES, bytearray()
        for buffer in buffers:
            part = memoryview(buffer)[:left]
            left -= len(part)
            if len(part) <= _JOINED_BYTES:
                joined += part
                continue
            if joined:
                self._tls.write(joined)
                joined = bytearray()
            self._tls.write(part)
            if not left:
                break
        if joined:
            self._tls.write(joined)
        return _WRITE_BYTES - left

    def _flush(self) -> None:
        """Have the system take all encrypted bytes. Raises BlockingIOError while it can't."""
        while True:
            while self._unsent:
                self._unsent = self._unsent[super().send(self._unsent) :]
            if not self._outgoing.pending:
                return
            self._unsent = memoryview(self._outgoing.read())

    # Receiving

    @property
    def has_buffered(self) -> bool:
        """True if bytes have been received that no selector reports."""
        return bool(self._incoming.pending) or bool(self._tls.pending())

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receive up to `size` bytes."""
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.recv_into(buffer)])

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        """Fill the buffer with as much as there is. Return how much: 0 at the end of the connection."""
        view, count = memoryview(buffer), 0
        wanted = size or len(view)
        while count < wanted:
            try:
                got = cast(int, self._tls.read(wanted - count, view[count:wanted]))  # type: ignore[arg-type]
            except ssl.SSLWantReadError:
                try:
                    if self._receive():
                        continue
                except OSError:  # also BlockingIOError; if it lasts, the next call raises it
                    if not count:
                        raise
                break
            except ssl.SSLError:
                if not count:
                    raise
                break
            if not got:
                break
            count += got
        return count

    def recvmsg_into(self, buffers: Iterable[Any], *_: Any) -> tuple[int, list[Any], int, Any]:
        """Fill buffers one after the other with as much as there is."""
        count = 0
        for buffer in buffers:
            try:
                got = self.recv_into(buffer)
            except OSError:
                if not count:
                    raise
                break
            count += got
            if got < len(buffer):
                break
        return count, [], 0, None

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("A TlsSocket has no such call, which would pass the encryption by")

    sendall = sendto = sendfile = sendmsg_afalg = makefile = _refuse
    recvmsg = recvfrom = recvfrom_into = detach = _refuse

    def _receive(self) -> bool:
        """Receive encrypted bytes: all that there are with `read_ahead`, else none beyond the next record.

        Return False at the end of the connection. Raises OSError.
        """
        if self.read_ahead:
            if len(self._buffer) < _READ_BYTES:
                self._buffer = memoryview(bytearray(_READ_BYTES))
            count = super().recv_into(self._buffer)
            self._incoming.write(self._buffer[:count])
            return bool(count)
        data = super().recv(self._missing or _HEADER_BYTES - len(self._header))
        self._incoming.write(data)
        if self._missing:
            self._missing -= len(data)
            return bool(data)
        self._header += data
        if len(self._header) == _HEADER_BYTES:
            self._missing, self._header = int.from_bytes(self._header[3:], "big"), b""
        return bool(data)


def post(connection: socket.socket, data: bytes) -> None:
    """Send a short message on an encrypted or plain connection, as far as the system takes it. Raises
    OSError."""
    if isinstance(connection, TlsSocket):
        connection.post(data)
    else:
        connection.send(data)


def is_encrypted(connections: Sequence[socket.socket]) -> bool:
    """Return True if any of the connections is encrypted, so that compiled code can't use its descriptor."""
    return any(isinstance(connection, TlsSocket) for connection in connections)
