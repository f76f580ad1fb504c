"""The rendezvous of ranks. Faults are tested in tests/fault/test_exchange_trust.py."""

from __future__ import annotations

import errno
import socket

import pytest
from exchange_ranks import in_threads
from free_ports import free_addresses
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import ExchangeError, InputError, JoinTimeout, StaleGeneration
from insitu.exchange import rendezvous
from insitu.exchange.handshake import PeerInfo
from insitu.exchange.plan.transport import GroupConfig
from insitu.exchange.rendezvous import Rendezvous, parse_address


def _open(rank: int, addresses: list[str], timeout: float = 20.0, **more: object) -> Rendezvous:
    config = GroupConfig(0, rank, tuple(addresses), (rank,), None)
    info: PeerInfo = {"rank": rank, "generation": 0, **more}
    return Rendezvous(config, info, lambda info: None, b"", timeout, lambda: False)


@given(st.from_regex(r"[a-z0-9.-]+", fullmatch=True), st.integers(1, 65535))
def test_address_is_split_at_the_port(host: str, port: int) -> None:
    assert parse_address(f"{host}:{port}") == (host, port)


def test_address_may_be_ipv6_and_its_port_0() -> None:
    assert parse_address("[::1]:5") == ("::1", 5)
    assert parse_address("a:0", lowest=0) == ("a", 0)


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:-1", "a:x"])
def test_invalid_addresses_are_rejected(text: str) -> None:
    with pytest.raises(InputError, match="host:port"):
        parse_address(text)


def test_each_pair_gets_a_connection_per_channel() -> None:
    def run(rank: int, addresses: list[str]) -> list[tuple[int, str]]:
        with _open(rank, addresses, name=f"peer {rank}") as rendezvous:
            control = rendezvous.connect(range(3), "control")
            data = rendezvous.connect([r for r in (0, 2) if rank != 1], "data")
            assert all(control[peer].connection is not data[peer].connection for peer in data)
            for peer in (*control.values(), *data.values()):
                peer.connection.close()
            return sorted((peer.rank, peer.info["name"]) for peer in control.values())

    names = [(rank, f"peer {rank}") for rank in range(3)]
    assert in_threads(3, run) == [names[1:], [names[0], names[2]], names[:2]]


def test_missing_ranks_are_named_with_their_addresses() -> None:
    addresses = free_addresses(2)
    with _open(0, addresses, timeout=0.1) as rendezvous, pytest.raises(JoinTimeout) as caught:
        rendezvous.connect(range(2), "control")
    assert caught.value.missing == (1,)
    assert f"without rank 1 ({addresses[1]})" in str(caught.value)


@pytest.mark.parametrize("call", ["connect", "bind"])
def test_no_way_to_an_address_of_this_host_is_told_in_seconds(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the loopback interface is down, or has only IPv6. A rank of another host is waited for."""

    class Unrouted(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

        def bind(self, address: object) -> None:
            if call == "bind":
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().bind(address)  # type: ignore[arg-type]

    addresses = free_addresses(2)
    monkeypatch.setattr(rendezvous.socket, "socket", Unrouted)
    monkeypatch.setattr(rendezvous, "_NO_ROUTE_SECONDS", 0.1)
    told = pytest.raises(ExchangeError, match=r"Received: .* for 127.0.0.1:\d+. Bring that interface up")
    with told, _open(1, addresses, timeout=600.0) as opened:
        opened.connect(range(2), "control")
    if call == "connect":
        late = pytest.raises(JoinTimeout, match="Network is unreachable")
        with late, _open(1, ["192.0.2.1:5000", addresses[1]], timeout=0.5) as opened:
            opened.connect(range(2), "control")


def test_cancelled_wait_raises_stale_generation() -> None:
    config = GroupConfig(3, 0, tuple(free_addresses(2)), (0,), ("a", "b"))
    rendezvous = Rendezvous(config, {"generation": 3}, lambda info: None, b"", 20.0, lambda: True)
    with rendezvous, pytest.raises(StaleGeneration, match="generation 3 for a, which was cancelled"):
        rendezvous.connect(range(2), "control")


def test_two_processes_of_one_rank_raise() -> None:
    def run(number: int, addresses: list[str]) -> str:
        rank = (0, 1, 1)[number]
        own = [addresses[0], addresses[number or 1]]
        try:
            with _open(rank, own, timeout=5.0 if number == 0 else 2.0) as rendezvous:
                peers = rendezvous.connect(range(2), "control")
                if number == 0:
                    rendezvous.connect([5], "wait")  # another rank, so that it still listens
                for peer in peers.values():
                    peer.connection.close()
        except ExchangeError as error:
            return str(error)
        return ""

    assert "Received: rank 1 from two processes" in in_threads(3, run)[0]
