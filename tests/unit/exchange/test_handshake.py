"""The handshake of two peers, without sockets."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import AuthenticationError, ExchangeError, InputError
from insitu.exchange.handshake import (
    INFO_LIMIT,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Handshake,
    InsecureSecret,
    PeerInfo,
    ProtocolError,
    _parse_info,
    accept,
    dial,
    get_answer,
    resolve_secret,
)

JSON = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=5)), max_size=4)


def _run(dialler: Handshake, acceptor: Handshake, size: int = 1000) -> None:
    """Move `size` bytes at once between both, until neither has anything to send."""
    while dialler.out or acceptor.out:
        for sender, receiver in ((dialler, acceptor), (acceptor, dialler)):
            sent = sender.out[: min(size, receiver.missing)]
            sender.sent(len(sent))
            if sent:
                receiver.received(sent)


@given(JSON, JSON, st.integers(1, 200))
def test_both_learn_the_other_ones_info(first: PeerInfo, second: PeerInfo, size: int) -> None:
    dialler, acceptor = Handshake(dial(b"secret", first)), Handshake(accept(b"secret", second))
    _run(dialler, acceptor, size)
    assert (dialler.info, acceptor.info) == (second, first)
    assert dialler.out == acceptor.out == b""


def test_a_false_acceptor_learns_no_info() -> None:
    """The dialler proves itself first, but says nothing about itself before the acceptor has."""
    dialler = Handshake(dial(b"one", {"rank": 1}))
    dialler.sent(len(dialler.out))
    dialler.received(MAGIC + bytes(NONCE_BYTES))
    assert len(dialler.out) == PROOF_BYTES
    dialler.sent(PROOF_BYTES)
    with pytest.raises(AuthenticationError, match="doesn't know this job's secret"):
        dialler.received(bytes(PROOF_BYTES))
    assert dialler.info is None and dialler.out == b""


def test_a_refused_dialler_is_told_the_reason() -> None:
    dialler, acceptor = Handshake(dial(b"one", {})), Handshake(accept(b"other", {}))
    with pytest.raises(AuthenticationError) as refused:
        _run(dialler, acceptor)
    assert len(get_answer(refused.value)) == PROOF_BYTES
    with pytest.raises(AuthenticationError, match="doesn't know this job's secret"):
        dialler.received(get_answer(refused.value))


def test_another_version_of_the_handshake_is_named_on_both_sides() -> None:
    old = MAGIC[:-1] + b"\x01"
    with pytest.raises(ProtocolError, match=r"Received: b'insitu\\x00\\x01'") as refused:
        Handshake(accept(b"", {})).received(old + bytes(NONCE_BYTES))
    assert get_answer(refused.value).startswith(MAGIC)


@pytest.mark.parametrize("body", [b"[" * 9 + b"]" * 9, b"3", b"{", b"[" * 60_000, b"\xff"])
def test_an_info_that_is_no_plain_object_is_refused(body: bytes) -> None:
    """Deep nesting ended the process with RecursionError."""
    with pytest.raises(ProtocolError, match="must be a JSON object"):
        _parse_info(body)


def test_dialler_with_another_secret_learns_only_a_nonce() -> None:
    acceptor = Handshake(accept(b"secret", {"rank": 0}))
    acceptor.received(MAGIC + bytes(NONCE_BYTES))
    assert len(acceptor.out) == len(MAGIC) + NONCE_BYTES
    with pytest.raises(AuthenticationError):
        acceptor.received(bytes(PROOF_BYTES))


@pytest.mark.parametrize("steps", [dial(b"", {}), accept(b"", {})])
def test_other_protocols_are_rejected(steps: object) -> None:
    handshake = Handshake(steps)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="Received: b'HTTP"):
        handshake.received(b"HTTP/1.1 400 Bad Request".ljust(handshake.missing))


def test_info_over_the_limit_is_not_sent() -> None:
    dialler, acceptor = Handshake(dial(b"", {"x": "y" * INFO_LIMIT})), Handshake(accept(b"", {}))
    with pytest.raises(ExchangeError, match=f"{INFO_LIMIT} bytes at most"):
        _run(dialler, acceptor)


@pytest.mark.parametrize("secret", ["text", 3])
def test_secret_must_be_bytes(secret: object) -> None:
    with pytest.raises(InputError, match="secret must be bytes"):
        resolve_secret(secret)  # type: ignore[arg-type]


@pytest.mark.parametrize("secret", [b"", b"hunter2", bytes(15)])
def test_a_short_secret_is_refused_unless_it_is_called_insecure(secret: bytes) -> None:
    with pytest.raises(InputError, match="must have 16 bytes at least"):
        resolve_secret(secret)
    assert resolve_secret(InsecureSecret(secret)) == secret
    assert secret == b"" or secret.decode(errors="replace") not in repr(InsecureSecret(secret))


def test_no_secret_is_one_of_this_process() -> None:
    found = resolve_secret(None)
    assert len(found) == 32 and resolve_secret(None) == found
    code = "from insitu.exchange.handshake import resolve_secret; print(resolve_secret(None).hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() not in ("", found.hex())
