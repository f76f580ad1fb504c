"""Files of `InsituFileSystem`: versions that are read, and files that are written."""

from __future__ import annotations

import errno
import io
import os
import time
from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import Any

from fsspec.spec import AbstractBufferedFile

from insitu.cluster.files import NamesAway
from insitu.grid.shared_files import BLOCK_BYTES, FOLDER, Block, Entry, make_block

SMALL_BYTES = 256 << 10
"""A block that is shorter is written again together with what is appended."""
_KEPT_BLOCKS = 2
KEEP_SECONDS = 600.0
"""Seconds after which nodes are notified again to keep the written blocks of a file."""
_CHECK_SECONDS = 5.0
"""A file whose writing took longer is published only if all of it is still there."""


def _cut(data: bytes) -> list[tuple[Block, bytes]]:
    """Return data as blocks to write."""
    parts = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
    return [(make_block(part), part) for part in parts]


class TextFile(io.TextIOWrapper):
    """Text in a file. An error within a `with` block publishes nothing."""

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None and isinstance(self.buffer, WriteFile):
            self.buffer.discard()
        super().__exit__(kind, *rest)


class ReadFile(AbstractBufferedFile):  # type: ignore[misc]
    """A version of a file, as it was when it was opened."""

    def __init__(self, system: Any, path: str, entry: Entry, **options: Any) -> None:
        self._volume = path.partition("/")[0]
        self._blocks = system.client.list_blocks(self._volume, entry.lists, entry.blocks)
        self._starts: list[int] = []
        start = 0
        for block in self._blocks:
            self._starts.append(start)
            start += block.size
        #: The blocks that were read last, by number.
        self._kept: dict[int, bytes] = {}
        options.setdefault("cache_type", "none")
        options.pop("size", None)
        super().__init__(system, path, "rb", size=start, **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        if start >= end or not self._starts:
            return b""
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, end)
        numbers = range(first, last)
        missing = [n for n in numbers if n not in self._kept]
        blocks = [self._blocks[n] for n in missing]
        read = self.fs.client.read_blocks if len(blocks) > 1 else self._read_one
        found = {**{n: self._kept[n] for n in numbers if n in self._kept}}
        found.update(zip(missing, read(self._volume, blocks), strict=True))
        self._kept = {n: found[n] for n in list(numbers)[-_KEPT_BLOCKS:]}
        data = b"".join(found[n] for n in numbers)
        offset = start - self._starts[first]
        return data[offset : offset + end - start]

    def _read_one(self, volume: str, blocks: list[Block]) -> list[bytes]:
        return [self.fs.client.read_block(volume, block) for block in blocks]


class WriteFile(io.RawIOBase):
    """A file that is written. Nobody sees it before it is closed, or what is appended before `flush`."""

    def __init__(self, system: Any, volume: str, path: str, mode: str, copies: int, autocommit: bool) -> None:
        super().__init__()
        self.fs = system
        self.path = f"{volume}/{path}"
        self.mode = mode
        self._client, self._volume, self._name = system.client, volume, path
        self._copies, self._autocommit = copies, autocommit
        #: Bytes that aren't in a block yet.
        self._rest = bytearray()
        #: The version that is appended to.
        self._entry = Entry(0, 0.0)
        #: Blocks of a file that is written as a whole.
        self._own: list[Block] = []
        self._size = 0
        self._discarded = False
        #: Whether something was appended.
        self._has_appended = False
        #: Whether nobody knows if what was appended last is published. Then it must not be appended again.
        self._is_unknown = False
        #: When nodes were notified last to keep its blocks, on the monotonic clock.
        self._kept_at = time.monotonic()
        #: The version that is replaced, 0: there is none; None: any.
        self._expected: int | None = 0 if mode == "xb" else None
        look = self._client.look if mode == "xb" else self._client.look_to_change
        entry, kind = look(volume, path)
        #: The version that was there when this was opened; 0: none.
        self._seen = 0 if entry is None else entry.version
        if kind == FOLDER:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        if mode == "xb" and entry is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)
        if mode == "ab":
            self._follow(entry)

    def _follow(self, entry: Entry | None) -> None:
        """Continue behind a version of the file."""
        self._expected = 0 if entry is None else entry.version
        self._entry = entry or Entry(0, 0.0)
        self._copies = self._copies if entry is None else entry.copies
        self._size = self._entry.size
        #: The bytes of the last block, if it is short, so that it is written again with what follows.
        self._tail: bytes | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self._size + len(self._rest) + sum(b.size for b in self._own if self.mode != "ab")

    def write(self, data: Any) -> int:
        if self.closed:
            raise ValueError("The file is closed")
        view = memoryview(data).cast("B")
        if self._discarded:  # what a text's buffer still had
            return len(view)
        self._check_known()
        self._rest += view
        while len(self._rest) >= BLOCK_BYTES and self.mode != "ab":
            part = bytes(self._rest[:BLOCK_BYTES])
            self._own.append(self._client.write_block(self._volume, part, self._copies))
            del self._rest[:BLOCK_BYTES]
            self._keep(KEEP_SECONDS)
        return len(view)

    def _keep(self, after: float) -> None:
        """Have what was written kept, if that was `after` seconds ago. Raises OSError if some is lost."""
        if not self._own or time.monotonic() - self._kept_at < after:
            return
        lost = self._client.keep_blocks(self._volume, self._own)
        self._kept_at = time.monotonic()
        if lost:
            raise OSError(
                errno.EIO,
                f"{lost} of {len(self._own)} blocks that were written are on no node any more: all nodes "
                f"with copies of them were lost, or nothing was written for an hour. Nothing is published. "
                f"Write the file again",
                self.path,
            )

    def flush(self) -> None:
        """Publish what was appended. A file that is written as a whole appears when it is closed."""
        if not self.closed and self.mode == "ab" and self._rest and not self._discarded:
            self._append()

    def _append(self) -> None:
        """Publish the file with what was written since. If another writer came between, behind that."""
        self._check_known()
        data = bytes(self._rest)
        self._has_appended = True
        while True:
            if self._client.append_later(self._volume, self._name, data, self._copies):
                self._rest = self._rest[len(data) :]
                return
            kept, part = list(self._entry.blocks), data
            if kept and kept[-1].size < SMALL_BYTES:
                last = kept.pop()
                tail = self._tail if self._tail is not None else self._client.read_block(self._volume, last)
                part = tail + data
            unwritten = _cut(part)
            new = [block for block, _ in unwritten]
            size = self._entry.size + len(data)
            entry = self._client.make_entry(
                self._volume, self._entry.lists, [*kept, *new], self._copies, size
            )
            try:
                version = self._client.publish(
                    self._volume, self._name, entry, self._expected, unwritten=unwritten, appended=data
                )
            except NamesAway as error:
                self._is_unknown = error.may_be_made
                raise
            except OSError as error:
                if error.errno not in (errno.ESTALE, errno.EEXIST):
                    raise
                self._follow(self._client.look_to_change(self._volume, self._name)[0])
                continue
            self._follow(replace(entry, version=version))
            self._tail = part[-new[-1].size :] if new[-1].size < SMALL_BYTES else None
            self._rest = self._rest[len(data) :]
            return

    def _check_known(self) -> None:
        if self._is_unknown:
            raise OSError(
                errno.EIO,
                "what was appended last may be published or not. Look whether it is, and open the file again",
                self.path,
            )

    def close(self) -> None:
        """Publish the file. Raises OSError if that can't be, and then the one before stays."""
        if self.closed:
            return
        try:
            if not self._discarded and self._autocommit:
                self.commit()
        except BaseException:
            self.discard()  # else `close` of the base class would flush, which appends once more
            raise
        finally:
            super().close()

    def commit(self) -> None:
        """Publish the file."""
        if self.mode == "ab":
            if self._rest:
                self._append()
            elif self._expected == 0 and not self._has_appended:
                self._publish(appended=b"")
            return
        self._keep(_CHECK_SECONDS)
        self._publish()
        self._rest.clear()
        self._own = []

    def _publish(self, appended: bytes | None = None) -> None:
        unwritten = _cut(bytes(self._rest))
        blocks = [*self._own, *(block for block, _ in unwritten)]
        size = sum(block.size for block in blocks)
        entry = self._client.make_entry(self._volume, (), blocks, self._copies, size)
        self._client.publish(
            self._volume,
            self._name,
            entry,
            self._expected,
            replaces=self._seen,
            unwritten=unwritten,
            appended=appended,
        )

    def discard(self) -> None:
        """Publish nothing of what was written since the last `flush`. Its blocks go as those of a writer that
        was killed: a writer itself deletes nothing, since it can't always know what was published."""
        self._discarded = True
        self._rest.clear()
        self._own = []

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        # Half a file isn't published because nobody has closed it.
        if not self.closed:
            self._discarded = True
            super().close()
