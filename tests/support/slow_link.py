"""A link with a long round trip: a relay that keeps everything for a while."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def slow_link(address: str, one_way: float) -> Iterator[str]:
    """Yield an address whose traffic reaches `address` later by `one_way` seconds, and back. The first byte
    of a
    connection comes later by one round trip, as that of TCP does."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = [listener]
    threads: list[threading.Thread] = []

    def start(target: object, *arguments: object) -> None:
        threads.append(threading.Thread(target=target, args=arguments, daemon=True))  # type: ignore[arg-type]
        threads[-1].start()

    def read(source: socket.socket, late: queue.SimpleQueue[tuple[float, bytes]], extra: float) -> None:
        data = b"x"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            late.put((time.monotonic() + one_way + extra, data))
            extra = 0.0

    def write(target: socket.socket, late: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            at, data = late.get()
            time.sleep(max(0.0, at - time.monotonic()))
            with contextlib.suppress(OSError):  # also where the end was closed meanwhile
                if data:
                    target.sendall(data)
                else:
                    target.shutdown(socket.SHUT_WR)
            if not data:
                return

    def serve() -> None:
        host, _, port = address.rpartition(":")
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:
                return
            called = socket.create_connection((host, int(port)))
            opened.extend((caller, called))
            for source, target, extra in ((caller, called, 2 * one_way), (called, caller, 0.0)):
                late: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                start(read, source, late, extra)
                start(write, target, late)

    start(serve)
    try:
        yield "{}:{}".format(*listener.getsockname())
    finally:
        # Each is closed once no thread reads it any more: its number could be another socket's by then.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        threads[0].join(10)
        for each in opened[1:]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in threads[1:]:
            thread.join(10)
        for each in opened:
            each.close()
