"""Reads all copies of partitions again, names what has decayed, and repairs it from other copies."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from insitu.base.disk.access import file_mode
from insitu.base.disk.durable import staged_file, sync_folder
from insitu.base.disk.guarded_paths import open_folder
from insitu.base.errors import CorruptPartition, TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId, PartitionInfo
from insitu.grid.catalog import full_disk_as_error
from insitu.grid.partitions import (
    Partition,
    file_checksum,
    make_corrupt_error,
    open_block_reader,
    verify_file,
)
from insitu.grid.stores import check_quota

if TYPE_CHECKING:
    from insitu.grid.transfer import RemoteStores

OnRead = Callable[[int], None]
"""Called with the number of bytes that have just been read."""
_COPIED_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """The findings of a scrub on one copy of a partition."""

    #: The partition's number.
    partition: int
    #: The node whose store has the copy.
    node: NodeId
    #: Its file.
    path: Path
    #: The fault; None: there is none.
    problem: CorruptPartition | None = None
    #: The blocks that are damaged, if the file is there at its length.
    blocks: tuple[int, ...] = ()
    #: Whether a good copy was put in its place.
    repaired: bool = False


class Pace:
    """Waits wherever reading is ahead of `rate` bytes a second; None: never."""

    def __init__(self, rate: float | None, on_read: OnRead = lambda size: None) -> None:
        self._rate = rate
        self._on_read = on_read
        self._began = time.monotonic()
        self._read = 0

    def __call__(self, size: int) -> None:
        self._read += size
        self._on_read(size)
        if self._rate is not None:
            time.sleep(max(0.0, self._read / self._rate - (time.monotonic() - self._began)))


def scrub_cache(
    paths: Paths,
    cache: CacheSpec,
    *,
    repair: bool = False,
    rate: float | None = None,
    on_read: OnRead = lambda size: None,
    remote: RemoteStores | None = None,
) -> list[CopyCheck]:
    """Read every copy of every partition of a cache whole, whatever was verified before.

    `repair`: put a good copy in the place of each damaged one, if there is one. `rate`: bytes a second to
    read at most on each host. `remote` are the agents that read copies on other hosts. Raises StorageFull,
    and TransferError if one of them is lost.
    """
    pace = Pace(rate, on_read)
    elsewhere = {} if remote is None else _check_elsewhere(paths, cache, remote, rate, on_read)
    checks = []
    for info in cache.partitions:
        found = [
            elsewhere.get((info.index, owner)) or check_copy(paths, cache, info, owner, pace)
            for owner in info.owners
        ]
        good = [check for check in found if check.problem is None]
        if repair and good:
            found = [
                check if check.problem is None else repair_from(paths, cache, check, good, remote)
                for check in found
            ]
        checks += found
    return checks


def _check_elsewhere(
    paths: Paths, cache: CacheSpec, remote: RemoteStores, rate: float | None, on_read: OnRead
) -> dict[tuple[int, NodeId], CopyCheck]:
    """Have agents read the copies on other hosts, all at the same time."""
    wanted: dict[NodeId, list[int]] = {}
    lost: dict[tuple[int, NodeId], CopyCheck] = {}
    for index, owner in ((info.index, owner) for info in cache.partitions for owner in info.owners):
        if owner in remote.nodes:
            wanted.setdefault(owner, []).append(index)
        elif not paths.node(owner).exists():
            path = paths.partition(owner, cache.name, cache.version, index)
            why = f"Partition {index} of {cache.name} can't be read on {owner}: its agent isn't alive"
            lost[index, owner] = CopyCheck(index, owner, path, CorruptPartition(why))
    read: dict[NodeId, int] = {}
    lock = threading.Lock()

    def count(node: NodeId, done: int, total: int) -> None:
        with lock:
            on_read(done - read.get(node, 0))
            read[node] = done

    return lost | {
        (each.partition, each.node): CopyCheck(
            each.partition,
            each.node,
            Path(each.path),
            None if each.problem is None else CorruptPartition(f"{each.node}: {each.problem}"),
            each.blocks,
        )
        for each in remote.verify(cache, wanted, rate, count)
    }


def repair_from(
    paths: Paths, cache: CacheSpec, damaged: CopyCheck, good: Sequence[CopyCheck], remote: RemoteStores | None
) -> CopyCheck:
    """Put a good copy in the place of the damaged one, across hosts if needed.

    Raises StorageFull.
    """
    elsewhere = () if remote is None else remote.nodes
    here = [check for check in good if check.node not in elsewhere]
    if here and damaged.node not in elsewhere:
        return _repair(paths, cache.partitions[damaged.partition], damaged, here[0])
    if remote is None:
        return damaged
    only_good = with_owners(cache, damaged.partition, [check.node for check in good])
    try:
        if damaged.node in elsewhere:
            remote.fetch(only_good, {damaged.node: [damaged.partition]}, marked=False)
        else:
            remote.fetch_here(paths, damaged.node, only_good, [damaged.partition])
    except TransferError as error:
        return replace(damaged, problem=CorruptPartition(f"{damaged.problem}. It isn't repaired: {error}"))
    return replace(damaged, repaired=True)


def with_owners(cache: CacheSpec, partition: int, owners: Sequence[NodeId]) -> CacheSpec:
    """Return a version as if one of its partitions had these owners."""
    infos = [replace(p, owners=tuple(owners)) if p.index == partition else p for p in cache.partitions]
    return replace(cache, partitions=tuple(infos))


def check_copy(paths: Paths, cache: CacheSpec, info: PartitionInfo, owner: NodeId, pace: Pace) -> CopyCheck:
    """Read one copy whole, whatever was verified before. Returns what is wrong with it, if anything is."""
    path = paths.partition(owner, cache.name, cache.version, info.index)
    check = CopyCheck(info.index, owner, path)
    try:
        verify_file(path, info, paths.verified(owner, cache.name, cache.version, info.index), on_read=pace)
        Partition.of_cache(path, cache, info)
    except CorruptPartition as error:
        blocks = find_damaged_blocks(path, cache, info)
        if not blocks:
            return replace(check, problem=error)
        named = ", ".join(map(str, blocks[:10])) + (f" and {len(blocks) - 10} more" if blocks[10:] else "")
        count = -(-info.rows // cache.block_rows)
        why = f"its checksum isn't {info.checksum}; of its {count} blocks, damaged are {named}"
        return replace(check, problem=make_corrupt_error(path, why), blocks=blocks)
    return check


def find_damaged_blocks(path: Path, cache: CacheSpec, info: PartitionInfo) -> tuple[int, ...]:
    """Return the blocks of a damaged file that aren't as they were written; none if all are, or if the file
    can't be read in blocks."""
    if not cache.block_rows:
        return ()
    damaged = []
    try:
        if path.stat().st_size != info.bytes:
            return ()
        partition = Partition.of_cache(path, cache, info)
        reader = open_block_reader(partition, cache.columns, cache.columns)
    except (OSError, CorruptPartition):
        return ()
    for block in range(len(partition.places)):
        try:
            reader.read(block, np.empty(reader.size(block), np.uint8))
        except CorruptPartition:
            damaged.append(block)
    return tuple(damaged)


def _repair(paths: Paths, info: PartitionInfo, damaged: CopyCheck, good: CopyCheck) -> CopyCheck:
    """Put a copy of the good file in the place of the damaged one. Raises StorageFull."""
    place = damaged.path
    held = place.stat().st_size if place.is_file() and not place.is_symlink() else 0
    check_quota(paths, damaged.node, info.bytes - held)
    with good.path.open("rb") as file:
        if not put_copy(paths, file, place, info):
            return damaged
    with contextlib.suppress(OSError):
        sync_folder(place.parent)
    return replace(damaged, repaired=True)


def put_copy(paths: Paths, source: IO[bytes], path: Path, info: PartitionInfo) -> bool:
    """Put a copy of an open file in the place of the partition at `path` in a store, in one step.

    Returns False if it hasn't the checksum of the partition; then the file there stays. The caller syncs the
    folder. Raises StorageFull, GridError, OSError.
    """
    # In a shared home others may put links in the place of folders.
    opening = open_folder(paths.home, path.parent, follow=True)
    with full_disk_as_error(paths.home), opening as opened, staged_file(opened / path.name) as staged:
        with staged.open("xb") as new:
            shutil.copyfileobj(source, new, _COPIED_BYTES)
            new.flush()
            os.fchmod(new.fileno(), file_mode(paths.home))
            os.fsync(new.fileno())
        if file_checksum(staged) != info.checksum:
            return False
        os.replace(staged, opened / path.name)
    return True


def verify_copies(
    paths: Paths, cache: CacheSpec, remote: RemoteStores | None = None
) -> list[tuple[int, NodeId, CorruptPartition | None]]:
    """Return (partition, owner, what is wrong with the copy or None) for every copy of a version of a cache.

    Reads every file, whatever has been verified before.
    """
    checks = scrub_cache(paths, cache, remote=remote)
    return [(check.partition, check.node, check.problem) for check in checks]
