"""Calls of endpoints that aren't as they should be, played by small servers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from insitu.base.errors import CorruptMetadata, MetadataError, MetadataRefused, StorageFull, StoreUnavailable
from insitu.metadata.etcd_address import EtcdAddress
from insitu.metadata.etcd_gateway import EtcdGateway, Unanswered


class Endpoint:
    """Answers each request with what `answer` gives: a status and a body."""

    def __init__(self, answer: Callable[[str], tuple[int, Any]]) -> None:
        self.asked: list[str] = []
        #: Whether it ends each connection after an answer.
        self.is_closing = False
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                endpoint.asked.append(self.path)
                status, body = answer(self.headers.get("Authorization", ""))
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                if endpoint.is_closing:
                    self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.address = ("127.0.0.1", self.server.server_address[1])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def endpoints() -> Iterator[Callable[..., Endpoint]]:
    made: list[Endpoint] = []

    def make(answer: Callable[[str], tuple[int, Any]]) -> Endpoint:
        made.append(Endpoint(answer))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An endpoint that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[:2]


def make_gateway(*addresses: tuple[str, int], user: str = "") -> EtcdGateway:
    return EtcdGateway(EtcdAddress(tuple(addresses), user, "sesame", None))


def call(gateway: EtcdGateway, seconds: float = 5.0) -> dict[str, Any]:
    return gateway.call("kv/range", {}, time.monotonic() + seconds)


def test_a_silent_endpoint_is_asked_once(
    endpoints: Callable[..., Endpoint], silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
):
    good = endpoints(lambda token: (200, {"kvs": []}))
    gateway = make_gateway(silent, good.address)
    assert call(gateway) == {"kvs": []}
    monkeypatch.setattr(gateway, "_connect", None)  # the connection to the good one is kept
    assert [call(gateway) for _ in range(5)] == [{"kvs": []}] * 5
    assert len(good.asked) == 6
    gateway.close()


def test_a_machine_without_power_is_waited_for_briefly_while_others_are_untried(
    endpoints: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch
):
    """Each command opens a store of its own, several times, and none knows which machine is away."""
    good = endpoints(lambda token: (200, {"kvs": []}))
    away = ("192.0.2.1", 2379)
    waited: list[tuple[str, float]] = []
    connect = EtcdGateway._connect

    def connect_to_others(
        gateway: EtcdGateway, endpoint: tuple[str, int], seconds: float, deadline: float
    ) -> socket.socket:
        waited.append((endpoint[0], seconds))
        if endpoint in (away, also_away):
            raise TimeoutError("timed out")
        return connect(gateway, endpoint, seconds, deadline)

    monkeypatch.setattr(EtcdGateway, "_connect", connect_to_others)
    also_away = None
    with contextlib.closing(make_gateway(away, good.address)) as gateway:
        assert call(gateway) == {"kvs": []}
    assert waited == [(away[0], 0.2), (good.address[0], 0.2)]
    # A line on which all are slow gets the whole time in the second round.
    waited.clear()
    also_away = good.address
    with contextlib.closing(make_gateway(away, good.address)) as gateway, pytest.raises(StoreUnavailable):
        call(gateway, 2.0)
    assert [seconds for _, seconds in waited[:2]] == [0.2, 0.2]
    assert all(seconds > 0.2 for _, seconds in waited[2:4])


def test_a_handshake_may_take_as_long_as_an_answer_but_not_past_the_deadline(silent: tuple[str, int]):
    waited: list[float] = []

    class Tls:
        def wrap_socket(self, plain: socket.socket, *, server_hostname: str) -> socket.socket:
            waited.append(plain.gettimeout() or 0.0)
            raise TimeoutError("timed out")

    address = EtcdAddress((silent, silent), "", "", Tls())  # type: ignore[arg-type]
    for seconds, shortest, longest in ((0.3, 0.0, 0.3), (1.5, 0.2, 1.0)):
        waited.clear()
        with contextlib.closing(EtcdGateway(address)) as gateway, pytest.raises(StoreUnavailable):
            call(gateway, seconds)
        assert shortest < waited[0] <= longest and max(waited) <= longest


def test_connections_that_an_endpoint_ends_are_made_again(endpoints: Callable[..., Endpoint]):
    good = endpoints(lambda token: (200, {"value": "x" * 1_000_000}))
    gateway = make_gateway(good.address)
    for is_closing in (False, True, True, False):
        good.is_closing = is_closing
        assert len(call(gateway)["value"]) == 1_000_000
    gateway.close()


def test_a_forked_process_has_connections_of_its_own(endpoints: Callable[..., Endpoint]):
    gateway = make_gateway(endpoints(lambda token: (200, {"kvs": []})).address)
    assert call(gateway) == {"kvs": []}
    child = os.fork()
    if child == 0:
        try:
            (kept,) = gateway._idle.values()
            os._exit(0 if call(gateway) == {"kvs": []} and len(kept) == 1 and len(gateway._idle) == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert call(gateway) == {"kvs": []}
    gateway.close()


def test_a_call_ends_at_its_deadline(silent: tuple[str, int]):
    gateway = make_gateway(silent)
    with pytest.raises(StoreUnavailable, match=r"timed out.*etcdctl endpoint health"):
        call(gateway, 0.3)
    gateway.close()


def test_a_member_without_most_others_is_passed_over(endpoints: Callable[..., Endpoint]):
    lone = endpoints(lambda token: (503, {"code": 14, "message": "etcdserver: request timed out"}))
    good = endpoints(lambda token: (200, {"kvs": []}))
    gateway = make_gateway(lone.address, good.address)
    assert call(gateway) == {"kvs": []}
    gateway.close()


@pytest.mark.parametrize(
    ("status", "answer", "error", "said"),
    [
        (429, {"code": 8, "message": "etcdserver: mvcc: database space exceeded"}, StorageFull, "disarm"),
        (500, {"code": 15, "message": "etcdserver: corrupt cluster"}, CorruptMetadata, "damaged member"),
        (403, {"code": 7, "message": "etcdserver: permission denied"}, MetadataRefused, "grant-permission"),
        (400, {"code": 3, "message": "etcdserver: user name is empty"}, MetadataRefused, "USER@"),
        (400, {"code": 3, "message": "etcdserver: nonsense"}, MetadataError, "Report this"),
        (404, b"Not Found", MetadataRefused, "JSON gateway"),
        (400, b"Client sent an HTTP request to an HTTPS server.", MetadataRefused, "with no TLS"),
        (200, b"<html>", MetadataRefused, "JSON gateway"),
        (200, b"[]", MetadataRefused, "JSON gateway"),
    ],
)
def test_what_etcd_refuses_is_said(
    endpoints: Callable[..., Endpoint], status: int, answer: Any, error: type[Exception], said: str
):
    gateway = make_gateway(endpoints(lambda token: (status, answer)).address)
    with pytest.raises(error, match=said):
        call(gateway)
    gateway.close()


def test_a_token_that_etcd_has_forgotten_is_replaced(endpoints: Callable[..., Endpoint]):
    made: list[str] = []

    def answer(token: str) -> tuple[int, Any]:
        if not token:
            made.append(f"token{len(made)}")
            return 200, {"token": made[-1]}
        if token != made[-1] or len(made) < 2:
            return 401, {"code": 16, "message": "etcdserver: invalid auth token"}
        return 200, {"kvs": []}

    gateway = make_gateway(endpoints(answer).address, user="me")
    assert call(gateway) == {"kvs": []}
    assert len(made) == 2
    gateway.close()


def test_a_stream_of_a_silent_endpoint_ends(silent: tuple[str, int]):
    gateway = make_gateway(silent)
    with pytest.raises(Unanswered):
        list(gateway.stream({}, {}, 0.1))
    gateway.close()
