"""One server as a worker sees it."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from exchange_ranks import SECRET
from free_ports import free_addresses
from parameter_servers import clients, servers
from slow_link import slow_link

from insitu.base.errors import NotFinite, ParameterError, ServerLost
from insitu.exchange.handshake import MAGIC, NONCE_BYTES, PROOF_BYTES
from insitu.parameters import ParameterServer, connect
from insitu.parameters.server_connection import ServerConnection, parse_failure


def test_a_request_that_cannot_be_encoded_is_not_pending():
    with servers() as addresses, clients(addresses) as (client,):
        with pytest.raises(TypeError, match="plain values"):
            client.requests.request(client.requests.connections[0], "push", {"shard": object()})
        assert not client.requests.connections[0].pending


def test_addresses_in_another_order_are_refused():
    with servers(2) as addresses:
        with pytest.raises(ParameterError, match=r"in the order of their indices.*where server 1 is"):
            connect(addresses[::-1], secret=SECRET, timeout=30.0)
        with pytest.raises(ParameterError, match=r"server 1: .* where server 0 is"):
            connect([addresses[0]] * 2, secret=SECRET, timeout=30.0)


@pytest.mark.parametrize(
    ("meta", "kind"),
    [
        ({"error": "NotFinite", "message": "x"}, NotFinite),
        ({"error": "ServerLost", "message": "x"}, ServerLost),
        ({"error": "PeerLost", "message": "x"}, ParameterError),
        ({"error": "InsituErrors", "message": "x"}, ParameterError),
        ({"message": "x"}, ParameterError),
    ],
)
def test_a_failure_becomes_the_error_that_it_names(meta: dict[str, str], kind: type[Exception]):
    error = parse_failure(meta)
    assert (type(error), str(error)) == (kind, "x")


def test_the_addresses_are_used_in_turn():
    server = ServerConnection(0, ["127.0.0.1:1", "127.0.0.1:2"], 0, b"", "auto")
    seen = []
    for _ in range(3):
        seen.append(server.address)
        server.use_next_address()
    assert seen == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:1"]


def test_a_round_trip_of_200_ms_connects():
    """Both lanes had 0.7 s, for three round trips each."""
    with (
        servers() as addresses,
        slow_link(addresses[0], 0.1) as far,
        clients([far], transport="tcp") as (client,),
    ):
        client.define({"w": ((3,), "float32", np.arange(3, dtype=np.float32))})
        client.pull().result()
        np.testing.assert_array_equal(client.values["w"], [0, 1, 2])


def test_a_stranger_at_a_servers_address_is_passed_over_until_the_deadline():
    """A wrong proof there ended the worker at once."""
    address = free_addresses(1)[0]
    host, _, port = address.rpartition(":")
    listener = socket.create_server((host, int(port)))

    def impersonate() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(MAGIC + bytes(NONCE_BYTES))
            connection.recv(1000)
            connection.sendall(bytes(PROOF_BYTES))
        listener.close()
        server.append(ParameterServer(address, secret=SECRET).start())

    server: list[ParameterServer] = []
    stranger = threading.Thread(target=impersonate)
    stranger.start()
    try:
        with clients([address]) as (client,):
            assert client.stats()
    finally:
        stranger.join(30)
        server[0].stop()
