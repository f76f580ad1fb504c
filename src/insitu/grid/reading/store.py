"""The partitions that a process reads: which copy of each.

Every opening checks size, footer, schema and row count. The checksum of a block is compared before its rows
are used. A copy that fails is passed over for a good one, of this home or another host: see `damaged_copies`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.base.errors import CorruptPartition, UnknownCache
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column, NodeId, PartitionInfo
from insitu.grid.catalog import Catalog, find_copies, is_store_here, should_lie_here
from insitu.grid.partitions import BlockReader, Partition, check_size, open_block_reader, verify_once
from insitu.grid.replicas import DAMAGED, describe_partition

_HEAD_BYTES, _TAIL_BYTES = 64 << 10, 256 << 10
"""Bytes that opening looks at: schema and first block, and the footer, which has 24 bytes for each block."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a partition, open."""

    #: The partition, mapped into memory.
    partition: Partition
    #: The entry of the catalog.
    info: PartitionInfo
    #: The node whose store has the copy.
    node: NodeId
    #: Whether this process runs on that node.
    local: bool


def open_copy(paths: Paths, cache: CacheSpec, index: int, node: NodeId | None) -> Copy:
    """Open the best copy of a partition: that on `node` if there is one, else its owners' first good one.

    A copy on `node` may have been fetched there, without being an owner's. Outside a job `node` is None, and
    every copy counts as local. If none in this home is good, one comes from another host. Raises
    CorruptPartition if no copy can be used, with what is wrong with each.
    """
    failures: dict[NodeId, CorruptPartition] = {}
    for owner in find_copies(paths, cache, index, node):
        try:
            partition = _map(paths, cache, index, owner)
        except CorruptPartition as error:
            failures[owner] = error
            continue
        for other, failure in failures.items():
            if should_lie_here(paths, other):
                DAMAGED.report(paths, cache, index, other, failure, owner)
        return Copy(partition, cache.partitions[index], owner, local=node is None or owner == node)
    return _fetch_copy(paths, cache, index, node, failures)


def open_version(paths: Paths, cache: CacheSpec, index: int, node: NodeId | None) -> Copy:
    """Open the best copy of a partition as `open_copy` does. Raises UnknownCache if the version isn't there
    any more, else CorruptPartition."""
    try:
        return open_copy(paths, cache, index, node)
    except CorruptPartition as error:
        name, version = cache.name, cache.version
        if Catalog(paths).find(name, version) is None:
            raise UnknownCache(
                f"Version {version} of cache {name} was replaced or dropped while this process was reading "
                f"it. Read the cache again; a job keeps its version to its end"
            ) from error
        raise


def _map(paths: Paths, cache: CacheSpec, index: int, owner: NodeId) -> Partition:
    """Map the copy of a partition on a node. Raises CorruptPartition."""
    path, info = paths.partition(owner, cache.name, cache.version, index), cache.partitions[index]
    DAMAGED.check(path)
    check_size(path, info)
    if not cache.block_rows:  # of a version whose blocks have no checksums
        verify_once(path, info, paths.verified(owner, cache.name, cache.version, index))
    return Partition.of_cache(path, cache, info)


def _fetch_copy(
    paths: Paths,
    cache: CacheSpec,
    index: int,
    node: NodeId | None,
    failures: dict[NodeId, CorruptPartition],
) -> Copy:
    """Replace a copy of this home, none of which can be used, by that of another host, and open it. Raises
    CorruptPartition.
    """
    for owner, error in list(failures.items()):
        if is_store_here(paths, owner):
            try:
                DAMAGED.fetch_here(paths, cache, index, owner, error)
                partition = _map(paths, cache, index, owner)
            except CorruptPartition as reason:
                failures[owner] = reason
                continue
            return Copy(partition, cache.partitions[index], owner, local=node is None or owner == node)
    for owner in failures:
        DAMAGED.forget_unreadable(paths.partition(owner, cache.name, cache.version, index))
    raise make_no_copy_error(describe_partition(cache, index), list(failures.values()))


def announce_opening(paths: Paths, cache: CacheSpec, indices: Sequence[int], node: NodeId | None) -> None:
    """Have the system read what opening these partitions looks at, of all of them at the same time."""
    for index in indices:
        info = cache.partitions[index]
        owner = find_copies(paths, cache, index, node)[0]
        path, start = (
            paths.partition(owner, cache.name, cache.version, index),
            max(0, info.bytes - _TAIL_BYTES),
        )
        # Opening will report what is wrong.
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, _HEAD_BYTES, os.POSIX_FADV_WILLNEED)
            os.posix_fadvise(file.fileno(), start, _TAIL_BYTES, os.POSIX_FADV_WILLNEED)


def open_blocks(
    paths: Paths, cache: CacheSpec, opened: Copy, columns: Sequence[Column], *, direct: bool = False
) -> BlockCopies:
    """Return the blocks of a partition with the chosen `columns`, each read from `opened` or, if it is
    damaged there, from another copy. `direct`: past the page cache, if that is possible.

    Nothing is verified but what is read. Raises CorruptPartition if no copy can be opened.
    """
    index = opened.info.index

    def open_reader(copy: Copy) -> BlockReader:
        return open_block_reader(copy.partition, cache.columns, columns, direct=direct)

    def reopen(node: NodeId, error: CorruptPartition) -> tuple[NodeId, BlockReader]:
        DAMAGED.set_aside(paths.partition(node, cache.name, cache.version, index), error)
        copy = open_copy(paths, cache, index, opened.node)
        return copy.node, open_reader(copy)

    return BlockCopies(opened.node, open_reader(opened), reopen)


# The blocks of one partition, read from a copy that has them whole


Reopen = Callable[[NodeId, CorruptPartition], tuple[NodeId, BlockReader]]
"""Given the node whose copy is damaged and how, return another node and the reader of its copy. Raises
CorruptPartition if no copy is left."""


class BlockCopies:
    """Copies of one partition, equal byte for byte, of which one is read. May be used by several threads."""

    def __init__(self, node: NodeId, reader: BlockReader, reopen: Reopen) -> None:
        """`reader` reads the copy on `node`. `reopen` opens another one."""
        self._node = node
        self._any = reader
        self._reopen = reopen
        self._lock = threading.Lock()

    def size(self, block: int) -> int:
        """Return the bytes of memory that the block takes."""
        return self._any.size(block)

    @property
    def direct(self) -> bool:
        """Whether blocks are read past the page cache."""
        return self._any.direct

    def offset(self, block: int) -> int:
        """Return the byte of the file at which the block begins."""
        return self._any.offset(block)

    def body_start(self, block: int) -> int:
        """Return the offset of the body in this memory."""
        return self._any.body_start(block)

    def column_starts(self, block: int) -> dict[str, int]:
        """Return the offset of each column of fixed size in this memory."""
        return self._any.column_starts(block)

    def texts(self, block: int, memory: npt.NDArray[np.uint8], name: str) -> Any:
        """Return a column of text of a block that has been read into `memory`, in place."""
        return self._any.texts(block, memory, name)

    def read(
        self, block: int, memory: npt.NDArray[np.uint8], start: int = 0, *, owns_pages: bool = False
    ) -> None:
        """Read and verify a block of the first copy that has it whole. See `BlockReader.read`."""
        while True:
            reader = self._any
            try:
                reader.read(block, memory, start, owns_pages=owns_pages)
                return
            except CorruptPartition as error:
                with self._lock:
                    if reader is self._any:  # else another thread was faster
                        self._replace(error)

    def _replace(self, error: CorruptPartition) -> None:
        """Read another copy from now on. Raises CorruptPartition."""
        node, reader = self._reopen(self._node, error)
        if not reader.is_like(self._any):  # memory was arranged by a damaged footer
            raise error
        self._node, self._any = node, reader


def make_no_copy_error(name: str, failures: Sequence[CorruptPartition]) -> CorruptPartition:
    """Return the error for a partition of which no copy can be read, with what is wrong with each."""
    if len(failures) == 1:
        return failures[0]
    error = CorruptPartition(
        f"None of the {len(failures)} copies of {name} can be read. "
        + ". ".join(str(failure) for failure in failures)
    )
    error.__cause__ = failures[0]
    return error
