"""Fetches a partition whole from other nodes into the store of this one.

It arrives in a file of its own beside its place, from whichever of the sources answers. After a cut the next
source continues where the last one ended, also in another process. When all bytes are there and their
checksum is right, the file gets its name by a rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from insitu.base.disk.access import file_mode, make_folder
from insitu.base.disk.durable import NO_ROOM, sync_folder
from insitu.base.errors import CacheBusy, CorruptPartition, TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId, PartitionInfo
from insitu.grid.catalog import add_to_manifest, full_disk_as_error
from insitu.grid.partitions import checksum_text, record_written, verify_once
from insitu.grid.stores import check_quota
from insitu.grid.transfer.client import SILENCE_SECONDS, PartitionClient, ServerAddress, TimedOut
from insitu.grid.transfer.rate_limit import RateLimit, first_length, next_length
from insitu.grid.transfer.requests import ReadRequest

logger = logging.getLogger("insitu")
ROUNDS = 3
"""How often all sources in turn may fail without a byte before the partition is given up."""
_PAUSE_SECONDS = 0.2
_READ_BYTES = 4 << 20

Progress = Callable[[int, int], None]
"""Called with (bytes of the partition that are here, all of them)."""


def fetch_partition(
    paths: Paths,
    node: NodeId,
    cache: CacheSpec,
    index: int,
    sources: Sequence[ServerAddress],
    secret: bytes,
    *,
    silence: float = SILENCE_SECONDS,
    limit: RateLimit | None = None,
    progress: Progress | None = None,
) -> Path:
    """Fetch a partition of `cache` from `sources`, the preferred one first, into the store of `node`.

    Returns its path; the store's manifest names it then. A partition that is there already is only verified.
    `silence` is the number of seconds after which a source without a byte counts as lost.

    Raises TransferError if no source gives all of it, which leaves what has arrived for the next call;
    CorruptPartition where every source gives wrong bytes; CacheBusy where another process fetches it;
    StorageFull, also where the quota of the store doesn't allow it.
    """
    info = cache.partitions[index]
    key = (node, cache.name, cache.version, index)
    target, record = paths.partition(*key), paths.verified(*key)
    with contextlib.suppress(CorruptPartition):
        verify_once(target, info, record)
        return target
    partial = paths.partial(*key)
    check_quota(paths, node, info.bytes - _size(partial, info.bytes))
    make_folder(paths.home, target.parent)
    with full_disk_as_error(target), _locked(partial, file_mode(paths.home)) as descriptor:
        arrival = _Arrival(descriptor, info, progress or (lambda done, total: None))
        fetch = _Fetch(cache, index, arrival, secret, silence, limit)
        try:
            fetch.receive_right_bytes(sources)
        except OSError as error:
            if error.errno in NO_ROOM:
                partial.unlink(missing_ok=True)
            raise
        except CorruptPartition:  # nothing of it is kept for the next call
            partial.unlink(missing_ok=True)
            raise
        os.fsync(descriptor)
        partial.rename(target)
        sync_folder(target.parent)
        add_to_manifest(paths, node, cache, index)
    record_written(target, info, record)
    return target


def _size(partial: Path, most: int) -> int:
    """Return how many bytes of a partition have come before; more than `most` are dropped."""
    try:
        size = partial.stat().st_size
    except OSError:
        return 0
    return size if size <= most else 0


@contextlib.contextmanager
def _locked(path: Path, mode: int) -> Iterator[int]:
    """Yield a descriptor of the file at `path`, made if needed, that no other process has."""
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.stat(path).st_ino == os.fstat(file).st_ino
        except (BlockingIOError, FileNotFoundError):
            there = False
        if not there:
            raise CacheBusy(f"Another process fetches {path.stem} to {path.parent}. Wait for it to end")
        os.fchmod(file, mode)
        yield file
    finally:
        os.close(file)


class _Arrival:
    """What of a partition is here, and the checksum of that."""

    def __init__(self, descriptor: int, info: PartitionInfo, progress: Progress) -> None:
        self._descriptor = descriptor
        self._info = info
        self._progress = progress
        #: Bytes that are here. Written by `add` and `restart`.
        self.size = 0
        #: The CRC-32 of these.
        self._crc32 = 0
        if os.fstat(descriptor).st_size > info.bytes:
            os.ftruncate(descriptor, 0)
        while data := os.pread(descriptor, _READ_BYTES, self.size):
            self._crc32 = zlib.crc32(data, self._crc32)
            self.size += len(data)
        progress(self.size, info.bytes)

    @property
    def missing(self) -> int:
        return self._info.bytes - self.size

    def is_right(self) -> bool:
        """Return whether all bytes are here, with the checksum that they must have."""
        return not self.missing and checksum_text(self._crc32) == self._info.checksum

    def add(self, data: memoryview) -> None:
        self._crc32 = zlib.crc32(data, self._crc32)
        while data:
            written = os.pwrite(self._descriptor, data, self.size)
            self.size += written
            data = data[written:]
        self._progress(self.size, self._info.bytes)

    def restart(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self.size = self._crc32 = 0


class _Fetch:
    """Gets the bytes of one partition from several sources."""

    def __init__(
        self,
        cache: CacheSpec,
        index: int,
        arrival: _Arrival,
        secret: bytes,
        silence: float,
        limit: RateLimit | None,
    ) -> None:
        self._cache = cache
        self._index = index
        self._arrival = arrival
        self._secret = secret
        self._silence = silence
        self._limit = limit

    def receive_right_bytes(self, sources: Sequence[ServerAddress]) -> None:
        """Receive what is missing. Raises TransferError and CorruptPartition."""
        self._receive(sources)
        if self._arrival.is_right():
            return
        # Some source gave wrong bytes, or an earlier process did: ask each alone.
        failures: list[TransferError] = []
        for source in sources:
            self._arrival.restart()
            try:
                self._receive([source])
            except TransferError as error:
                failures.append(error)
                continue
            if self._arrival.is_right():
                return
            logger.warning(
                "%s has other bytes at %s than were published. Another copy is fetched; `insitu scrub %s "
                "--repair` replaces that one",
                self._named(),
                source,
                self._cache.name,
            )
        self._arrival.restart()
        if failures:
            raise failures[0]
        raise CorruptPartition(
            f"{self._named()} has other bytes than were published on {', '.join(map(str, sources))}. "
            f"`insitu describe {self._cache.name} --verify` on those nodes says which copies are right"
        )

    def _receive(self, sources: Sequence[ServerAddress]) -> None:
        failures: dict[ServerAddress, str] = {}
        vain = 0
        while self._arrival.missing:
            before = self._arrival.size
            for source in sources:
                try:
                    self._receive_from(source)
                    break
                except TransferError as error:
                    failures[source] = error.message
            if self._arrival.size > before:
                vain = 0
                continue
            vain += 1
            if vain >= ROUNDS:
                reasons = "; ".join(failures.values()) or "no source was given"
                raise TransferError(
                    f"{self._named()} can't be fetched: {reasons}. {self._arrival.size} bytes are here; the "
                    f"next attempt continues with them"
                )
            time.sleep(_PAUSE_SECONDS * 2**vain)

    def _receive_from(self, source: ServerAddress) -> None:
        """Receive all that is missing from one source. Raises TransferError."""
        length = first_length(self._silence, self._limit)
        with PartitionClient(source, self._secret, silence=self._silence) as client:
            while missing := self._arrival.missing:
                before, started = self._arrival.size, time.monotonic()
                length = min(length, missing)
                try:
                    for data in client.read(self._request(length)):
                        self._arrival.add(data)
                        if self._limit is not None:
                            self._limit.take(len(data))
                except TimedOut:
                    if self._arrival.size == before:
                        raise
                received = self._arrival.size - before
                if not received:
                    raise TransferError(f"{source} has only {before} bytes of {self._named()}")
                length = next_length(length, received, time.monotonic() - started, self._silence)

    def _request(self, length: int) -> ReadRequest:
        cache, size = self._cache, self._arrival.size
        return ReadRequest(cache.name, cache.version, self._index, size, length)

    def _named(self) -> str:
        return f"Partition {self._index} of {self._cache.name} version {self._cache.version}"
