"""Strangers, liars and the absent: what may call or answer while a group forms."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from exchange_ranks import SECRET, in_threads
from free_ports import free_addresses

from insitu import exchange
from insitu.base.errors import (
    AuthenticationError,
    ExchangeError,
    InputError,
    JoinTimeout,
    StaleGeneration,
)
from insitu.exchange import resolver
from insitu.exchange.handshake import (
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Handshake,
    ProtocolError,
    accept,
    dial,
)
from insitu.exchange.plan.transport import Mismatch
from insitu.exchange.tls_socket import TLS_FIRST_BYTE


def _outcomes(count: int, function: Callable[[int, list[str]], Any]) -> list[Any]:
    """What each rank returned, or the ExchangeError that it raised."""

    def caught(rank: int, addresses: list[str]) -> Any:
        try:
            return function(rank, addresses)
        except ExchangeError as error:
            return error

    return in_threads(count, caught)


def test_join_timeout_names_missing_ranks() -> None:
    def run(rank: int, addresses: list[str]) -> None:
        if rank != 1:
            exchange.join(rank, addresses, timeout=0.5, tasks=["worker:0", "worker:1", "worker:2"])

    for rank, outcome in enumerate(_outcomes(3, run)):
        if rank != 1:
            assert isinstance(outcome, JoinTimeout)
            assert outcome.missing == (1,)
            assert "worker:1" in str(outcome)


def test_wrong_secret_is_rejected() -> None:
    def run(rank: int, addresses: list[str]) -> None:
        exchange.join(rank, addresses, timeout=2.0, secret=SECRET if rank == 0 else b"a guess at 16 bytes")

    first, second = _outcomes(2, run)
    for outcome in (first, second):
        assert isinstance(outcome, JoinTimeout)
        assert "doesn't know this job's secret" in str(outcome)
        assert "a guess" not in str(outcome) and SECRET.decode() not in str(outcome)


def test_a_stranger_on_a_ranks_port_does_not_end_the_one_that_dials() -> None:
    """One that answered with garbage for a proof ended the dialling rank, and so the job's attempt, at
    once."""
    addresses = free_addresses(2)
    host, _, port = addresses[0].rpartition(":")
    proofs = []

    def impersonate(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(MAGIC + bytes(NONCE_BYTES))
            proofs.append(connection.recv(1000))
            connection.sendall(bytes(2 * PROOF_BYTES))
        listener.close()  # the rank gets its port after all

    listener = socket.create_server((host, int(port)))
    stranger = threading.Thread(target=impersonate, args=(listener,))
    stranger.start()

    def run(rank: int, _: list[str]) -> float:
        if rank == 0:
            stranger.join(30)
        with exchange.join(rank, addresses, secret=SECRET, timeout=30) as group:
            return float(group.all_reduce(np.ones(3, np.float32))[0])

    assert in_threads(2, run) == [2.0, 2.0]
    assert proofs


@pytest.mark.parametrize(
    "words",
    [b"", b"GET / HTTP/1.1\r\n\r\n", MAGIC, MAGIC + bytes(NONCE_BYTES), b"\xff" * 100_000],
    ids=["silence", "http", "half", "no proof", "flood"],
)
def test_garbage_does_not_disturb_peers(words: bytes) -> None:
    called = threading.Event()

    def run(rank: int, addresses: list[str]) -> float:
        if rank == 1:  # comes late, after the stranger
            assert called.wait(30)
        if rank == 2:
            return _call(addresses[0], words, called)
        with exchange.join(rank, addresses[:2], secret=SECRET) as group:
            return float(group.all_reduce(np.ones(3, np.float32))[0])

    assert in_threads(3, run)[:2] == [2.0, 2.0]


def _call(address: str, words: bytes, called: threading.Event) -> float:
    host, _, port = address.rpartition(":")
    calls = []
    while len(calls) < 5:
        try:
            calls.append(socket.create_connection((host, int(port)), 30))
        except ConnectionRefusedError:
            continue
        with contextlib.suppress(OSError):  # hung up on already, which is right
            calls[-1].sendall(words)
    called.set()
    for call in calls:
        call.close()
    return 0.0


def test_many_silent_callers_do_not_block_a_peer() -> None:
    """More than are heard at once, for longer than the peer would wait."""
    called, through = threading.Event(), threading.Event()

    def run(rank: int, addresses: list[str]) -> None:
        if rank == 2:
            host, _, port = addresses[0].rpartition(":")
            with contextlib.ExitStack() as calls:
                count = 0
                while count < 150:
                    with contextlib.suppress(ConnectionRefusedError):
                        calls.enter_context(socket.create_connection((host, int(port)), 30))
                        count += 1
                called.set()
                assert through.wait(60)
            return
        if rank == 1:
            assert called.wait(30)
        try:
            with exchange.join(rank, addresses[:2], timeout=20.0 if rank else 60.0):
                pass
        finally:
            through.set()

    with mock.patch("insitu.exchange.rendezvous._HANDSHAKE_TIMEOUT", 600.0):
        in_threads(3, run)


def test_join_timeout_names_an_unresolved_address(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def look_up(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "no.such.host.invalid" and not options.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")  # others may ask for long
        return real(host, *arguments, **options)

    monkeypatch.setattr(resolver.socket, "getaddrinfo", look_up)
    unknown = r"rank 0 \(no.such.host.invalid:5\).*no.such.host.invalid: Name or service not known"
    with pytest.raises(JoinTimeout, match=unknown):
        exchange.join(1, ["no.such.host.invalid:5", free_addresses(1)[0]], timeout=1.0)


def test_server_of_another_protocol_is_no_peer() -> None:
    addresses = free_addresses(2)
    host, _, port = addresses[0].rpartition(":")
    with socket.create_server((host, int(port))) as stranger:
        seen = []

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(b"220 mail.example ready\r\n" * 10)
                seen.append(connection.recv(1000))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(JoinTimeout) as caught:
            exchange.join(1, addresses, secret=SECRET, timeout=2.0)
        thread.join(30)
    assert caught.value.missing == (0,)
    encrypted = seen[0][:1] == TLS_FIRST_BYTE  # then it is even less: a nonce of TLS
    assert encrypted or len(seen[0]) == len(MAGIC) + NONCE_BYTES, "more than a nonce was told to a stranger"


def test_replayed_proof_is_rejected() -> None:
    """A proof that was sent to somebody else doesn't help: it is over the verifier's own nonce."""
    dialler = Handshake(dial(SECRET, {}))
    first, second = Handshake(accept(SECRET, {})), Handshake(accept(SECRET, {}))
    opening = dialler.out
    dialler.sent(len(opening))
    for acceptor in (first, second):
        acceptor.received(opening)
    dialler.received(first.out)
    with pytest.raises(AuthenticationError):
        second.received(dialler.out)
    assert second.out[len(MAGIC) + NONCE_BYTES :] == b"", "a stranger got more than a nonce"


def _handshake_up_to_the_info() -> tuple[Handshake, bytes]:
    """An acceptor that has proved itself, and the sealed info that its caller sends next."""
    dialler, acceptor = Handshake(dial(SECRET, {"rank": 1})), Handshake(accept(SECRET, {"rank": 0}))
    while not (dialler.info and dialler.out):
        for sender, receiver in ((dialler, acceptor), (acceptor, dialler)):
            while sender.out and receiver.info is None:
                part = sender.out[: receiver.missing]
                receiver.received(part)
                sender.sent(len(part))
                if dialler.info:
                    break
    return acceptor, dialler.out


def test_changed_info_is_rejected() -> None:
    acceptor, sealed = _handshake_up_to_the_info()
    changed = bytearray(sealed)
    changed[-2] ^= 1
    acceptor.received(bytes(changed[: acceptor.missing]))
    with pytest.raises(AuthenticationError, match="changed"):
        acceptor.received(bytes(changed[-acceptor.missing :]))


def test_info_over_the_limit_is_rejected() -> None:
    acceptor, _ = _handshake_up_to_the_info()
    with pytest.raises(ProtocolError):
        acceptor.received(b"\xff" * acceptor.missing)


def test_old_generation_is_rejected() -> None:
    def run(rank: int, addresses: list[str]) -> None:
        exchange.join(rank, addresses, timeout=2.0, generation=2 if rank == 0 else 1)

    first, second = _outcomes(2, run)
    assert isinstance(first, JoinTimeout) and "still at generation 1" in str(first)
    assert isinstance(second, StaleGeneration)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_shards": 5, "shards": [1, 2]}, "num_shards"),
        ({"num_shards": 3, "shards": [0, 2]}, "host each of the 3 shards once"),
        ({"num_shards": 3, "shards": [2], "transport": "tcp"}, "same transport"),
        ({"num_shards": 3, "shards": [1, 2], "compression": "bfloat16"}, "same compression"),
    ],
)
def test_incompatible_ranks_raise(options: dict[str, Any], match: str) -> None:
    def run(rank: int, addresses: list[str]) -> None:
        own: dict[str, Any] = {"num_shards": 3, "shards": [0]} if rank == 0 else options
        exchange.join(rank, addresses, timeout=10, **own)

    outcomes = _outcomes(2, run)
    assert all(isinstance(outcome, ExchangeError) for outcome in outcomes)
    assert any(match in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("size", [3, 50_000])
def test_different_operations_raise_on_all_ranks(transport: str, size: int) -> None:
    def run(rank: int, addresses: list[str]) -> None:
        with exchange.join(rank, addresses, transport=transport) as group:  # type: ignore[arg-type]
            group.all_reduce(np.zeros(size, np.float32))
            group.all_reduce(np.zeros(size, np.float32 if rank == 0 else np.int32))

    for outcome in _outcomes(2, run):
        assert isinstance(outcome, ExchangeError)
        assert f"float32[{size}]" in str(outcome) and f"int32[{size}]" in str(outcome)


@pytest.mark.parametrize("other", [0, 2])
@pytest.mark.parametrize("algorithm", ["gather", "star", "direct"])
def test_mismatch_reaches_ranks_that_did_not_see_it(
    algorithm: str, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a star only the middle one hears of everybody."""
    monkeypatch.setattr("insitu.exchange.tcp.choose_algorithm", lambda *_: algorithm)
    done = threading.Barrier(3)

    def run(rank: int, addresses: list[str]) -> None:
        with exchange.join(rank, addresses, transport="tcp") as group:
            try:
                group.all_reduce(np.zeros(3, np.float32 if rank == other else np.int32))
            finally:
                done.wait(30)  # nobody leaves before all have been told

    for rank, outcome in enumerate(_outcomes(3, run)):
        assert isinstance(outcome, Mismatch), f"rank {rank}: {outcome!r}"
        assert f"ank {other}" in str(outcome)


@pytest.mark.parametrize(
    "call",
    [
        lambda: exchange.join(2, ["a:1", "b:2"]),
        lambda: exchange.join(0, ["nowhere"]),
        lambda: exchange.join(0, ["a:0", "b:1"]),
        lambda: exchange.join(0, ["a:1", "b:2"], shards=[1, 0]),
        lambda: exchange.join(0, ["a:1", "b:2"], shards=[7]),
        lambda: exchange.join(0, ["a:1", "b:2"], tasks=["one"]),
        lambda: exchange.join(0, ["a:1", "b:2"], transport="pigeon"),  # type: ignore[arg-type]
        lambda: exchange.join(0, ["a:1", "b:2"], compression="zip"),  # type: ignore[arg-type]
        lambda: exchange.join(0, ["a:1"], num_shards=2),
    ],
)
def test_invalid_groups_are_rejected_at_once(call: Callable[[], object]) -> None:
    with pytest.raises((InputError, ExchangeError)):
        call()
