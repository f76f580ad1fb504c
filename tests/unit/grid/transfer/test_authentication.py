"""Only who has the secret is served, and only the server that was named is asked."""

from __future__ import annotations

import logging

import pyarrow.flight as flight
import pytest
from partition_servers import SECRET

from insitu.base.errors import InputError, TransferError
from insitu.base.net.certificates import make_certificate
from insitu.grid.serving import PartitionServer
from insitu.grid.transfer import PartitionClient, ServerAddress
from insitu.grid.transfer import client as client_module
from insitu.grid.transfer.authentication import TokenCheck, derive_credentials, derive_token
from insitu.grid.transfer.client import format_location
from insitu.grid.transfer.requests import ReadRequest, RowsRequest, make_chunk

READ = ReadRequest("a/b", 1, 0, 0, 10)
ROWS = RowsRequest("1-x", 0, 0, True)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": []},
        {"authorization": ["Bearer "]},
        {"authorization": [f"bearer {derive_token(SECRET)}"]},
        {"authorization": [f"Bearer {derive_token(SECRET)}x"]},
        {"authorization": ["Bearer \u00e9"]},
        {"authorization": [f"Bearer {derive_token(SECRET)}", "Bearer other"]},
    ],
)
def test_without_the_token_a_call_is_refused(headers: dict[str, list[str]]):
    check = TokenCheck(SECRET)
    check.start_call(None, {"authorization": [f"Bearer {derive_token(SECRET)}"]})
    with pytest.raises(flight.FlightUnauthenticatedError) as caught:
        check.start_call(None, headers)
    assert derive_token(SECRET) not in str(caught.value)


def test_the_token_says_nothing_about_the_secret():
    assert SECRET.hex() not in derive_token(SECRET) and derive_token(SECRET) != derive_token(SECRET + b"x")
    with pytest.raises(InputError, match=r"16 bytes at least. Received: 3"):
        derive_token(b"abc")


def test_a_stranger_reads_and_writes_nothing(
    server: PartitionServer,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    refusals = {
        derive_credentials(b"x" * 16): "failed: ",
        derive_credentials(SECRET): "refuses this cluster's",
    }
    for credentials, words in refusals.items():  # in TLS, and by the token
        monkeypatch.setattr(client_module, "derive_credentials", lambda secret, found=credentials: found)
        with caplog.at_level(logging.DEBUG), PartitionClient(server.address, b"x" * 16) as client:
            with pytest.raises(TransferError, match=words):
                list(client.read(READ))
            with pytest.raises(TransferError, match=words):
                client.send_rows(ROWS, make_chunk(b"x"), b"")
    said = caplog.text + "".join(capfd.readouterr())
    assert derive_token(SECRET) not in said and derive_token(b"x" * 16) not in said


@pytest.mark.parametrize("member", [False, True])
def test_who_is_no_member_of_the_cluster_gets_no_request_to_a_server(server: PartitionServer, member: bool):
    """A server had a request in memory, 2 GB if need be, before it saw that the caller had no token."""
    own = derive_credentials(b"x" * 16).own
    options = {"cert_chain": own.pem, "private_key": own.key_pem} if member else {}
    address = format_location(server.address.host, server.address.port)
    with (
        flight.connect(address, disable_server_verification=True, **options) as client,
        pytest.raises(flight.FlightUnavailableError),
    ):
        client.do_get(flight.Ticket(b"x"), flight.FlightCallOptions(timeout=30)).read_all()


def test_a_server_with_another_certificate_is_not_asked(server: PartitionServer):
    address = ServerAddress(server.address.host, server.address.port, make_certificate().pem)
    with (
        PartitionClient(address, SECRET) as client,
        pytest.raises(TransferError, match=r"failed: .*certificate"),
    ):
        list(client.read(READ))
