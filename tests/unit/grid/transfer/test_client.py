"""Addresses, and what becomes of calls to nobody."""

from __future__ import annotations

import pytest
from free_ports import free_addresses
from partition_servers import SECRET, certificate

from insitu.errors import TransferError
from insitu.grid.transfer import PartitionClient, ServerAddress
from insitu.grid.transfer.client import format_location
from insitu.grid.transfer.requests import ReadRequest


def test_numbers_of_ipv6_have_brackets():
    assert format_location("::1", 5) == "grpc+tls://[::1]:5"
    assert str(ServerAddress("host.example", 7, "")) == "host.example:7"


def test_an_address_where_nobody_listens_is_named():
    (free,) = free_addresses(1)
    port = int(free.rpartition(":")[2])
    address = ServerAddress("127.0.0.1", port, certificate().pem)
    refused = pytest.raises(TransferError, match=f"127.0.0.1:{port} (failed|said nothing)")
    with PartitionClient(address, SECRET, silence=5) as client, refused:
        list(client.read(ReadRequest("a", 1, 0, 0, 1)))
