"""Reads all copies of partitions again, names what has decayed, and repairs it from other copies."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from insitu.access import file_mode
from insitu.durable import staged_file, sync_folder
from insitu.errors import CorruptPartition
from insitu.grid.files import full_disk_as_error
from insitu.grid.partitions import Partition, file_checksum, make_corrupt_error, open_block_reader
from insitu.grid.quotas import check_quota
from insitu.grid.store_settings import read_settings
from insitu.grid.tiers import find_slow, lies_in_tier
from insitu.grid.verification import verify_file
from insitu.paths import Paths
from insitu.spec import CacheSpec, NodeId, PartitionInfo

OnRead = Callable[[int], None]
"""Called with the number of bytes that have just been read."""


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """What a scrub has found of one copy of a partition."""

    #: The partition's number.
    partition: int
    #: The node whose store the copy lies in.
    node: NodeId
    #: Its file.
    path: Path
    #: What is wrong with it; None: nothing.
    problem: CorruptPartition | None = None
    #: The blocks that are damaged, where the file is there at its length.
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
) -> list[CopyCheck]:
    """Read every copy of every partition of a cache whole, whatever was verified before.

    `repair`: put a good copy in the place of each damaged one, where there is one. `rate`: bytes a second to
    read at most. Raises StorageFull.
    """
    pace = Pace(rate, on_read)
    checks = []
    for info in cache.partitions:
        found = [_check_copy(paths, cache, info, owner, pace) for owner in info.owners]
        good = next((check for check in found if check.problem is None), None)
        if repair and good is not None:
            found = [check if check.problem is None else _repair(paths, info, check, good) for check in found]
        checks += found
    return checks


def _check_copy(paths: Paths, cache: CacheSpec, info: PartitionInfo, owner: NodeId, pace: Pace) -> CopyCheck:
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
    """Return the blocks of a damaged file that aren't as they were written; none where all are, or where the
    file can't be read in blocks."""
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
    """Put a copy of the good file in the place of the damaged one, in one step: on the second path where that
    one lies there, or in the store where the second path is lost. Raises StorageFull."""
    place = find_slow(damaged.path)
    tier = read_settings(paths, damaged.node).tier
    if place is None or not lies_in_tier(tier, place):
        place = damaged.path
        held = place.stat().st_size if place.is_file() and not place.is_symlink() else 0
        check_quota(paths, damaged.node, info.bytes - held)
    with full_disk_as_error(paths.home), staged_file(place) as staged:
        shutil.copyfile(good.path, staged)
        os.chmod(staged, file_mode(paths.home))
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        if file_checksum(staged) != info.checksum:
            return damaged
        os.replace(staged, place)
    with contextlib.suppress(OSError):
        sync_folder(place.parent)
    return replace(damaged, repaired=True)


def verify_copies(paths: Paths, cache: CacheSpec) -> list[tuple[int, NodeId, CorruptPartition | None]]:
    """Return (partition, owner, what is wrong with the copy or None) for every copy of a version of a cache.

    Reads every file, whatever has been verified before.
    """
    return [(check.partition, check.node, check.problem) for check in scrub_cache(paths, cache)]
