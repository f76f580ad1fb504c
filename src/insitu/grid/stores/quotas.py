"""The bytes that a node's store holds, and those that it may hold.

Files in the store and in what imports are writing for it count. A file that several versions share counts
once.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from insitu.base.errors import StorageFull
from insitu.base.paths import Paths, StagedPaths, cache_name_of_folder
from insitu.base.spec import NodeId
from insitu.grid.stores.store_settings import read_settings

WATCH_BYTES = 64 << 20
"""Bytes of sources between two looks at what the stores hold."""


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """How much a store holds, of how much it may hold."""

    #: The bytes that it may hold; None: as many as fit.
    quota: int | None
    #: The bytes that it holds.
    used: int

    @property
    def free(self) -> int | None:
        """The bytes that may come; negative if there are too many; None without a quota."""
        return None if self.quota is None else self.quota - self.used


def measure_store(paths: Paths, node: NodeId) -> StoreRoom:
    """Return what the store of a node holds. Raises GridError if its settings can't be read."""
    settings = read_settings(paths, node)
    folders = [paths.node(node)]
    if paths.staging.is_dir():
        staged = [root for root in paths.staging.iterdir() if cache_name_of_folder(root.name)]
        folders += [StagedPaths(root).store(node) for root in staged]
    return StoreRoom(settings.quota, _measure(*folders))


def check_quota(paths: Paths, node: NodeId, need: int) -> None:
    """Raise StorageFull if the store of a node may not hold `need` bytes more."""
    quota = read_settings(paths, node).quota
    if quota is None:
        return
    free = quota - measure_store(paths, node).used
    if need <= free:
        return
    received = f"about {need} more, where {free} are free" if free >= 0 else f"{-free} more than that"
    raise StorageFull(
        f"No room is left in the store of {node}: its quota is {quota} bytes. Received: {received}. "
        f"Delete caches with `insitu delete CACHE`, or allow more with `insitu quota {node} SIZE`"
    )


def check_quotas(paths: Paths, needs: Mapping[NodeId, int]) -> None:
    """Raise StorageFull if the store of a node may not hold as many bytes more as `needs` says."""
    for node, need in needs.items():
        check_quota(paths, node, need)


class QuotaWatch:
    """Sees that an import, whose size is often a guess, keeps the quotas of stores while it writes."""

    def __init__(self, paths: Paths, nodes: Iterable[NodeId]) -> None:
        self._paths = paths
        self._nodes = [node for node in nodes if read_settings(paths, node).quota is not None]
        #: Bytes of sources at the last check. Written by `check`.
        self._checked = 0

    def check(self, done: int) -> None:
        """Raise StorageFull if a store holds too much; look now and then. `done` bytes of sources are
        read."""
        if self._nodes and done - self._checked >= WATCH_BYTES:
            self._checked = done
            check_quotas(self._paths, dict.fromkeys(self._nodes, 0))


def _measure(*folders: Path) -> int:
    """Return the bytes of all files in some folders, each file once."""
    total, seen = 0, set()
    for folder in folders:
        for found in _walk(folder):
            if found.st_nlink > 1:
                key = found.st_dev, found.st_ino
                if key in seen:
                    continue
                seen.add(key)
            total += found.st_size
    return total


def _walk(folder: Path) -> Iterator[os.stat_result]:
    """Yield the state of each file; links, and files that vanish meanwhile, are left out."""
    waiting = [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    found = _stat(entry)
                    if found is None:
                        continue
                    if stat.S_ISDIR(found.st_mode):
                        waiting.append(entry.path)
                    elif stat.S_ISREG(found.st_mode):
                        yield found
        except OSError:
            continue


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None
