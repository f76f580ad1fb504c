"""The partitions that a process reads: which copy of each, and whether it can be trusted.

Every opening checks size, footer, schema and row count. Before the rows of a partition are read, its whole
checksum is compared, unless the file is unchanged since that was done (see `verification`). A copy that
fails is passed over for one on a backup owner, with a warning.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from insitu.errors import CorruptPartition
from insitu.grid.block_copies import BlockCopies, make_no_copy_error
from insitu.grid.copies_here import find_copies
from insitu.grid.partitions import BlockReader, Partition, open_block_reader
from insitu.grid.verification import check_size, verify_once
from insitu.paths import Paths
from insitu.spec import CacheSpec, Column, NodeId, PartitionInfo

logger = logging.getLogger("insitu.grid")

_HEAD_BYTES, _TAIL_BYTES = 64 << 10, 256 << 10
"""What opening looks at: schema and first block, and the footer, which has 24 bytes for each block."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a partition, open."""

    #: The partition, mapped into memory.
    partition: Partition
    #: What the catalog says of it.
    info: PartitionInfo
    #: The node whose store the copy lies in.
    node: NodeId
    #: Whether this process runs on that node.
    local: bool


def open_copy(
    paths: Paths, cache: CacheSpec, index: int, node: NodeId | None, *, verify: bool = True
) -> Copy:
    """Open the best copy of a partition: that on `node` if there is one, else its owners' first good one.

    A copy on `node` may have been fetched there, without being an owner's. Outside a job `node` is None, and
    every copy counts as local. Raises CorruptPartition where no copy can be trusted, with what is wrong with
    each.
    """
    info = cache.partitions[index]
    owners = find_copies(paths, cache, index, node)
    failures: list[CorruptPartition] = []
    for owner in owners:
        path = paths.partition(owner, cache.name, cache.version, index)
        try:
            check_size(path, info)
            if verify:
                verify_once(path, info, paths.verified(owner, cache.name, cache.version, index))
            partition = Partition.of_cache(path, cache, info)
        except CorruptPartition as error:
            failures.append(error)
            if len(failures) < len(owners):
                logger.warning("%s. Trying the copy on another node.", error)
            continue
        return Copy(partition, info, owner, local=node is None or owner == node)
    raise make_no_copy_error(_describe(cache, index), failures)


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


def _describe(cache: CacheSpec, index: int) -> str:
    return f"partition {index} of {cache.name} version {cache.version}"


def open_blocks(
    paths: Paths, cache: CacheSpec, opened: Copy, columns: Sequence[Column], *, direct: bool = False
) -> BlockCopies:
    """Return the blocks of a partition with the chosen `columns`, each read from `opened` or, where it is
    damaged there, from another copy. `direct`: past the page cache, where that is possible.

    Nothing is verified but what is read. Raises CorruptPartition where no copy can be opened.
    """
    info = opened.info

    def opener(owner: NodeId) -> Callable[[], BlockReader]:
        path = paths.partition(owner, cache.name, cache.version, info.index)

        def open_reader() -> BlockReader:
            check_size(path, info)
            partition = Partition.of_cache(path, cache, info)
            return open_block_reader(partition, cache.columns, columns, direct=direct)

        return open_reader

    others = [opener(owner) for owner in info.owners if owner != opened.node]
    first = functools.partial(open_block_reader, opened.partition, cache.columns, columns, direct=direct)
    return BlockCopies(_describe(cache, info.index), [first, *others])
