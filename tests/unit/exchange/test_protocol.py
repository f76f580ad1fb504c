"""What must be equal on all ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from exchange_ranks import SECRET, in_threads

from insitu import exchange
from insitu.base.errors import ExchangeError
from insitu.exchange import algorithms, joining, tcp_session
from insitu.exchange.protocol import PROTOCOL_KEYS, compute_digest, describe_protocol


@pytest.fixture(autouse=True)
def _computes_anew() -> Any:
    compute_digest.cache_clear()
    yield
    compute_digest.cache_clear()


def test_the_digest_follows_the_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that differed in one of them computed wrong sums without any error."""
    first = compute_digest()
    compute_digest.cache_clear()
    assert compute_digest() == first
    for module, name, value in (
        (algorithms, "_LEAD", 3),
        (algorithms, "CHUNK_BYTES", 1 << 17),
        (tcp_session, "_HEADER", __import__("struct").Struct("!IQ32s")),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            compute_digest.cache_clear()
            assert compute_digest() != first
    compute_digest.cache_clear()
    assert compute_digest() == first


@pytest.mark.parametrize("key", PROTOCOL_KEYS)
def test_ranks_that_differ_are_told_on_both_sides(key: str) -> None:
    facts = [describe_protocol(), {**describe_protocol(), key: "another"}]
    given = iter(facts)

    def run(rank: int, addresses: list[str]) -> Exception:
        with pytest.raises(ExchangeError) as caught:
            exchange.join(rank, addresses, secret=SECRET, timeout=20.0)
        return caught.value

    with mock.patch.object(joining, "describe_protocol", lambda: next(given)):
        for error in in_threads(2, run):
            assert f"their {key} must be equal" in str(error) and "'another' from rank" in str(error)
