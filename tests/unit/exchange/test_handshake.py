"""The handshake of two peers, without sockets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.errors import AuthenticationError, ExchangeError, InputError
from insitu.exchange.handshake import (
    INFO_LIMIT,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Handshake,
    PeerInfo,
    ProtocolError,
    accept,
    check_secret,
    dial,
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


def test_acceptor_with_another_secret_learns_no_proof() -> None:
    dialler, acceptor = Handshake(dial(b"one", {"rank": 1})), Handshake(accept(b"other", {"rank": 0}))
    acceptor.received(dialler.out)
    dialler.sent(len(dialler.out))
    with pytest.raises(AuthenticationError, match="doesn't know this job's secret"):
        dialler.received(acceptor.out)
    assert dialler.info is None and dialler.out == b""


def test_dialler_with_another_secret_learns_only_a_nonce() -> None:
    acceptor = Handshake(accept(b"secret", {"rank": 0}))
    acceptor.received(MAGIC + bytes(NONCE_BYTES))
    assert len(acceptor.out) == len(MAGIC) + NONCE_BYTES + PROOF_BYTES
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


@pytest.mark.parametrize("secret", ["text", None, 3])
def test_secret_must_be_bytes(secret: object) -> None:
    with pytest.raises(InputError, match="secret must be bytes"):
        check_secret(secret)
