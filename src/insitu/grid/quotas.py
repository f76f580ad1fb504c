"""The bytes that a node's store holds, and those that it may hold.

What counts are the files in the store and in what imports are writing for it. A file that several versions
share counts once. What lies on the store's second path doesn't count.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from insitu.errors import StorageFull
from insitu.grid.store_settings import read_settings
from insitu.paths import Paths, StagedPaths, cache_name_of_folder
from insitu.spec import NodeId


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """How much a store holds, of how much it may hold."""

    #: The bytes that it may hold; None: as many as fit.
    quota: int | None
    #: The bytes that it holds.
    used: int
    #: The bytes on its second path.
    slow: int
    #: Its folder there; None: it has no second path.
    tier: Path | None

    @property
    def free(self) -> int | None:
        """The bytes that may come; negative if there are too many; None without a quota."""
        return None if self.quota is None else self.quota - self.used


def measure_store(paths: Paths, node: NodeId) -> StoreRoom:
    """Return what the store of a node holds. Raises GridError where its settings can't be read."""
    settings = read_settings(paths, node)
    folders = [paths.node(node)]
    if paths.staging.is_dir():
        staged = [root for root in paths.staging.iterdir() if cache_name_of_folder(root.name)]
        folders += [StagedPaths(root).store(node) for root in staged]
    tier = None if settings.tier is None else settings.tier.root
    return StoreRoom(settings.quota, _measure(*folders), 0 if tier is None else _measure(tier), tier)


def check_quota(paths: Paths, node: NodeId, need: int) -> None:
    """Raise StorageFull where the store of a node may not hold `need` bytes more."""
    settings = read_settings(paths, node)
    if settings.quota is None:
        return
    free = settings.quota - measure_store(paths, node).used
    if need <= free:
        return
    tier = (
        "Move caches that are seldom used there"
        if settings.tier is not None
        else "Give it a second path with `insitu up --tier PATH` and move caches that are seldom used there"
    )
    received = f"about {need} more, where {free} are free" if free >= 0 else f"{-free} more than that"
    raise StorageFull(
        f"No room is left in the store of {node}: its quota is {settings.quota} bytes. Received: {received}. "
        f"{tier} with `insitu tier CACHE --to slow`, delete others with `insitu delete CACHE`, or allow more "
        f"with `insitu quota {node} SIZE`"
    )


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
    """Yield the state of each file; links, and what goes away meanwhile, are left out."""
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
