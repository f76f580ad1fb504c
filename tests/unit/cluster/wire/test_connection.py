"""Connections to the head: who doesn't know the token gets nowhere."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ipv6 import needs_ipv6

from insitu.base.errors import ClusterError, ExchangeError, InputError
from insitu.base.net.ports import format_address
from insitu.cluster.engines import Channel
from insitu.cluster.wire import connection
from insitu.exchange import SocketHandshake, read_tls_settings

TOKEN = "a token that nobody can guess"
HEAD = {"room": "agents", "role": "head", "epoch": 1}


class Listening:
    """An acceptor in a thread, which answers each message by {"echo": message}."""

    def __init__(self, host: str = "127.0.0.1", info: dict[str, Any] = HEAD) -> None:
        listener = connection.open_listener(host, 0)
        self.address = format_address(host, listener.getsockname()[1])
        self.acceptor = connection.Acceptor(listener, TOKEN, info)
        self.callers: list[tuple[Channel, dict[str, Any]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended.is_set():
            poll = select.poll()
            poll.register(self.acceptor, select.POLLIN)
            for handshake in self.acceptor.pending.values():
                poll.register(handshake, select.POLLOUT if handshake.has_unsent else select.POLLIN)
            for channel, _ in self.callers:
                poll.register(channel, select.POLLIN)
            for descriptor, _ in poll.poll(20):
                if descriptor == self.acceptor.fileno():
                    self.acceptor.accept()
                elif descriptor in self.acceptor.pending:
                    found = self.acceptor.advance(descriptor)
                    self.callers += [found] if found else []
            for channel, _ in list(self.callers):
                with contextlib.suppress(Exception):
                    for message in channel.receive():
                        channel.send(message if "error" in message else {"echo": message})

    def close(self) -> None:
        self._ended.set()
        self._thread.join(30)
        self.acceptor.close()
        for channel, _ in self.callers:
            channel.close()


@contextlib.contextmanager
def listening(*arguments: Any) -> Iterator[Listening]:
    with contextlib.closing(Listening(*arguments)) as found:
        yield found


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_both_sides_know_who_is_there_once_the_token_is_proved(host: str) -> None:
    with listening(host) as head:
        found = connection.dial_head(head.address, TOKEN, "agent")
        assert found.head == HEAD and found.own_host == host
        found.channel.close()
        assert connection.ask_head(head.address, TOKEN, {"do": "x"}, 30) == {"echo": {"do": "x"}}
        assert [info for _, info in head.callers] == [
            {"room": "agents", "role": "agent"},
            {"room": "agents", "role": "client"},
        ]


def test_an_error_of_the_head_is_an_error() -> None:
    with listening() as head, pytest.raises(ClusterError, match="no such thing"):
        connection.ask_head(head.address, TOKEN, {"error": "no such thing"}, 30)


def test_another_token_is_named_and_gets_nowhere() -> None:
    with listening() as head:
        with pytest.raises(
            ClusterError, match=r"has another token than this machine\. Copy the file `token`"
        ):
            connection.dial_head(head.address, "another token, just as long", "agent")
        assert head.callers == []


def test_what_goes_over_the_wire_is_encrypted_also_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_TLS", "never")
    from insitu.exchange import TlsSocket

    with listening() as head:
        found = connection.dial_head(head.address, TOKEN, "agent")
        assert isinstance(found.channel._socket, TlsSocket)
        found.channel.close()


def test_a_caller_in_plain_text_is_refused_also_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_TLS", "never")
    with listening() as head:
        host, _, port = head.address.rpartition(":")
        caller = socket.create_connection((host, int(port)))
        caller.setblocking(False)
        handshake = SocketHandshake(
            caller,
            TOKEN.encode(),
            {"room": "agents", "role": "agent"},
            read_tls_settings(),
            dialled=True,
            deadline=time.monotonic() + 30,
        )
        with contextlib.closing(caller), pytest.raises(ExchangeError, match="takes no plain text"):
            connection._complete(handshake)
        assert head.callers == []


def test_a_task_of_a_job_is_no_head() -> None:
    other = listening("127.0.0.1", {"room": "exchange"})
    with other as found, pytest.raises(ClusterError, match="A head must listen at"):
        connection.dial_head(found.address, TOKEN, "agent")


def test_a_stranger_and_silence_end_no_listener() -> None:
    with listening() as head:
        host, _, port = head.address.rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(70)]
        for stranger in strangers[:10]:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
        assert connection.ask_head(head.address, TOKEN, {}, 30) == {"echo": {}}
        for stranger in strangers:
            stranger.close()


def test_of_too_many_silent_callers_the_oldest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MAX_HANDSHAKES", 4)
    listener = connection.open_listener("127.0.0.1", 0)
    with (
        contextlib.closing(connection.Acceptor(listener, TOKEN, HEAD)) as found,
        contextlib.ExitStack() as stack,
    ):
        for number in range(7):
            caller = stack.enter_context(socket.create_connection(listener.getsockname(), 30))
            if number == 0:
                first = caller
            while poll_one(found):
                found.accept()
        assert len(found.pending) == 4
        assert first.recv(1) == b""


def poll_one(found: connection.Acceptor) -> bool:
    """Return whether a caller waits to be accepted."""
    poll = select.poll()
    poll.register(found, select.POLLIN)
    return bool(poll.poll(0))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("no.such.host.invalid:7070", r"must be reachable.*Received: no\.such\.host\.invalid:7070 \("),
        ("127.0.0.1:1", r"Received: 127\.0\.0\.1:1 \(Connection refused\)"),
    ],
)
def test_a_head_that_is_not_there_is_named(address: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        connection.dial_head(address, TOKEN, "agent")
    with pytest.raises(InputError, match="host:port"):
        connection.dial_head("head", TOKEN, "agent")


def test_a_head_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        with pytest.raises(ClusterError, match="no answer to the handshake"):
            connection.dial_head(address, TOKEN, "agent")


def test_late_handshakes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 0.0)
    with (
        contextlib.closing(
            connection.Acceptor(connection.open_listener("127.0.0.1", 0), TOKEN, HEAD)
        ) as found,
        socket.create_connection(found._listener.getsockname()),
    ):
        deadline = time.monotonic() + 30
        while not found.pending and time.monotonic() < deadline:
            found.accept()
        late = list(found.list_late())
        assert late == list(found.pending)
        found.drop(late[0])
        assert not found.pending


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ClusterError, match=rf"Received: 127\.0\.0\.1:{port} \(Address already in use\).*--port"
        ):
            connection.open_listener("127.0.0.1", port)


def test_only_agents_and_clients_call_a_head() -> None:
    assert connection.check_role({"role": "agent"}) == "agent"
    with pytest.raises(InputError, match="Received: None"):
        connection.check_role({})


def test_without_descriptors_callers_wait_and_nothing_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener stays ready: the head's loop would run without end."""
    listener = connection.open_listener("127.0.0.1", 0)

    class Full:
        """A listener of a process that has no descriptor left."""

        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    now = 100.0
    monkeypatch.setattr(connection.time, "monotonic", lambda: now)
    with contextlib.closing(connection.Acceptor(listener, TOKEN, HEAD)) as acceptor:
        assert not acceptor.is_paused
        with monkeypatch.context() as patch:
            patch.setattr(acceptor, "_listener", Full())
            acceptor.accept()
        assert acceptor.is_paused
        now += 1
        assert not acceptor.is_paused


def test_a_host_that_is_gone_is_noticed_at_both_ends_while_nothing_is_said() -> None:
    with listening() as head:
        found = connection.dial_head(head.address, TOKEN, "client")
        found.channel.send({"do": "x"})
        deadline = time.monotonic() + 60
        while not head.callers and time.monotonic() < deadline:
            time.sleep(0.01)
        for channel in (found.channel, head.callers[0][0]):
            read = channel.connection.getsockopt
            assert read(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle, between, count = (read(socket.IPPROTO_TCP, name) for name in names)
            assert idle + between * count <= 60
        found.channel.close()
