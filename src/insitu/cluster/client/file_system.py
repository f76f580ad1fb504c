"""`insitu://VOLUME/PATH` as a file system of fsspec, which finds it by its entry point.

A file appears as a whole when it is closed, or replaces the one before then. `"ab"` appends: what was written
is seen by readers after each `flush`.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import time
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from insitu.cluster.client.file_cluster import open_file_client
from insitu.cluster.files import FileClient, RepairReport
from insitu.errors import InputError
from insitu.grid.shared_files import BLOCK_BYTES, FILE, FOLDER, MAX_COPIES, Block, Entry, split_path
from insitu.paths import Paths
from insitu.spec import NodeId

COPIES = 2
"""Copies of each block, unless the caller says otherwise."""
SMALL_BYTES = 256 << 10
"""A block that is shorter is written again together with what is appended."""
_KEPT_BLOCKS = 2
KEEP_SECONDS = 600.0
"""Seconds after which nodes hear again that what was written of a file is to stay."""
_CHECK_SECONDS = 5.0
"""A file whose writing took longer is published only where all of it is still there."""


class InsituFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files in the memory of a cluster's nodes.

    Args:
        copies: on how many nodes each file that is written lies: it survives the loss of all but one of them.
            A cluster of fewer nodes has one copy on each.
        cluster: the head's address as host:port; by default $INSITU_CLUSTER, else that of $INSITU_HOME.
        token_file: the file with the cluster's token, by default $INSITU_TOKEN_FILE.
        home: by default $INSITU_HOME.

    Raises:
        InputError: for names that can't be, and other values of these.
        ClusterError: where no node can be reached.
    """

    protocol = "insitu"
    root_marker = ""
    # $INSITU_HOME and $INSITU_CLUSTER may change. What costs time to make, the client, is kept.
    cachable = False

    def __init__(
        self,
        copies: int = COPIES,
        cluster: str = "",
        token_file: str = "",
        home: str = "",
        **options: Any,
    ) -> None:
        if type(copies) is not int or not 1 <= copies <= MAX_COPIES:
            raise InputError(f"copies is a whole number in [1, {MAX_COPIES}]. Received: {copies!r}")
        super().__init__(**{**options, "use_listings_cache": False})
        self.copies = copies
        paths = Paths(Path(home).absolute()) if home else Paths.default()
        #: Does what is asked for.
        self.client: FileClient = open_file_client(paths, cluster, token_file)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = os.fspath(path)
        text = text.partition("://")[2] if text.startswith("insitu://") else text
        return "/".join(name for name in text.split("/") if name)

    def _split(self, path: str) -> tuple[str, str]:
        return split_path(self._strip_protocol(path))

    def _split_file(self, path: str) -> tuple[str, str]:
        volume, name = self._split(path)
        if not name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return volume, name

    # Names

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return name, size, type ("file" or "directory"), and of a file mtime, copies and blocks. Raises
        FileNotFoundError."""
        volume, name = self._split(path)
        if not volume:
            return _describe("", FOLDER, 0, 0.0)
        entry, kind = self.client.look(volume, name)
        if kind is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        full = f"{volume}/{name}".rstrip("/")
        if entry is None:
            return _describe(full, FOLDER, 0, 0.0)
        return _describe_entry(full, entry)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """List a folder, or name a file. Raises FileNotFoundError."""
        volume, name = self._split(path)
        if not volume:
            found = [_describe(each, FOLDER, 0, 0.0) for each in self.client.list_volumes()]
        else:
            found = [
                _describe(f"{volume}/{child.path}", child.kind, child.size, child.modified, child.copies)
                for child in self.client.list_children(volume, name)
            ]
            if not found:
                itself = self.info(path)
                found = [] if itself["type"] == "directory" else [itself]
        return found if detail else [each["name"] for each in found]

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **options: Any,
    ) -> Any:
        """Return all files below a folder; see fsspec."""
        volume, name = self._split(path)
        if not volume or maxdepth is not None or withdirs:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **options)
        found = [e for e in self.client.list_below(volume, name) if e.kind == FILE]
        if not found and self.isfile(path):
            found = [self.client.find_file(volume, name)]
        listed = {f"{volume}/{e.path}": _describe_entry(f"{volume}/{e.path}", e) for e in found}
        return listed if detail else list(listed)

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Make a folder. Raises FileExistsError. A volume needs none."""
        volume, name = self._split(path)
        if name:
            if self.client.look(volume, name)[1] is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self.client.make_folder(volume, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, and those above it. Raises FileExistsError."""
        volume, name = self._split(path)
        if not name:
            return
        if not exist_ok:
            self.mkdir(path)
        else:
            self.client.make_folder(volume, name)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder. Raises OSError for another one."""
        volume, name = self._split(path)
        if self.client.look(volume, name)[1] == FILE:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        self.client.remove(volume, name, recursive=False)

    def _rm(self, path: str) -> None:
        self.client.remove(*self._split_file(path), recursive=False)

    def rm_file(self, path: str) -> None:
        """Remove a file. Raises FileNotFoundError, IsADirectoryError."""
        volume, name = self._split_file(path)
        self.client.find_file(volume, name)
        self.client.remove(volume, name, recursive=False)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, or with `recursive` folders with all in them, each as a whole."""
        for each in path if isinstance(path, list) else [path]:
            if any(c in each for c in "*?[") and not self.exists(each):
                for found in self.expand_path(each):
                    self.rm(found, recursive=recursive)
                continue
            volume, name = self._split(each)
            if not volume:
                raise InputError("Volumes are removed one by one. Received: insitu:// alone. Name one")
            if not recursive and self.client.look(volume, name)[1] == FOLDER:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), each)
            self.client.remove(volume, name, recursive=recursive)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        """Move a file or a folder, as a whole within a volume; from one to another by a copy."""
        (volume, source), (other, target) = self._split(path1), self._split(path2)
        if volume != other or not source or not target:
            self.copy(path1, path2, recursive=self.isdir(path1))
            self.rm(path1, recursive=True)
            return
        if self.client.look(volume, target)[1] == FOLDER:
            target = f"{target}/{source.rpartition('/')[2]}"
        self.client.rename(volume, source, target)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        """Copy a file."""
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
            shutil.copyfileobj(source, target, BLOCK_BYTES)

    def modified(self, path: str) -> Any:
        """Return when a file was changed, as a datetime."""
        from datetime import UTC, datetime

        return datetime.fromtimestamp(self.info(path)["mtime"], tz=UTC)

    created = modified

    def count_blocks(self, path: str) -> dict[NodeId, int]:
        """Return how many blocks of a file each node holds, of those that answer."""
        volume, name = self._split_file(path)
        return self.client.count_blocks(volume, self.client.find_file(volume, name))

    def repair(self, path: str) -> RepairReport:
        """Make copies of a volume's blocks that are missing. Raises OSError, InsituError where a node that is
        alive doesn't answer."""
        volume, _ = self._split(path)
        if not volume:
            raise InputError("Volumes are repaired one by one. Received: insitu:// alone. Name one")
        return self.client.repair(volume)

    # Contents

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Open a file; see fsspec. An error within a `with` block publishes nothing."""
        if "b" in mode:
            return super().open(path, mode, **options)
        binary = super().open(path, mode.replace("t", "") + "b", **{k: options.pop(k) for k in _own(options)})
        return _TextFile(binary, **{k: v for k, v in options.items() if k in _TEXT_OPTIONS})

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        volume, name = self._split_file(path)
        copies = options.pop("copies", self.copies)
        if mode == "rb":
            entry = self.client.find_file(volume, name)
            return _ReadFile(self, f"{volume}/{name}", entry, **options)
        if mode not in ("wb", "ab", "xb"):
            raise InputError(f"Files of insitu:// are opened by r, w, x or a. Received: {mode!r}")
        return _WriteFile(self, volume, name, mode, copies, options.pop("autocommit", True))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Return the bytes of a file, or a part of it."""
        volume, name = self._split_file(path)
        entry = self.client.find_file(volume, name)
        if start is None and end is None:
            return b"".join(self.client.read_blocks(volume, entry.blocks))
        with _ReadFile(self, f"{volume}/{name}", entry) as file:
            return _read_part(file, start, end)


_TEXT_OPTIONS = ("encoding", "errors", "newline")


def _own(options: dict[str, Any]) -> list[str]:
    return [name for name in options if name not in _TEXT_OPTIONS]


def _read_part(file: Any, start: int | None, end: int | None) -> bytes:
    first, last, _ = slice(start, end).indices(file.size)
    file.seek(first)
    return bytes(file.read(max(0, last - first)))


def _describe(name: str, kind: str, size: int, modified: float, copies: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "size": size, "type": "file" if kind == FILE else "directory"}
    return {**found, "mtime": modified, "created": modified, "copies": copies} if kind == FILE else found


def _describe_entry(name: str, entry: Entry) -> dict[str, Any]:
    found = _describe(name, entry.kind, entry.size, entry.modified, entry.copies)
    return found | ({"blocks": len(entry.blocks), "version": entry.stamp} if entry.kind == FILE else {})


class _TextFile(io.TextIOWrapper):
    """Text in a file. An error within a `with` block publishes nothing."""

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None and isinstance(self.buffer, _WriteFile):
            self.buffer.discard()
        super().__exit__(kind, *rest)


class _ReadFile(AbstractBufferedFile):  # type: ignore[misc]
    """A version of a file, as it was when it was opened."""

    def __init__(self, system: InsituFileSystem, path: str, entry: Entry, **options: Any) -> None:
        self._entry = entry
        self._volume = path.partition("/")[0]
        self._starts: list[int] = []
        start = 0
        for block in entry.blocks:
            self._starts.append(start)
            start += block.size
        #: The blocks that were read last, by number.
        self._kept: dict[int, bytes] = {}
        options.setdefault("cache_type", "none")
        options.pop("size", None)
        super().__init__(system, path, "rb", size=start, **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        from bisect import bisect_left, bisect_right

        if start >= end or not self._starts:
            return b""
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, end)
        numbers = range(first, last)
        missing = [n for n in numbers if n not in self._kept]
        blocks = [self._entry.blocks[n] for n in missing]
        read = self.fs.client.read_blocks if len(blocks) > 1 else self._read_one
        found = {**{n: self._kept[n] for n in numbers if n in self._kept}}
        found.update(zip(missing, read(self._volume, blocks), strict=True))
        self._kept = {n: found[n] for n in list(numbers)[-_KEPT_BLOCKS:]}
        data = b"".join(found[n] for n in numbers)
        offset = start - self._starts[first]
        return data[offset : offset + end - start]

    def _read_one(self, volume: str, blocks: list[Block]) -> list[bytes]:
        return [self.fs.client.read_block(volume, block) for block in blocks]


class _WriteFile(io.RawIOBase):
    """A file that is written. Nobody sees it before it is closed, or what is appended before `flush`."""

    def __init__(
        self, system: InsituFileSystem, volume: str, path: str, mode: str, copies: int, autocommit: bool
    ) -> None:
        super().__init__()
        self.fs = system
        self.path = f"{volume}/{path}"
        self.mode = mode
        self._client, self._volume, self._name = system.client, volume, path
        self._copies, self._autocommit = copies, autocommit
        #: What isn't in a block yet.
        self._rest = bytearray()
        #: What was written; of these the first ones were there when the file was opened.
        self._blocks: list[Block] = []
        self._own: list[Block] = []
        self._size = 0
        self._discarded = False
        #: When nodes have heard last that its blocks are to stay, on the monotonic clock.
        self._kept_at = time.monotonic()
        #: The version that is replaced: its stamp, 0: there is none; None: any.
        self._expected: int | None = 0 if mode == "xb" else None
        entry, kind = self._client.look(volume, path)
        if kind == FOLDER:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        if mode == "xb" and entry is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)
        if mode == "ab":
            self._follow(entry)

    def _follow(self, entry: Entry | None) -> None:
        """Go on behind a version of the file."""
        self._expected = 0 if entry is None else entry.stamp
        self._blocks = [] if entry is None else list(entry.blocks)
        self._copies = self._copies if entry is None else entry.copies
        self._size = 0 if entry is None else entry.size
        #: The bytes of the last block, where it is short, so that it is written again with what follows.
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
        self._rest += view
        while len(self._rest) >= BLOCK_BYTES and self.mode != "ab":
            part = bytes(self._rest[:BLOCK_BYTES])
            self._own.append(self._client.write_block(self._volume, part, self._copies))
            del self._rest[:BLOCK_BYTES]
            self._keep(KEEP_SECONDS)
        return len(view)

    def _keep(self, after: float) -> None:
        """Have what was written kept, if that was `after` seconds ago. Raises OSError where some is lost."""
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
        """Publish the file with what was written since. Where another writer came between, behind that."""
        data = bytes(self._rest)
        while True:
            kept, part = list(self._blocks), data
            if kept and kept[-1].size < SMALL_BYTES:
                last = kept.pop()
                tail = self._tail if self._tail is not None else self._client.read_block(self._volume, last)
                part = tail + data
            new = self._write_blocks(part)
            try:
                entry = self._client.publish(
                    self._volume, self._name, [*kept, *new], self._copies, self._expected
                )
            except OSError as error:
                self._client.drop_blocks(self._volume, new, self._copies)
                if error.errno not in (errno.ESTALE, errno.EEXIST):
                    raise
                self._follow(self._client.look(self._volume, self._name)[0])
                continue
            self._follow(entry)
            self._tail = part[-new[-1].size :] if new[-1].size < SMALL_BYTES else None
            self._rest = self._rest[len(data) :]
            return

    def _write_blocks(self, data: bytes) -> list[Block]:
        parts = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
        return [self._client.write_block(self._volume, part, self._copies) for part in parts]

    def close(self) -> None:
        """Publish the file. Raises OSError where that can't be, and then the one before stays."""
        if self.closed:
            return
        try:
            if not self._discarded and self._autocommit:
                self.commit()
        except BaseException:
            self.discard()
            raise
        finally:
            super().close()

    def commit(self) -> None:
        """Publish the file."""
        if self.mode == "ab":
            if self._rest:
                self._append()
            elif self._expected == 0:
                self._client.publish(self._volume, self._name, [], self._copies, 0)
            return
        if self._rest:
            self._own += self._write_blocks(bytes(self._rest))
            self._rest.clear()
        self._keep(_CHECK_SECONDS)
        self._client.publish(self._volume, self._name, self._own, self._copies, self._expected)
        self._own = []

    def discard(self) -> None:
        """Publish nothing of what was written since the last `flush`."""
        self._discarded = True
        self._rest.clear()
        own, self._own = self._own, []
        self._client.drop_blocks(self._volume, own, self._copies)

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        # Half a file isn't published because nobody has closed it.
        if not self.closed:
            self._discarded = True
            super().close()
