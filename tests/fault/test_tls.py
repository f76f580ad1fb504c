"""Encrypted connections: what is on the wire, somebody in the middle, and connections that are cut."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_ranks import SECRET, in_threads, ranks
from free_ports import free_addresses
from parameter_servers import clients, servers
from tls_peers import Relay, man_in_the_middle, relay

from insitu import exchange
from insitu.base.errors import AuthenticationError, ExchangeError, JoinTimeout, PeerLost
from insitu.exchange.tls_socket import TLS_FIRST_BYTE
from insitu.parameters import Client

KNOWN = np.float32(1.2345678)
"""A number whose bytes are found where it is sent as it is."""
MODES = ["always", "never"]


def _reduce(pipe: Any, rank: int, addresses: list[str], mode: str) -> tuple[bytes, bool]:
    """Run all operations; return the bits of all results, and whether compiled code moved them."""
    os.environ["INSITU_TLS"] = mode
    rows = np.random.default_rng(rank).standard_normal((2, 700_001)).astype(np.float32)
    results = []
    with exchange.join(rank, addresses, secret=SECRET, transport="tcp") as group:
        for size in (1, 3, 5000, 40_000, 700_001):
            buffer = group.buffer(size, np.float32)
            for row in rows:
                buffer[:] = row[:size]
                results.append(group.all_reduce(buffer, "weighted_mean", [rank + 1.0]).tobytes())
            results.append(group.all_reduce(rows[0, :size].astype(np.float16)).tobytes())
        results.append(group.broadcast(rows[0].copy(), 1).tobytes())
        results.append(group.all_gather(rows[1, :1000].copy()).tobytes())
        compiled = group._transport.session.kernels is not None  # type: ignore[attr-defined]
    return b"".join(results), compiled


@pytest.mark.parametrize("count", [2, 3])
def test_encryption_changes_no_bit(count: int) -> None:
    found = {}
    for mode in MODES:
        with ranks(count, _reduce, mode) as processes:
            found[mode] = [process.result() for process in processes]
    assert [bits for bits, _ in found["always"]] == [bits for bits, _ in found["never"]]
    assert not any(compiled for _, compiled in found["always"])


def _through(between: Relay, addresses: list[str]) -> list[list[str]]:
    """Return the addresses as each of two ranks knows them: rank 1 dials rank 0 through a relay."""
    return [addresses, [between.address, addresses[1]]]


@pytest.mark.parametrize("mode", MODES)
def test_numbers_of_the_exchange_are_not_on_the_wire(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_TLS", mode)
    addresses = free_addresses(2)
    with relay(addresses[0]) as between:

        def run(rank: int, _: list[str]) -> float:
            known = _through(between, addresses)[rank]
            with exchange.join(rank, known, secret=SECRET, transport="tcp") as group:
                group.all_reduce(np.full(100_000, KNOWN))
                return float(group.all_reduce(np.full(7, KNOWN))[0])

        assert in_threads(2, run) == [float(KNOWN + KNOWN)] * 2
        # A rank dials again if its first call isn't answered in time.
        assert between.calls >= 2 and len(between.seen) > 400_000
        assert (between.seen[:1] == TLS_FIRST_BYTE) == (mode == "always")
        for words in (KNOWN.tobytes() * 2, b"all_reduce", b'"rank"'):
            assert (words in between.seen) == (mode == "never"), words


@pytest.mark.parametrize("mode", MODES)
def test_values_of_parameter_servers_are_not_on_the_wire(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_TLS", mode)
    with (
        servers() as addresses,
        relay(addresses[0]) as between,
        clients([between.address], transport="tcp") as (client,),
    ):
        client.define({"w": ((50_000,), "float32", np.full(50_000, KNOWN))}, updater={"name": "sgd"})
        client.pull().result()
        np.testing.assert_array_equal(client.values["w"], np.full(50_000, KNOWN))
        assert (between.seen[:1] == TLS_FIRST_BYTE) == (mode == "always")
        for words in (KNOWN.tobytes() * 2, b'"op"'):
            assert (words in between.seen) == (mode == "never"), words


def test_somebody_in_the_middle_is_no_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It ends TLS on both sides with a certificate of its own, and passes everything on."""
    monkeypatch.setenv("INSITU_TLS", "always")
    addresses = free_addresses(2)
    with man_in_the_middle(addresses[0], tmp_path) as middle:

        def run(rank: int, _: list[str]) -> Exception | None:
            try:
                exchange.join(rank, _through(middle, addresses)[rank], secret=SECRET, timeout=3.0).close()
            except ExchangeError as error:
                return error
            return None

        for error in in_threads(2, run):
            assert isinstance(error, JoinTimeout)
            assert "put another certificate in place" in str(error)
        assert middle.calls and b"insitu" in middle.seen, "nobody was in the middle"
        assert b'"rank"' not in middle.seen


def test_somebody_in_the_middle_is_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INSITU_TLS", "always")
    with servers() as addresses, man_in_the_middle(addresses[0], tmp_path) as middle:
        with pytest.raises(AuthenticationError, match="put another certificate in place"):
            clients([middle.address], timeout=2.0).__enter__()
        assert middle.calls and b"insitu" in middle.seen, "nobody was in the middle"
        assert b'"room"' not in middle.seen
        with clients(addresses) as (client,):
            assert client.stats()


def test_a_plain_dialler_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as set_before:
        set_before.setenv("INSITU_TLS", "always")
        opened = servers()
        addresses = opened.__enter__()
    monkeypatch.setenv("INSITU_TLS", "never")
    try:
        with pytest.raises(AuthenticationError, match="Set INSITU_TLS to the same for all tasks"):
            clients(addresses, timeout=2.0).__enter__()
    finally:
        opened.__exit__(None, None, None)


def test_a_group_forms_again_over_new_encrypted_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_TLS", "always")
    addresses = free_addresses(2)
    cut = threading.Event()
    with relay(addresses[0]) as between:

        def run(rank: int, _: list[str]) -> list[float]:
            known = _through(between, addresses)[rank]
            sums = []
            with exchange.join(rank, known, secret=SECRET, transport="tcp", timeout=30) as group:
                buffer = group.buffer(3_000_000, np.float32)
                with pytest.raises(PeerLost):
                    for turn in range(10_000):
                        buffer[:] = before = turn + 1.0
                        if turn == 3 and rank == 0:
                            cut.set()
                        group.all_reduce(buffer)
                assert set(np.unique(buffer).tolist()) <= {before, 2 * before}
                group.rejoin(1)
                for _ in range(2):
                    buffer[:] = KNOWN
                    group.all_reduce(buffer)
                    sums += np.unique(buffer).tolist()
            return sums

        def cut_it() -> None:
            assert cut.wait(60)
            assert between.cut() >= 2

        fault = threading.Thread(target=cut_it, daemon=True)
        fault.start()
        assert in_threads(2, run) == [[float(KNOWN + KNOWN)] * 2] * 2
        fault.join(60)
        assert between.calls >= 4


def test_a_worker_reconnects_over_tls_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_TLS", "always")
    count = 200_000

    def push(client: Client, sequence: int) -> None:
        for gradient in client.gradients(0).values():
            gradient[...] = -1
        client.push(sequence, 1, shard=0).result(60)

    with (
        servers() as addresses,
        relay(addresses[0]) as between,
        clients([between.address], transport="tcp") as (client,),
    ):
        client.define({"w": ((count,), "float32")}, updater={"name": "sgd", "learning_rate": 1.0})
        client.pull().result()
        for sequence in range(12):
            pending = client.pull()
            if sequence % 4 == 3:
                assert between.cut() >= 2
            push(client, sequence)
            pending.result(60)
        client.pull().result()
        np.testing.assert_array_equal(client.values["w"], np.full(count, 12, "f4"))
        assert between.calls >= 2 * 4
