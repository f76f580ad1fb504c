"""Addresses, and what becomes of calls to nobody."""

from __future__ import annotations

import pytest
from free_ports import free_addresses
from ipv6 import needs_ipv6
from partition_servers import SECRET, certificate

from insitu.base.errors import TransferError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.grid.serving import PartitionServer
from insitu.grid.transfer import PartitionClient, ServerAddress
from insitu.grid.transfer.client import format_location
from insitu.grid.transfer.requests import ReadRequest


def test_numbers_of_ipv6_have_brackets():
    assert format_location("::1", 5) == "grpc+tls://[::1]:5"
    assert str(ServerAddress("host.example", 7, "")) == "host.example:7"


@needs_ipv6
def test_a_server_at_a_number_of_ipv6_is_reached(paths: Paths):
    server = PartitionServer(paths, NodeId("node-0"), SECRET, certificate(), host="::1")
    try:
        missing = pytest.raises(TransferError, match=rf"^\[::1\]:{server.port} .*no such partition")
        with PartitionClient(server.address, SECRET) as client, missing:
            list(client.read(ReadRequest("a", 1, 0, 0, 1)))
    finally:
        server.stop()


def test_an_address_where_nobody_listens_is_named():
    (free,) = free_addresses(1)
    port = int(free.rpartition(":")[2])
    address = ServerAddress("127.0.0.1", port, certificate().pem)
    refused = pytest.raises(TransferError, match=f"127.0.0.1:{port} (failed|said nothing)")
    with PartitionClient(address, SECRET, silence=5) as client, refused:
        list(client.read(ReadRequest("a", 1, 0, 0, 1)))
