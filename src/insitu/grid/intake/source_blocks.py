"""The blocks of all sources of an import in their order, read by a thread ahead of their use."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from insitu.base.disk.durable import NO_ROOM
from insitu.base.errors import DamagedImages, SourceError
from insitu.grid.sources import Block, Source, SourceFile, malformed_as_error

_BLOCKS_AHEAD = 2
"""Blocks that wait for their use. More would take memory and save no time."""


@dataclass(frozen=True, slots=True)
class FileState:
    """State by which a change of a file is noticed. A source that is no file has its size alone, about."""

    #: Bytes.
    size: int
    #: When its bytes changed last, in nanoseconds since 1970.
    mtime_ns: int
    #: The number of the file in its file system.
    inode: int

    @classmethod
    def of(cls, path: SourceFile) -> FileState:
        """Return the state of a file now. Raises SourceError."""
        try:
            found = path.stat()
        except OSError as error:
            raise SourceError(f"{path} can't be read: {error.strerror or error}") from error
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


@dataclass(frozen=True, slots=True)
class SourceBlock:
    """A block, and its place in the sources."""

    #: The number of the source among all sources.
    source: int
    #: Its rows.
    block: Block


class SourceBlocks:
    """Iterates over the blocks of all sources. Use it in a `with` statement, which ends its thread.

    Raises SourceError if a file is malformed, can't be read, or changes until it has been read.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        states: Sequence[FileState],
        block_bytes: int,
        first: tuple[int, int] = (0, 0),
    ) -> None:
        """`states` are those of the files when their headers were read. `first` is (number of a source, what
        its `blocks` begins with): sources before it are left out."""
        self._sources = sources
        self._states = states
        self._block_bytes = block_bytes
        self._first = first
        self._ready: deque[SourceBlock | BaseException | None] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="insitu-import-reader", daemon=True)
        self._thread.start()

    def __enter__(self) -> SourceBlocks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __iter__(self) -> Iterator[SourceBlock]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready)
                item = self._ready.popleft()
                self._changed.notify_all()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            for item in self._read():
                if not self._put(item):
                    return
        except BaseException as error:
            end = error
        self._put(end)

    def _put(self, item: SourceBlock | BaseException | None) -> bool:
        """Pass on `item` once there is room. Returns False if nobody waits for it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < _BLOCKS_AHEAD)
            self._ready.append(item)
            self._changed.notify_all()
            return not self._closed

    def _read(self) -> Iterator[SourceBlock]:
        first_source, first_start = self._first
        for number in range(first_source, len(self._sources)):
            source, start = self._sources[number], first_start if number == first_source else 0
            try:
                for block in read_blocks(source, self._block_bytes, start):
                    yield SourceBlock(number, block)
            except DamagedImages as error:
                raise self._find_damaged(number + 1, error) from error
            self._refuse_changed(number)

    def _find_damaged(self, first: int, found: DamagedImages) -> DamagedImages:
        """Return the error for damaged images with those of all sources from `first` on."""
        problems = list(found.problems)
        for source in self._sources[first:]:
            with contextlib.closing(read_blocks(source, self._block_bytes)) as blocks:
                try:
                    while not self._closed and next(blocks, None) is not None:
                        pass
                except DamagedImages as error:
                    problems += error.problems
        return DamagedImages(tuple(problems))

    def _refuse_changed(self, number: int) -> None:
        path, before = self._sources[number].path, self._states[number]
        if not isinstance(path, str):  # what is no file has what was read of it in its origin
            refuse_changed(path, before)


def refuse_changed(path: SourceFile, before: FileState) -> None:
    """Raise SourceError if a file isn't as it was."""
    now = FileState.of(path)
    if now != before:
        raise SourceError(
            f"{path} must stay as it is until it has been imported. Received: a file that has changed "
            f"since the import began, from {before.size} bytes to {now.size}. Import it again when what "
            f"writes it has ended"
        )


def read_blocks(source: Source, block_bytes: int, start: int = 0) -> Generator[Block, None, None]:
    """Yield the blocks of a source. Raises SourceError if it is malformed or the system refuses to read
    it."""
    try:
        blocks = iter(source.blocks(block_bytes, start))
        while True:
            # Not around the `yield`: what the consumer raises isn't the file's.
            with malformed_as_error(source.path):
                block = next(blocks, None)
            if block is None:
                return
            yield block
    except OSError as error:
        if error.errno in NO_ROOM:  # of a temporary file that the source unpacks into
            raise
        raise SourceError(f"{source.path} can't be read: {error.strerror or error}") from error
