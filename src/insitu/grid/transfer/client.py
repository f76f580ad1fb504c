"""Calls a `PartitionServer`."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from insitu.base.errors import InputError, TransferError
from insitu.grid.transfer.authentication import derive_credentials, make_headers
from insitu.grid.transfer.requests import (
    FILES,
    ReadRequest,
    RowsRequest,
    chunk_bytes,
    decode_message,
    encode_message,
    encode_request,
)

_FLIGHT = re.compile(r"^Flight returned [a-z ]+, with message: ")
"""What Flight puts before the words of a server."""
SILENCE_SECONDS = 10.0
"""Seconds without a byte after which a server counts as lost."""
_CERTIFICATE_NAME = "insitu"
"""The name in the certificates of insitu. They are recognized as a whole, never by the name."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is, and by what it is recognized."""

    #: A host's name or number.
    host: str
    #: Its port.
    port: int
    #: The certificate as PEM: no other one is accepted.
    certificate: str

    def __str__(self) -> str:
        return format_location(self.host, self.port).removeprefix("grpc+tls://")


class Refused(TransferError):
    """The server has said why it doesn't do what was asked for."""


class TimedOut(TransferError):
    """A call has used up its time."""


def format_location(host: str, port: int) -> str:
    """Return the address in the form of Flight, with brackets around a number of IPv6."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).version == 6:
            host = f"[{host}]"
    return f"grpc+tls://{host}:{port}"


class PartitionClient:
    """A connection to one server. Every call ends within `silence` seconds."""

    def __init__(self, address: ServerAddress, secret: bytes, *, silence: float = SILENCE_SECONDS) -> None:
        #: The server.
        self.address = address
        self._headers = make_headers(secret)
        self._options = flight.FlightCallOptions(timeout=silence, headers=self._headers)
        self._silence = silence
        own = derive_credentials(secret).own
        self._client = flight.connect(
            format_location(address.host, address.port),
            tls_root_certs=address.certificate,
            cert_chain=own.pem,
            private_key=own.key_pem,
            override_hostname=_CERTIFICATE_NAME,
            # Without these a write to a host that vanished waits for the kernel to give up the connection,
            # for a quarter of an hour. They set TCP_USER_TIMEOUT, too.
            generic_options=[
                ("grpc.keepalive_time_ms", int(silence * 1000)),
                ("grpc.keepalive_timeout_ms", int(silence * 1000)),
            ],
        )

    def __enter__(self) -> PartitionClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def read(self, request: ReadRequest) -> Iterator[memoryview]:
        """Yield the bytes that `request` asks for, in chunks; fewer where the file ends.

        Raises TransferError for whatever goes wrong, TimedOut where the time is used up.
        """
        received = 0
        with self._failures_named():
            stream = self._client.do_get(flight.Ticket(encode_request(request)), self._options)
            try:
                for chunk in stream:
                    data = chunk_bytes(chunk.data)
                    received += len(data)
                    if received > request.length:
                        raise InputError(f"{request.length} bytes were asked for. Received: more")
                    yield data
            finally:
                stream.cancel()

    def send_rows(self, request: RowsRequest, batch: pa.RecordBatch, counts: bytes) -> str:
        """Send rows to an owner of their partitions. `counts` are `RowMessage.counts`, as int64.

        Returns "" where they were taken, else why they weren't. Raises TransferError for whatever goes wrong.
        """
        with self._failures_named():
            descriptor = flight.FlightDescriptor.for_command(encode_request(request))
            writer, replies = self._client.do_put(descriptor, batch.schema, self._options)
            try:
                writer.write_with_metadata(batch, pa.py_buffer(counts))
                writer.done_writing()
                reply = replies.read()
            finally:
                writer.close()
            if reply is None:
                raise InputError("Rows have a reply. Received: none")
            return str(json.loads(reply.to_pybytes())["refused"])

    def act(self, kind: str, fields: Mapping[str, Any]) -> Any:
        """Have the server do something with its store, and return its answer. Raises TransferError."""
        with self._failures_named():
            action = flight.Action(kind, json.dumps(fields).encode())
            (answer,) = self._client.do_action(action, self._options)
            return json.loads(answer.body.to_pybytes())

    def act_on_files(
        self, kind: str, fields: Mapping[str, Any], payload: bytes, seconds: float | None = None
    ) -> tuple[Any, bytes]:
        """Have the server do something with files within some seconds, None: `silence`. Returns the fields
        and the bytes of its answer. Raises TransferError."""
        options = self._options
        if seconds is not None:
            options = flight.FlightCallOptions(timeout=seconds, headers=self._headers)
        with self._failures_named(seconds):
            action = flight.Action(f"{FILES}{kind}", encode_message(fields, payload))
            (answer,) = self._client.do_action(action, options)
            return decode_message(answer.body.to_pybytes())

    @contextlib.contextmanager
    def _failures_named(self, seconds: float | None = None) -> Iterator[None]:
        try:
            yield
        except flight.FlightTimedOutError:
            waited = self._silence if seconds is None else seconds
            raise TimedOut(f"{self.address} said nothing for {waited:.3g} s") from None
        except flight.FlightUnauthenticatedError:
            raise TransferError(f"{self.address} refuses this cluster's secret") from None
        except pa.ArrowInvalid as error:
            raise Refused(f"{self.address} refuses: {_first_line(error)}") from None
        except (pa.ArrowException, InputError, OSError, ValueError, KeyError, TypeError) as error:
            raise TransferError(f"{self.address} failed: {_first_line(error)}") from None


def _first_line(error: Any) -> str:
    line = str(error).split(". gRPC client debug", 1)[0].split(". Detail: Python exception", 1)[0]
    line = line.split("\n", 1)[0]
    return _FLIGHT.sub("", line)
