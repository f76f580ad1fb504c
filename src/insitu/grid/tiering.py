"""Decides what moves to the second paths of stores, and back: by command, or to keep a store in its quota."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from insitu.errors import CacheBusy, InputError, StorageFull
from insitu.grid.catalog import Catalog
from insitu.grid.files import cache_locks, home_errors
from insitu.grid.quotas import check_quota, measure_store
from insitu.grid.store_settings import read_settings
from insitu.grid.tiers import Moved, OnRead, find_slow, move_to_fast, move_to_slow, sweep_tier, tier_errors
from insitu.paths import Paths, TierPaths
from insitu.spec import CacheSpec, NodeId

logger = logging.getLogger("insitu.grid")

Tier = Literal["slow", "fast"]
WATCH_BYTES = 64 << 20
"""Bytes of sources between two looks at what the stores hold."""


@dataclass(frozen=True, slots=True)
class TierMove:
    """What has moved of one version, in the store of one node."""

    #: The node.
    node: NodeId
    #: The version of the cache.
    version: int
    #: How many partitions moved now; others were there already.
    partitions: int
    #: Their bytes.
    bytes: int


@dataclass(frozen=True, slots=True)
class ColdCache:
    """A cache that may move to the second path of a store."""

    #: Its latest version, which is the only one.
    cache: CacheSpec
    #: When it was made or a dataset last opened it there, in seconds since 1970.
    last_used: float
    #: Its bytes in the store.
    bytes: int


def choose_cold(candidates: Iterable[ColdCache], need: int) -> list[ColdCache]:
    """Return the caches to move so that `need` bytes become free, those used longest ago first; none where
    all of them are too few."""
    chosen: list[ColdCache] = []
    for candidate in sorted(candidates, key=lambda c: (c.last_used, c.cache.name)):
        if need > 0 and candidate.bytes:
            chosen.append(candidate)
            need -= candidate.bytes
    return chosen if need <= 0 else []


def make_room(paths: Paths, needs: Mapping[NodeId, int], locked: Sequence[str] = ()) -> None:
    """See that the store of each node may hold as many bytes more as `needs` says.

    Where its quota is too small, caches that no job uses move to its second path, if it has one. The caches
    in `locked`, whose locks the caller holds, stay. Raises StorageFull.
    """
    for node, need in needs.items():
        free = None if read_settings(paths, node).quota is None else measure_store(paths, node).free
        if free is None or need <= free:
            continue
        _move_cold(paths, node, need - free, locked)
        check_quota(paths, node, need)


class QuotaWatch:
    """Sees that an import, whose size is often a guess, keeps the quotas of stores while it writes."""

    def __init__(self, paths: Paths, nodes: Iterable[NodeId], locked: Sequence[str]) -> None:
        """`locked` are the caches that are imported."""
        self._paths = paths
        self._nodes = [node for node in nodes if read_settings(paths, node).quota is not None]
        self._locked = locked
        #: Bytes of sources at the last check. Written by `check`.
        self._checked = 0

    def check(self, done: int) -> None:
        """Make room where a store holds too much, now and then. `done` bytes of sources are read. Raises
        StorageFull."""
        if self._nodes and done - self._checked >= WATCH_BYTES:
            self._checked = done
            make_room(self._paths, dict.fromkeys(self._nodes, 0), self._locked)


def _move_cold(paths: Paths, node: NodeId, need: int, locked: Sequence[str]) -> None:
    """Move what was used longest ago, if that makes room for `need` bytes. Raises StorageFull."""
    tier = read_settings(paths, node).tier
    if tier is None:
        return
    for cold in choose_cold(_find_candidates(paths, node, locked), need):
        with contextlib.suppress(CacheBusy), cache_locks(paths, [cold.cache.name]):
            latest = Catalog(paths).find(cold.cache.name)
            if latest != cold.cache or Catalog(paths).pinned_by(cold.cache.name):
                continue  # it has changed since it was chosen
            check_tier_room(tier, cold.bytes)
            move = _move_version(paths, node, cold.cache, "slow", tier, {}, lambda size: None)
            logger.warning(
                "Moved %d bytes of %s version %d, used longest ago, to %s: the quota of %s is used up.",
                *(move.bytes, cold.cache.name, cold.cache.version, tier.root, node),
            )


def _find_candidates(paths: Paths, node: NodeId, locked: Sequence[str]) -> list[ColdCache]:
    """Return the caches in the store of a node that may move. What a job uses stays: its processes would keep
    the files open, so nothing would become free."""
    catalog = Catalog(paths)
    found = []
    for cache in catalog.caches():
        if cache.name not in locked and not catalog.pinned_by(cache.name):
            size = sum(_sizes_in_store(paths, node, cache).values())
            found.append(ColdCache(cache, find_last_use(paths, node, cache), size))
    return found


def find_last_use(paths: Paths, node: NodeId, cache: CacheSpec) -> float:
    """Return when a version was made or a dataset last opened it on a node, in seconds since 1970."""
    try:
        return max(cache.created, paths.last_read(node, cache.name, cache.version).stat().st_mtime)
    except OSError:
        return cache.created


def _sizes_in_store(paths: Paths, node: NodeId, cache: CacheSpec) -> dict[tuple[int, int], int]:
    """Return the bytes of each file of a version that lies in the store itself, by device and inode."""
    sizes = {}
    for path in _paths_of(paths, node, cache):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if find_slow(path) is None:
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sizes


def _sizes_on_slow(paths: Paths, node: NodeId, cache: CacheSpec) -> dict[tuple[int, int], int]:
    sizes = {}
    for path in _paths_of(paths, node, cache):
        with contextlib.suppress(OSError):
            if find_slow(path) is not None:
                found = path.stat()
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sizes


def _paths_of(paths: Paths, node: NodeId, cache: CacheSpec) -> list[Path]:
    held = [info for info in cache.partitions if node in info.owners]
    return [paths.partition(node, cache.name, cache.version, info.index) for info in held]


def move_cache(
    paths: Paths,
    name: str,
    to: Tier,
    *,
    nodes: Sequence[NodeId] = (),
    on_read: OnRead = lambda size: None,
) -> list[TierMove]:
    """Move all versions of a cache that are kept to the second paths of their stores, or back.

    `nodes`: only what lies on these. Raises UnknownCache, InputError where a node has no second path,
    CacheBusy while another process imports into the cache or moves it, StorageFull, CorruptPartition and
    GridError. After any of them each partition lies whole in the one place or the other.
    """
    with home_errors(paths.home):
        catalog = Catalog(paths)
        catalog.get(name)
        with cache_locks(paths, [name]):
            versions = [cache for cache in catalog.stored() if cache.name == name]
            owners = sorted({owner for cache in versions for p in cache.partitions for owner in p.owners})
            chosen = _choose_nodes(paths, name, owners, nodes)
            tiers = {node: read_settings(paths, node).tier for node in chosen}
            _check_moves(paths, versions, tiers, to)
            moves = []
            for node, tier in tiers.items():
                moved: Moved = {}
                if tier is not None:
                    sweep_tier(paths, tier, node, name)
                    for cache in versions:
                        moves.append(_move_version(paths, node, cache, to, tier, moved, on_read))
                    sweep_tier(paths, tier, node, name)
            return moves


def measure_move(paths: Paths, name: str, to: Tier, nodes: Sequence[NodeId] = ()) -> int:
    """Return how many bytes `move_cache` would copy."""
    measure = _sizes_in_store if to == "slow" else _sizes_on_slow
    versions = [cache for cache in Catalog(paths).stored() if cache.name == name]
    owners = {owner for cache in versions for p in cache.partitions for owner in p.owners}
    total = 0
    for node in owners & set(nodes) if nodes else owners:
        sizes: dict[tuple[int, int], int] = {}
        for cache in versions:
            sizes.update(measure(paths, node, cache))
        total += sum(sizes.values())
    return total


def _choose_nodes(paths: Paths, name: str, owners: Sequence[NodeId], nodes: Sequence[NodeId]) -> list[NodeId]:
    wrong = sorted(set(nodes) - set(owners))
    if wrong:
        raise InputError(
            f"--node names a node that holds partitions of {name}: {', '.join(owners)}. Received: "
            f"{', '.join(wrong)}"
        )
    chosen = [node for node in owners if not nodes or node in nodes]
    elsewhere = [node for node in chosen if not paths.node(node).exists()]
    if elsewhere:
        raise InputError(
            f"Partitions move between the disks of this machine. Received: {name}, of which "
            f"{', '.join(elsewhere)} hold some on other hosts. Name nodes of this machine by --node; stores "
            f"of other hosts have no second path"
        )
    return chosen


def _check_moves(
    paths: Paths, versions: Sequence[CacheSpec], tiers: Mapping[NodeId, TierPaths | None], to: Tier
) -> None:
    """Raise InputError and StorageFull where a move can't be done, before anything is moved."""
    without = sorted(node for node, tier in tiers.items() if tier is None)
    if to == "slow" and without:
        raise InputError(
            f"Partitions move to the second path of their store. Received: {', '.join(without)}, which "
            f"{'has' if len(without) == 1 else 'have'} none. Name a folder on another disk with `insitu up "
            f"--tier PATH`"
        )
    for node, tier in tiers.items():
        sizes: dict[tuple[int, int], int] = {}
        for cache in versions:
            sizes |= (_sizes_in_store if to == "slow" else _sizes_on_slow)(paths, node, cache)
        need = sum(sizes.values())
        if to == "slow" and tier is not None:
            check_tier_room(tier, need)
        elif to == "fast" and need:
            check_quota(paths, node, need)
            _check_free(paths.node(node), need, f"the store of {node}")


def check_tier_room(tier: TierPaths, need: int) -> None:
    """Raise StorageFull where a second path hasn't room for `need` bytes. Raises GridError where it isn't
    there."""
    with tier_errors(tier):
        os.stat(tier.root)
    _check_free(tier.root, need, f"the second path {tier.root}")


def _check_free(folder: Path, need: int, named: str) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise StorageFull(
            f"No room is left on {named}. Received: {need} bytes to move there, where {free} are free. Free "
            f"some space there"
        )


def _move_version(
    paths: Paths,
    node: NodeId,
    cache: CacheSpec,
    to: Tier,
    tier: TierPaths,
    moved: Moved,
    on_read: OnRead,
) -> TierMove:
    sizes = []
    for info in cache.partitions:
        if node in info.owners:
            if to == "slow":
                sizes.append(move_to_slow(paths, tier, node, cache, info, moved, on_read))
            else:
                sizes.append(move_to_fast(paths, tier, node, cache, info, moved, on_read))
    return TierMove(node, cache.version, sum(size > 0 for size in sizes), sum(sizes))
