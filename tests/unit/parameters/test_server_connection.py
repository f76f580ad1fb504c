"""One server as a worker sees it."""

from __future__ import annotations

import pytest
from exchange_ranks import SECRET
from parameter_servers import clients, servers

from insitu.errors import NotFinite, ParameterError, ServerLost
from insitu.parameters import connect
from insitu.parameters.server_connection import ServerConnection, parse_failure


def test_a_request_that_cannot_be_encoded_is_not_pending():
    with servers() as addresses, clients(addresses) as (client,):
        with pytest.raises(TypeError, match="plain values"):
            client.request(client.connections[0], "push", {"shard": object()})
        assert not client.connections[0].pending


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
