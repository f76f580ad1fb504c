"""Relays between two peers: one records and cuts, the other one ends TLS with a certificate of its own."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from insitu.base.net.certificates import FOREVER, make_certificate
from insitu.exchange.tls import TlsSettings
from insitu.exchange.tls_socket import TlsSocket

EXPIRED = (FOREVER[0], datetime(2001, 1, 1, tzinfo=UTC))


class Relay:
    """Passes on what two peers send each other, and remembers it."""

    def __init__(self, address: str, wrap: Callable[[socket.socket, bool], socket.socket]) -> None:
        """`wrap(connection, called)`: what to use instead of a connection, of a caller or to a callee."""
        self._to = address.rpartition(":")
        self._wrap = wrap
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._ended: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        #: All bytes in both directions.
        self.seen = bytearray()
        #: Callers so far.
        self.calls = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._start(self._serve)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._connect, caller)

    def _connect(self, caller: socket.socket) -> None:
        callee = caller
        try:
            callee = socket.create_connection((self._to[0], int(self._to[2])), 30)
            callee = self._wrap(callee, True)
            caller = self._wrap(caller, False)
        except OSError:
            for each in (caller, callee):
                each.close()
            return
        with self._lock:
            self.calls += 1
            self._open += [caller, callee]
        self._start(self._pass_on, caller, callee)
        self._start(self._pass_on, callee, caller)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    self.seen += data
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> int:
        """End all connections. Return how many there were."""
        with self._lock:
            ended, self._open = self._open, []
            self._ended += ended
        for each in ended:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        return len(ended) // 2

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)
        for each in self._ended:
            each.close()


@contextlib.contextmanager
def relay(address: str) -> Iterator[Relay]:
    """Yield a relay to `address` that sees what is on the wire."""
    with contextlib.closing(Relay(address, lambda connection, called: connection)) as found:
        yield found


@contextlib.contextmanager
def man_in_the_middle(address: str, folder: Path) -> Iterator[Relay]:
    """Yield a relay that shows callers a certificate of its own, and reads all if they believe it."""
    file = folder / "middle.pem"
    write_certificate(file)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(file)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE

    def wrap(connection: socket.socket, called: bool) -> socket.socket:
        connection.settimeout(30)
        context = client if called else server
        return context.wrap_socket(connection, server_side=not called)

    with contextlib.closing(Relay(address, wrap)) as found:
        yield found


def write_certificate(path: Path, validity: tuple[datetime, datetime] = FOREVER) -> Path:
    """Write a new certificate with its key; return the path."""
    made = make_certificate("test", validity)
    path.write_text(made.pem + made.key_pem)
    path.chmod(0o600)
    return path


def own_files(certificate: Path, ca: Path) -> TlsSettings:
    """Return settings with certificates of the user's own."""
    return TlsSettings("always", str(certificate), "", str(ca))


def handshake(dialled: TlsSocket, accepted: TlsSocket) -> None:
    """Do the handshake of TLS between two ends in this thread."""
    done = [False, False]
    for _ in range(100):
        done = [end.advance_handshake() for end in (dialled, accepted)]
        if all(done):
            return
    raise AssertionError("the handshake doesn't end")
