"""Sends a staged partition of an import to the node that will own it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from insitu.errors import TransferError
from insitu.grid.transfer.client import SILENCE_SECONDS, PartitionClient, ServerAddress
from insitu.grid.transfer.rate_limit import RateLimit, first_length, next_length
from insitu.grid.transfer.requests import CHUNK_BYTES, WriteRequest

ROUNDS = 3
"""How often in a row the owner may fail without having got a byte."""
_PAUSE_SECONDS = 0.2

Progress = Callable[[int, int], None]
"""Called with (bytes of the partition that are there, all of them)."""


def send_partition(
    path: Path,
    cache: str,
    token: str,
    index: int,
    checksum: str,
    owner: ServerAddress,
    secret: bytes,
    *,
    silence: float = SILENCE_SECONDS,
    limit: RateLimit | None = None,
    progress: Progress | None = None,
) -> None:
    """Send the file at `path` as partition `index` of the staged version `token` of `cache`.

    When this returns, the owner has all bytes on its disk, with the right checksum. What it has already isn't
    sent again. Raises TransferError where the owner can't take it, OSError where the file can't be read.
    """
    report = progress or (lambda done, total: None)
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        vain, have, length = 0, -1, first_length(silence, limit)
        while have < size:
            before = have
            try:
                with PartitionClient(owner, secret, silence=silence) as client:
                    have = client.write(WriteRequest(cache, token, index, size, checksum, 0, 0), [])
                    while have < size:
                        report(have, size)
                        length = min(length, size - have)
                        request = WriteRequest(cache, token, index, size, checksum, have, length)
                        started, before = time.monotonic(), have
                        have = client.write(request, _read(file, have, length, limit))
                        seconds = time.monotonic() - started
                        length = next_length(length, have - before, seconds, silence)
            except TransferError as error:
                length = first_length(silence, limit)
                vain = 0 if have > before else vain + 1
                if vain >= ROUNDS:
                    raise TransferError(
                        f"Partition {index} of {cache} can't be sent: {error.message}"
                    ) from error
                time.sleep(_PAUSE_SECONDS * 2**vain)
        report(size, size)


def _read(file: BinaryIO, offset: int, length: int, limit: RateLimit | None) -> Iterator[bytes]:
    file.seek(offset)
    while length:
        data = file.read(min(CHUNK_BYTES, length))
        if not data:
            return
        length -= len(data)
        if limit is not None:
            limit.take(len(data))
        yield data
