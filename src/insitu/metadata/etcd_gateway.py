"""Calls of etcd by its JSON gateway (https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/), on any of its
endpoints. One that falls silent costs a second, once; one that is silent from the start a fifth of that.

Among the maintained clients, etcd3gw 2.7 and aetcd 1.0 know one endpoint each, and ask no other if it is
silent. etcd3gw has no passwords, and its watch of a silent endpoint never ends; aetcd has no TLS. etcd3 and
etcetra had no release since 2022. The gateway is etcd's own, and needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

from insitu.base.errors import CorruptMetadata, MetadataError, MetadataRefused, StorageFull, StoreUnavailable
from insitu.exchange import connect_within
from insitu.metadata.etcd_address import EtcdAddress

CALL_SECONDS = 5.0
"""A call's deadline."""
_SILENCE_SECONDS = 1.0
"""How long an endpoint may be silent before another one is asked."""
_LOOK_SECONDS = 0.2
"""How long a connection may take while no endpoint has answered, and others haven't been tried. A command
opens a store several times, and each would wait for a machine that lost its power."""
_PAUSE_SECONDS = 0.1
_READ_BYTES = 1 << 18
NOT_FOUND, FAILED_PRECONDITION, OUT_OF_RANGE = 5, 9, 11
_RESOURCE_EXHAUSTED, _PERMISSION_DENIED, _UNAUTHENTICATED, _DATA_LOSS = 8, 7, 16, 15
_PASSING = {1, 4, 14}
"""Numbers of gRPC's errors that may pass: canceled, too late, unavailable."""

Endpoint = tuple[str, int]


class EtcdAnswer(MetadataError):
    """An error that etcd answers with: `code` is gRPC's, `received` its text."""

    def __init__(self, code: int, received: str) -> None:
        super().__init__(
            f"etcd must do what insitu asks. Received: {received} (gRPC's error {code}). Report this with "
            f"etcd's version"
        )
        self.code, self.received = code, received

    @property
    def may_pass(self) -> bool:
        """True if another endpoint, or this one later, may answer."""
        return self.code in _PASSING or "leader" in self.received or "too many requests" in self.received

    @property
    def is_of_token(self) -> bool:
        """True if etcd doesn't know who asks any more: it was restarted, or the time is over."""
        return self.code == _UNAUTHENTICATED or "revision in header is old" in self.received


class Unanswered(Exception):
    """An endpoint gave no answer, and another one may."""


class NotEtcd(Unanswered):
    """Another server than etcd answers at an endpoint, or an etcd that wants other certificates."""


class EtcdGateway:
    """The endpoints of an etcd. For several threads."""

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        #: Held for what follows.
        self._lock = threading.Lock()
        #: The endpoints, those that gave no answer last at the end.
        self._order = list(address.endpoints)
        #: How long a connection may take.
        self._patience = _LOOK_SECONDS if len(self._order) > 1 else _SILENCE_SECONDS
        #: Connections that no call uses. A forked process has to open its own.
        self._idle: dict[tuple[int, Endpoint], list[http.client.HTTPConnection]] = {}
        self._token = ""
        self.closed = threading.Event()

    def call(self, path: str, body: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
        """Return etcd's answer. A `body` of None asks by GET. A request may be sent twice.

        Raises StoreUnavailable at `deadline`, of time.monotonic, EtcdAnswer for what the caller may expect,
        and other MetadataErrors for what etcd refuses.
        """
        data = None if body is None else json.dumps(body).encode()
        failures: dict[Endpoint, Unanswered] = {}
        seconds = max(0.0, deadline - time.monotonic())
        while True:
            for endpoint in self._list_endpoints():
                if self.closed.is_set():
                    raise StoreUnavailable("A store of metadata is asked before it is closed. Open it again")
                if time.monotonic() >= deadline:
                    raise self._unavailable(failures, seconds)
                try:
                    answer = self._ask(endpoint, path, data, deadline)
                except Unanswered as error:
                    failures[endpoint] = error
                    self._ask_last(endpoint)
                else:
                    self._patience = _SILENCE_SECONDS
                    return answer
            self._patience = _SILENCE_SECONDS
            if all(isinstance(error, NotEtcd) for error in failures.values()):
                raise self._refused(failures)
            self.closed.wait(_PAUSE_SECONDS)

    def stream(self, body: dict[str, Any], read: dict[str, Any], idle: float) -> Iterator[dict[str, Any]]:
        """Yield the messages of a watch, and after `idle` seconds without any the answer to a range, `read`:
        an endpoint that is silent, or cut off from most others, can't answer it. Raises Unanswered."""
        endpoint, data = self._list_endpoints()[0], json.dumps(read).encode()
        try:
            connection = self._connect(endpoint, _SILENCE_SECONDS, _soon())
            with contextlib.closing(connection):
                connection.sendall(self._make_request(endpoint, "watch", json.dumps(body).encode()))
                for line in _read_lines(connection, idle):
                    if self.closed.is_set():
                        return
                    # A silent endpoint and one without news look the same: ask it.
                    answer = _parse(200, line) if line else self._ask(endpoint, "kv/range", data, _soon())
                    if answer.get("canceled") and "compact_revision" not in answer:
                        raise _parse_cancellation(str(answer.get("cancel_reason", "")))
                    yield answer
        except (OSError, EtcdAnswer, Unanswered) as error:
            if isinstance(error, EtcdAnswer) and not (error.may_pass or error.is_of_token):
                raise _translate(error) from error
            self._ask_last(endpoint)
            if isinstance(error, EtcdAnswer):
                with self._lock:
                    self._token = ""
            raise Unanswered(str(error)) from error

    def _make_request(self, endpoint: Endpoint, path: str, data: bytes) -> bytes:
        """Return a request by HTTP/1.0, whose answer comes as it is, until the connection ends."""
        token = self._log_in(endpoint, _soon())
        host = f"[{endpoint[0]}]" if ":" in endpoint[0] else endpoint[0]
        headers = [f"POST /v3/{path} HTTP/1.0", f"Host: {host}", f"Content-Length: {len(data)}"]
        headers += [f"Authorization: {token}"] if token else []
        return "\r\n".join([*headers, "", ""]).encode() + data

    def close(self) -> None:
        """Close all connections. Calls and streams end."""
        self.closed.set()
        for endpoint in self._address.endpoints:
            self._drop_idle(endpoint)

    # One endpoint

    def _ask(self, endpoint: Endpoint, path: str, data: bytes | None, deadline: float) -> dict[str, Any]:
        for is_last in (False, True):
            try:
                return self._exchange(endpoint, path, data, deadline, self._log_in(endpoint, deadline))
            except EtcdAnswer as answer:
                if answer.may_pass:
                    raise Unanswered(answer.received) from answer
                if not answer.is_of_token or is_last:
                    raise _translate(answer) from answer
                with self._lock:
                    self._token = ""
        raise AssertionError("unreachable")

    def _log_in(self, endpoint: Endpoint, deadline: float) -> str:
        """Return the token that says who asks; empty without a user."""
        with self._lock:
            token = self._token
        if token or not self._address.user:
            return token
        login = {"name": self._address.user, "password": self._address.password}
        answer = self._exchange(endpoint, "auth/authenticate", json.dumps(login).encode(), deadline, "")
        with self._lock:
            self._token = str(answer["token"])
            return self._token

    def _exchange(
        self, endpoint: Endpoint, path: str, data: bytes | None, deadline: float, token: str
    ) -> dict[str, Any]:
        """Ask an endpoint once, and again if its kept connection had ended."""
        with self._lock:
            kept = self._idle.get((os.getpid(), endpoint), [])
            connection = kept.pop() if kept else None
        if connection is not None:
            try:
                return self._send(endpoint, connection, path, data, deadline, token)
            except (ConnectionError, http.client.HTTPException):
                self._drop_idle(endpoint)
            except OSError as error:
                raise Unanswered(str(error)) from error
        try:
            connection = http.client.HTTPConnection(*endpoint)
            connection.auto_open = 0
            connection.sock = self._connect(endpoint, min(self._patience, _wait_up_to(deadline)), deadline)
            return self._send(endpoint, connection, path, data, deadline, token)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise Unanswered(str(error)) from error
        except ssl.SSLError as error:
            raise NotEtcd(str(error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise Unanswered(str(error) or type(error).__name__) from error

    def _send(
        self,
        endpoint: Endpoint,
        connection: http.client.HTTPConnection,
        path: str,
        data: bytes | None,
        deadline: float,
        token: str,
    ) -> dict[str, Any]:
        headers = {"Authorization": token} if token else {}
        is_whole, sock = False, connection.sock  # http.client lets go of it when the server ends it
        try:
            sock.settimeout(_wait_up_to(deadline))
            if data is None:
                connection.request("GET", f"/{path}", headers=headers)
            else:
                connection.request("POST", f"/v3/{path}", data, headers)
            response = connection.getresponse()
            parts = []
            while part := response.read1(_READ_BYTES):
                parts.append(part)
                sock.settimeout(_wait_up_to(deadline))
            response.close()
            is_whole = not response.will_close
        finally:
            if is_whole and not self.closed.is_set():
                with self._lock:
                    self._idle.setdefault((os.getpid(), endpoint), []).append(connection)
            else:
                connection.close()
        return _parse(response.status, b"".join(parts))

    def _connect(self, endpoint: Endpoint, seconds: float, deadline: float) -> socket.socket:
        """Return a connection made within `seconds`; the handshake of TLS has as long as an answer."""
        plain = connect_within(*endpoint, seconds)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._address.tls is None:
            return plain
        try:
            plain.settimeout(_wait_up_to(deadline))
            return self._address.tls.wrap_socket(plain, server_hostname=endpoint[0])
        except BaseException:
            plain.close()
            raise

    # All endpoints

    def _list_endpoints(self) -> list[Endpoint]:
        with self._lock:
            return list(self._order)

    def _ask_last(self, endpoint: Endpoint) -> None:
        self._drop_idle(endpoint)
        with self._lock:
            self._order.remove(endpoint)
            self._order.append(endpoint)

    def _drop_idle(self, endpoint: Endpoint) -> None:
        with self._lock:
            dropped = self._idle.pop((os.getpid(), endpoint), [])
        for connection in dropped:
            connection.close()

    def _unavailable(self, failures: dict[Endpoint, Unanswered], seconds: float) -> StoreUnavailable:
        return StoreUnavailable(
            f"Most members of etcd must answer within {seconds:.2g} s. Received: {_list(failures)}. Look "
            f"whether they run, reach each other and this host (`etcdctl endpoint health --cluster`)"
            + ("" if self._address.tls else ", and want no TLS (?ca=FILE)")
        )

    def _refused(self, failures: dict[Endpoint, Unanswered]) -> MetadataRefused:
        how = "TLS" if self._address.tls else "no TLS"
        return MetadataRefused(
            f"Each endpoint of --metadata must be a client's port of etcd 3.4 or newer, with its JSON "
            f"gateway, and certificates must fit. Received, with {how}: {_list(failures)}. Give "
            f"?ca=FILE&certificate=FILE&key=FILE as this etcd wants them"
        )


def _soon() -> float:
    return time.monotonic() + _SILENCE_SECONDS


def _wait_up_to(deadline: float) -> float:
    """Return how long an endpoint may be silent now. Raises TimeoutError after the deadline."""
    left = min(_SILENCE_SECONDS, deadline - time.monotonic())
    if left <= 0:
        raise TimeoutError("its answer wasn't whole at the deadline")
    return left


def _read_lines(connection: socket.socket, idle: float) -> Iterator[bytes]:
    """Yield the lines of an answer without its headers, and b"" after `idle` seconds without one."""
    received = bytearray()
    is_body = False
    while True:
        end = received.find(b"\n") if is_body else received.find(b"\r\n\r\n")
        if end >= 0:
            if is_body:
                yield bytes(received[:end])
            del received[: end + (1 if is_body else 4)]
            is_body = True
            continue
        connection.settimeout(idle if is_body else _SILENCE_SECONDS)
        try:
            part = connection.recv(_READ_BYTES)
        except TimeoutError:
            if not is_body:
                raise
            yield b""
            continue
        if not part:
            if received and is_body:
                yield bytes(received)
            raise ConnectionError("the endpoint has ended the connection")
        received += part


def _parse(status: int, data: bytes) -> dict[str, Any]:
    """Return what an answer holds. Raises EtcdAnswer, and NotEtcd for the answer of something else."""
    try:
        answer = json.loads(data)
        failure = answer.get("error")
        if isinstance(failure, dict):  # of a stream
            code = failure.get("grpc_code") or failure.get("code") or 2
            raise EtcdAnswer(int(code), str(failure.get("message", "")))
        if status != 200:
            raise EtcdAnswer(int(answer.get("code", 2)), str(answer.get("message") or failure))
        return dict(answer.get("result", answer))
    except (ValueError, AttributeError, TypeError) as error:
        raise NotEtcd(f"HTTP {status}: {data[:100].decode(errors='replace').strip()}") from error


def _parse_cancellation(reason: str) -> EtcdAnswer:
    """Return the answer for a watch that etcd has ended, which says why only in words."""
    if "auth token" in reason or "Unauthenticated" in reason:
        return EtcdAnswer(_UNAUTHENTICATED, reason)
    return EtcdAnswer(_PERMISSION_DENIED if "permission denied" in reason else min(_PASSING), reason)


def _translate(answer: EtcdAnswer) -> MetadataError | StorageFull:
    """Return the error for what etcd refuses; the answer itself if it is no refusal."""
    message = answer.received
    if answer.code == _RESOURCE_EXHAUSTED and "space" in message:
        return StorageFull(
            f"etcd must have room. Received: {message} (its alarm NOSPACE). Run `etcdctl compact`, `etcdctl "
            f"defrag --cluster` and `etcdctl alarm disarm`, or raise --quota-backend-bytes"
        )
    if answer.code == _DATA_LOSS or "corrupt" in message:
        return CorruptMetadata(
            f"All members of etcd must hold the same. Received: {message}. Remove the damaged member and add "
            f"it again: https://etcd.io/docs/v3.5/op-guide/data_corruption/"
        )
    if answer.code in (_PERMISSION_DENIED, _UNAUTHENTICATED) or "auth" in message or "user name" in message:
        return MetadataRefused(
            f"etcd must let insitu's user read and write /insitu/. Received: {message}. Give "
            f"etcd://USER@...?password=FILE with a user whom `etcdctl role grant-permission ROLE "
            f"--prefix=true readwrite /insitu/` allows it, and neither to an etcd without users"
        )
    return answer


def _list(failures: dict[Endpoint, Unanswered]) -> str:
    return "; ".join(f"{host}:{port}: {error}" for (host, port), error in failures.items()) or "no answer"
