"""What a server of partitions gives and refuses."""

from __future__ import annotations

import json
import os
import signal
import threading

import pyarrow.flight as flight
import pytest
from partition_servers import SECRET, certificate

from insitu.base.errors import TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid.serving import PartitionServer
from insitu.grid.transfer import PartitionClient
from insitu.grid.transfer.authentication import derive_credentials, make_headers
from insitu.grid.transfer.client import format_location
from insitu.grid.transfer.requests import SCHEMA, ReadRequest


def test_every_part_of_a_file_is_given(server: PartitionServer, paths: Paths, cache: CacheSpec):
    whole = paths.partition("node-0", "a/b", 1, 0).read_bytes()
    with PartitionClient(server.address, SECRET) as client:
        for offset, length in ((0, 1), (5, 1 << 23), (0, 1 << 28), (len(whole) - 1, 9), (len(whole), 9)):
            parts = list(client.read(ReadRequest("a/b", 1, 0, offset, length)))
            assert b"".join(parts) == whole[offset : offset + length]


def test_a_process_that_handles_sigterm_goes_on_serving(paths: Paths, cache: CacheSpec):
    """As an agent, whose node is drained then."""
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    server = PartitionServer(paths, NodeId("node-0"), SECRET, certificate())
    try:
        for _ in range(5):
            with PartitionClient(server.address, SECRET) as client:
                assert len(list(client.read(ReadRequest("a/b", 1, 0, 0, 1)))) == 1
            os.kill(os.getpid(), signal.SIGTERM)
        assert came
    finally:
        signal.signal(signal.SIGTERM, before)
        server.stop()


@pytest.mark.parametrize(("version", "partition"), [(2, 0), (1, 1)])
def test_what_is_not_there_is_named(server: PartitionServer, version: int, partition: int):
    with (
        PartitionClient(server.address, SECRET) as client,
        pytest.raises(TransferError, match="no such partition"),
    ):
        list(client.read(ReadRequest("a/b", version, partition, 0, 1)))


@pytest.mark.parametrize("field", [{"cache": "../../../etc"}, {"cache": "a/../b"}, {"offset": -1}, {"x": 1}])
def test_requests_that_lead_out_of_the_store_are_refused(server: PartitionServer, field: dict[str, object]):
    """By a client that isn't insitu's, which would refuse them itself."""
    fields = {"cache": "a/b", "version": 1, "partition": 0, "offset": 0, "length": 1, **field}
    address = server.address
    options = flight.FlightCallOptions(timeout=30, headers=make_headers(SECRET))
    location = format_location(address.host, address.port)
    own = derive_credentials(SECRET).own
    with flight.connect(
        location,
        tls_root_certs=address.certificate,
        cert_chain=own.pem,
        private_key=own.key_pem,
        override_hostname="insitu",
    ) as client:
        with pytest.raises(Exception, match="Received"):
            client.do_get(flight.Ticket(json.dumps(fields).encode()), options).read_all()
        descriptor = flight.FlightDescriptor.for_command(json.dumps(fields).encode())
        writer, _ = client.do_put(descriptor, SCHEMA, options)
        with pytest.raises(Exception, match="Received"):
            writer.close()


def test_streams_are_bounded_and_free_again_afterwards(
    paths: Paths, cache: CacheSpec, monkeypatch: pytest.MonkeyPatch
):
    server = PartitionServer(paths, NodeId("node-0"), SECRET, certificate(), streams=1)
    request = ReadRequest("a/b", 1, 0, 0, 1 << 28)
    read, go_on = os.pread, threading.Event()

    def read_slowly(*arguments: int) -> bytes:
        assert arguments[2] == 0 or go_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(os, "pread", read_slowly)
    try:
        with (
            PartitionClient(server.address, SECRET) as first,
            PartitionClient(server.address, SECRET) as second,
        ):
            held = first.read(request)
            next(held)
            with pytest.raises(TransferError, match="1 streams are served already"):
                list(second.read(request))
            go_on.set()
            assert len(list(held)) == 2
            assert len(list(second.read(request))) == 3
    finally:
        go_on.set()
        server.stop()


def test_a_caller_that_leaves_frees_its_stream(paths: Paths, cache: CacheSpec):
    server = PartitionServer(paths, NodeId("node-0"), SECRET, certificate(), streams=1)
    request = ReadRequest("a/b", 1, 0, 0, 1 << 28)
    try:
        with PartitionClient(server.address, SECRET) as client:
            held = client.read(request)
            next(held)
            held.close()
        assert server._streams.acquire(timeout=60)
        server._streams.release()
    finally:
        server.stop()
