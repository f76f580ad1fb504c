"""The handshake of one connection, encrypted or not. Processes are in tests/fault/test_tls.py."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tls_peers import EXPIRED, own_files, write_certificate

from insitu.base.errors import AuthenticationError
from insitu.exchange.handshake import MAGIC, NONCE_BYTES, TLS_ONLY, Handshake, ProtocolError, dial, get_answer
from insitu.exchange.socket_handshake import SocketHandshake
from insitu.exchange.tls import TlsMode, TlsSettings
from insitu.exchange.tls_socket import TlsSocket

SECRET = b"the secret of a test"


@contextlib.contextmanager
def connected(server: socket.socket | None = None) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection over loopback: that of the dialler first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with dialled, accepted:
        for end in (dialled, accepted):
            end.setblocking(False)
        yield dialled, accepted


_sides: list[SocketHandshake] = []


@pytest.fixture(autouse=True)
def _no_side_stays_open() -> Iterator[None]:
    yield
    while _sides:
        _sides.pop().socket.close()


def _side(connection: socket.socket, settings: TlsSettings, dialled: bool, **more: Any) -> SocketHandshake:
    info = {"side": "dialled" if dialled else "accepted"}
    secret, deadline = more.get("secret", SECRET), time.monotonic() + 30
    _sides.append(SocketHandshake(connection, secret, info, settings, dialled=dialled, deadline=deadline))
    return _sides[-1]


def _shake(first: SocketHandshake, second: SocketHandshake) -> list[Exception | bool]:
    """Advance both until they are done or have failed, as their owners do. Return each one's outcome."""
    outcomes: list[Exception | bool] = [False, False]
    deadline = time.monotonic() + 30
    while not all(outcomes):
        assert time.monotonic() < deadline, f"the handshake doesn't end: {outcomes}"
        for number, side in enumerate((first, second)):
            if outcomes[number]:
                continue
            try:
                outcomes[number] = side.advance()
            except Exception as error:
                side.send_answer(error)
                side.socket.close()
                outcomes[number] = error
    return outcomes


@pytest.mark.parametrize(
    ("dialler", "acceptor", "encrypted"),
    [
        ("auto", "auto", False),
        ("always", "always", True),
        ("always", "auto", True),
        ("always", "never", True),
        ("never", "auto", False),
        ("never", "never", False),
    ],
)
def test_both_learn_the_other_ones_facts(dialler: TlsMode, acceptor: TlsMode, encrypted: bool) -> None:
    with connected() as (here, there):
        first = _side(here, TlsSettings(dialler), True)
        second = _side(there, TlsSettings(acceptor), False)
        assert (first.has_unsent, second.has_unsent) == (True, False)
        assert _shake(first, second) == [True, True]
        with first.socket, second.socket:
            assert (first.peer_info, second.peer_info) == ({"side": "accepted"}, {"side": "dialled"})
            assert [isinstance(side.socket, TlsSocket) for side in (first, second)] == [encrypted] * 2
            first.socket.send(b"numbers")
            assert select.select([second.socket], [], [], 30)[0]
            assert second.socket.recv(100) == b"numbers"


def test_plain_text_is_refused_where_it_must_not_be_and_the_dialler_is_told() -> None:
    with connected() as (here, there):
        outcomes = _shake(_side(here, TlsSettings("never"), True), _side(there, TlsSettings("always"), False))
    told, refused = outcomes
    assert isinstance(told, AuthenticationError) and "Set INSITU_TLS to the same" in str(told)
    assert isinstance(refused, AuthenticationError)
    assert "INSITU_TLS=always. Received: plain text" in str(refused) and get_answer(refused) == TLS_ONLY


def test_somebody_who_speaks_no_tls_is_named_with_the_setting() -> None:
    with connected() as (here, there):
        side = _side(here, TlsSettings("always"), True)
        assert not side.advance()
        there.send(b"220 mail.example ready\r\n")
        with pytest.raises(ConnectionError, match=r"must speak TLS 1.3.*Received: .*INSITU_TLS"):
            while not side.advance():
                pass


def test_another_secret_is_refused() -> None:
    for mode in ("always", "auto"):
        with connected() as (here, there):
            first = _side(here, TlsSettings(mode), True)
            second = _side(there, TlsSettings(mode), False, secret=b"the secret of another job")
            for outcome in _shake(first, second):
                assert isinstance(outcome, AuthenticationError)
                assert "doesn't know this job's secret" in str(outcome)


@pytest.mark.parametrize("proves_by", [b"", b"another certificate"])
def test_a_proof_for_another_connection_does_not_fit(proves_by: bytes) -> None:
    """So somebody in the middle, who shows both of them another certificate, can't pass proofs on."""
    with connected() as (here, there):
        first, second = _side(here, TlsSettings("always"), True), _side(there, TlsSettings("always"), False)
        first._make_steps = lambda binding: dial(SECRET, {}, proves_by)
        outcomes = _shake(first, second)
        assert all(isinstance(outcome, AuthenticationError) for outcome in outcomes)
        assert "another certificate" in str(outcomes[0])


def test_certificates_of_the_user_are_needed_on_both_sides(tmp_path: Path) -> None:
    own = write_certificate(tmp_path / "own.pem")
    other = write_certificate(tmp_path / "other.pem")
    old = write_certificate(tmp_path / "old.pem", EXPIRED)
    with connected() as (here, there):
        first, second = _side(here, own_files(own, own), True), _side(there, own_files(own, own), False)
        assert _shake(first, second) == [True, True]
    for dialler, acceptor, where, reason in (
        (own_files(other, own), own_files(own, own), 1, "self.signed certificate"),
        (own_files(own, own), own_files(other, own), 0, "self.signed certificate"),
        (TlsSettings("always"), own_files(own, own), 1, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        (own_files(own, own), TlsSettings("always"), 0, "self.signed certificate"),
        (own_files(old, old), own_files(old, old), 0, "certificate has expired"),
    ):
        with connected() as (here, there):
            outcomes = _shake(_side(here, dialler, True), _side(there, acceptor, False))
        found = outcomes[where]
        assert isinstance(found, ConnectionError), outcomes
        with pytest.raises(ConnectionError, match=rf"{reason}.*INSITU_TLS and the files"):
            raise found


def test_a_certificate_that_was_made_here_is_taken_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clocks of hosts may differ: what counts is the certificate itself."""
    from insitu.exchange import tls

    made = tls.make_certificate(validity=EXPIRED)
    monkeypatch.setattr(tls, "make_certificate", lambda: made)
    tls._make_identity.cache_clear()
    with connected() as (here, there):
        first, second = _side(here, TlsSettings("always"), True), _side(there, TlsSettings("always"), False)
        assert _shake(first, second) == [True, True]
    tls._make_identity.cache_clear()


def test_a_flood_in_the_handshake_leaves_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that TLS passes over could keep the thread of a listener for as long as they come."""
    with connected() as (here, there):
        record = b"\x14\x03\x03\x00\x01\x01"  # change_cipher_spec, which is ignored
        here.send(b"\x16\x03\x03" + record * 5000)
        assert select.select([there], [], [], 30)[0]
        side = _side(there, TlsSettings(), False)
        reads = []
        receive = TlsSocket._receive

        def count(connection: TlsSocket) -> bool:
            reads.append(connection)
            return receive(connection)

        monkeypatch.setattr(TlsSocket, "_receive", count)
        with contextlib.suppress(ConnectionError):
            assert not side.advance()
        assert 0 < len(reads) <= 64


@pytest.mark.parametrize("words", [b"", b"\x16", b"\x16\x03\x01\xff\xff", MAGIC, b"GET / HTTP/1.1\r\n\r\n"])
def test_a_caller_that_leaves_in_the_handshake_fails_it(words: bytes) -> None:
    with connected() as (here, there):
        here.send(words)
        here.shutdown(socket.SHUT_WR)
        side = _side(there, TlsSettings(), False)
        with pytest.raises(ConnectionError, match=r"handshake|TLS"):
            while not side.advance():
                pass


def test_a_dialler_that_finds_itself_is_alone() -> None:
    with socket.socket() as lonely:
        lonely.bind(("127.0.0.1", 0))
        lonely.connect(lonely.getsockname())
        lonely.setblocking(False)
        with pytest.raises(ConnectionRefusedError, match="nobody listens"):
            _side(lonely, TlsSettings(), True).advance()


def test_plain_text_between_hosts_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[socket.socket] = []
    monkeypatch.setattr("insitu.exchange.socket_handshake.warn_about_plain_text", warned.append)
    modes: list[tuple[TlsMode, int]] = [("never", 2), ("always", 0)]
    for mode, count in modes:
        warned.clear()
        with connected() as (here, there):
            sides = _side(here, TlsSettings(mode), True), _side(there, TlsSettings(mode), False)
            assert _shake(*sides) == [True, True]
        assert len(warned) == count


def test_an_answer_instead_of_a_nonce_names_the_setting() -> None:
    dialler = Handshake(dial(SECRET, {}))
    dialler.sent(len(dialler.out))
    assert len(TLS_ONLY) == len(MAGIC) + NONCE_BYTES
    with pytest.raises(AuthenticationError, match="INSITU_TLS"):
        dialler.received(TLS_ONLY)
    dialler = Handshake(dial(SECRET, {}))
    with pytest.raises(ProtocolError):
        dialler.received(TLS_ONLY[:-1] + b"x")
