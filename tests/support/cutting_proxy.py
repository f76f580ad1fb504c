"""Passes connections on to servers, and cuts some of them in the middle of what a server sends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

_RECEIVED_AT_ONCE = 16 << 10


class CuttingProxy:
    """Stands in front of one server. Closed by `close`."""

    def __init__(self, port: int, after: int, cuts: int) -> None:
        """Cut a connection once `after` bytes of the server at `port` have passed, `cuts` times."""
        self._port, self._after, self._left = port, after, cuts
        #: How many connections were cut.
        self.done = 0
        self._lock = threading.Lock()
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        #: Where it listens.
        self.port: int = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket()
                self._sockets += [client, server]
                server.connect(("127.0.0.1", self._port))
                self._start(self._pass_on, client, server, False)
                self._start(self._pass_on, server, client, True)

    def _pass_on(self, source: socket.socket, target: socket.socket, is_server: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(_RECEIVED_AT_ONCE):
                passed += len(data)
                if is_server and passed > self._after and self._take_cut():
                    target.sendall(data[: len(data) // 2])
                    break
                target.sendall(data)
        for each in (source, target):
            self._end(each)

    def _take_cut(self) -> bool:
        with self._lock:
            if self._left == 0:
                return False
            self._left -= 1
            self.done += 1
            return True

    def close(self) -> None:
        """End all connections."""
        self._end(self._listener)
        self._threads[0].join(10)
        for each in self._sockets:
            self._end(each)
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()

    def _end(self, each: socket.socket) -> None:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def cut_connections(ports: Collection[int], after: int, cuts: int) -> Iterator[list[CuttingProxy]]:
    """Have this process reach the servers at these ports through proxies, one for each."""
    proxies = {port: CuttingProxy(port, after, cuts) for port in ports}
    connect = socket.create_connection

    def redirect(address: Any, *arguments: Any, **more: Any) -> socket.socket:
        host, port = address[:2]
        return connect((host, proxies[port].port if port in proxies else port), *arguments, **more)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "create_connection", redirect)
            yield list(proxies.values())
    finally:
        for proxy in proxies.values():
            proxy.close()
