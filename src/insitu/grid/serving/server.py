"""Serves the partitions of one node's store, and takes the rows of imports."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from insitu.base.errors import InputError, InsituError
from insitu.base.net.certificates import Certificate
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.grid.serving.store_actions import StoreActions
from insitu.grid.transfer import (
    CHUNK_BYTES,
    FILES,
    MAX_MESSAGE_BYTES,
    SCHEMA,
    ReadRequest,
    RowsRequest,
    ServerAddress,
    TokenCheck,
    decode_message,
    decode_request,
    derive_credentials,
    encode_message,
    format_location,
    make_chunk,
)

ACTIONS = 32
"""Actions that a server does at the same time; further ones are refused, and tried again."""
BLOCKS = 32
"""Blocks of files that a server takes or sends at the same time. Further calls are refused as busy."""
QUESTIONS = 512
"""Other questions about files and the cluster that a server answers at the same time. So none of them waits
for what takes long, and a server that is busy isn't taken for one that is lost."""
STREAMS = 16
"""Reads that a server does at the same time; further ones are refused, and tried again."""

ROW_STREAMS = 128
"""Messages of rows that a server takes at the same time; further ones are refused, and tried again."""
FileActions = Callable[[str, dict[str, Any], bytes], tuple[dict[str, Any], bytes]]


class PartitionServer(flight.FlightServerBase):  # type: ignore[misc]
    """A server for the store of `node`, which listens from its construction until `stop`.

    `on_change` is called from a thread whenever the store has got something; `find_number`: see
    `StoreActions`. `files` does what is about
    files, called with the action's name, fields and bytes; it returns those of the answer. Raises InputError
    for a secret that is too short.
    """

    def __init__(
        self,
        paths: Paths,
        node: NodeId,
        secret: bytes,
        certificate: Certificate,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        streams: int = STREAMS,
        on_change: Callable[[], None] = lambda: None,
        find_number: Callable[[], int] = lambda: 0,
        files: FileActions | None = None,
    ) -> None:
        self._paths = paths
        self._node = node
        self._streams = threading.BoundedSemaphore(streams)
        self._limit = streams
        self._row_streams = threading.BoundedSemaphore(ROW_STREAMS)
        #: Actions on the store for others.
        self.actions = StoreActions(paths, node, secret, on_change, find_number)
        self._files = files
        self._acting = threading.BoundedSemaphore(ACTIONS)
        self._moving_blocks = threading.BoundedSemaphore(BLOCKS)
        self._answering = threading.BoundedSemaphore(QUESTIONS)
        pem = certificate.pem
        super().__init__(
            format_location(host, port),
            tls_certificates=[(pem.encode(), certificate.key_pem.encode())],
            verify_client=True,
            root_certificates=derive_credentials(secret).authority.encode(),
            middleware={"token": TokenCheck(secret)},
        )
        #: The address for clients of this server.
        self.address = ServerAddress(host, self.port, pem)
        # Not `serve`, which stops at SIGTERM if this process handles that, as one that drains its node.
        self._thread = threading.Thread(target=self.wait, name="insitu-transfer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End all calls and stop listening."""
        self.shutdown()
        self._thread.join()

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Send a part of a partition's file."""
        with _failures_explained():
            request = decode_request(ReadRequest, ticket.ticket)
            path = self._paths.partition(self._node, request.cache, request.version, request.partition)
            if not path.is_file():
                raise FileNotFoundError
        return flight.GeneratorStream(SCHEMA, self._read(path, request))

    def _read(self, path: Path, request: ReadRequest) -> Iterator[Any]:
        with self._counted(), _failures_explained(), open(path, "rb", buffering=0) as file:
            offset, end = request.offset, request.offset + request.length
            while offset < end:
                data = os.pread(file.fileno(), min(CHUNK_BYTES, end - offset), offset)
                if not data:
                    return
                offset += len(data)
                yield make_chunk(data)

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Give rows to the partitions of an import. Replies why they aren't taken; "" if they are."""
        if not self._row_streams.acquire(blocking=False):
            raise flight.FlightUnavailableError(f"{ROW_STREAMS} streams of rows are served already")
        try:
            with _failures_explained():
                request = decode_request(RowsRequest, descriptor.command)
                chunk = reader.read_chunk()
                counts = b"" if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
                refused = self.actions.imports.take(request, chunk.data, counts)
                writer.write(json.dumps({"refused": refused}).encode())
        finally:
            self._row_streams.release()

    def do_action(self, context: Any, action: Any) -> Any:
        """Do something with the store. See `StoreActions`."""
        if self._files is not None and action.type.startswith(FILES):
            with _failures_explained():
                answer = self._act_on_files(self._files, action.type, action.body.to_pybytes())
            return [flight.Result(pa.py_buffer(answer))]
        if not self._acting.acquire(blocking=False):
            raise flight.FlightUnavailableError(f"{ACTIONS} actions are under way already")
        try:
            with _failures_explained():
                answer = self.actions.do(action.type, action.body.to_pybytes())
        finally:
            self._acting.release()
        return [flight.Result(pa.py_buffer(answer))]

    def _act_on_files(self, files: FileActions, kind: str, body: bytes) -> bytes:
        if len(body) > MAX_MESSAGE_BYTES:
            raise InputError(f"A message has {MAX_MESSAGE_BYTES} bytes at most. Received: {len(body)}")
        kind = kind.removeprefix(FILES)
        places = self._moving_blocks if kind in ("put", "get") else self._answering
        if not places.acquire(blocking=False):
            return encode_message({"busy": True})
        try:
            fields, payload = decode_message(body)
            return encode_message(*files(kind, fields, payload))
        finally:
            places.release()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a stream. Raises FlightUnavailableError if there are too many."""
        if not self._streams.acquire(blocking=False):
            raise flight.FlightUnavailableError(f"{self._limit} streams are served already")
        try:
            yield
        finally:
            self._streams.release()


@contextlib.contextmanager
def _failures_explained() -> Iterator[None]:
    """Turn errors into those that Flight sends. No error gives the caller a path."""
    try:
        yield
    except InsituError as error:
        raise pa.ArrowInvalid(error.message) from None
    except FileNotFoundError:
        raise pa.ArrowKeyError("the store has no such partition") from None
    except OSError as error:
        raise flight.FlightServerError(f"the file can't be used ({error.strerror})") from None
