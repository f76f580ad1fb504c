"""What the owner of a node has set for its store: its quota, and a second path for cold partitions.

Both lie in a file in the store, so that they go where its disk goes. Readers need neither of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from insitu.access import STICKY, folder_mode, is_shared, make_folder, owner_file_mode
from insitu.durable import replace_file, seal, sync_folder, unseal
from insitu.errors import GridError, InputError
from insitu.guarded_paths import open_folder, read_guarded
from insitu.paths import Paths, TierPaths, tier_folder
from insitu.spec import NodeId

_FORMAT = 1
_TIER_NAME = re.compile(r"insitu-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What was set for one store. Written by `change_settings`."""

    #: The bytes that the store may hold on its first path; None: as many as fit.
    quota: int | None = None
    #: The folder of this store on its second path; None: there is no second path.
    tier: TierPaths | None = None
    #: The bytes of memory that files of `insitu://` may use; None: a share of the host's.
    file_memory: int | None = None


def read_settings(paths: Paths, node: NodeId) -> StoreSettings:
    """Return what was set for the store of a node.

    Raises GridError where that can't be read, also where another member of a shared home has written it.
    """
    path = paths.store_settings(node)
    try:
        state = unseal(read_guarded(paths.home, path))
        if state["format"] != _FORMAT:
            raise ValueError(f"its format is {state['format']}, this insitu knows {_FORMAT}")
        quota, tier = state["quota"], state["tier"]
        memory = state.get("file_memory")
        return StoreSettings(
            None if quota is None else int(quota),
            _check_place(tier),
            None if memory is None else int(memory),
        )
    except FileNotFoundError:
        return StoreSettings()
    except InputError as error:
        raise GridError(error.message) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GridError(
            f"The settings of a store must be readable. Received: {path} ({error}). Remove that file, then "
            f"set quota and second path again with `insitu up --quota SIZE --tier PATH`"
        ) from error


def _check_place(tier: str | None) -> TierPaths | None:
    """Return the folder of a store on its second path. Raises ValueError for one that insitu doesn't make."""
    if tier is None:
        return None
    place = Path(tier)
    if not place.is_absolute() or ".." in place.parts or not _TIER_NAME.fullmatch(place.name):
        raise ValueError(f"its second path, {tier!r:.200}, is none that insitu makes")
    return TierPaths(place)


def write_settings(paths: Paths, node: NodeId, settings: StoreSettings) -> None:
    """Replace what was set for a store; it survives a power cut.

    Raises InputError for a user whose settings don't count in this home, OSError.
    """
    if os.geteuid() != 0 and is_shared(paths.home) and paths.home.stat().st_uid != os.geteuid():
        raise InputError(
            f"The owner of a shared home sets quotas and second paths of its stores. Received: user "
            f"{os.geteuid()} for {paths.home} of user {paths.home.stat().st_uid}. Ask that user"
        )
    make_folder(paths.home, paths.node(node))
    tier = None if settings.tier is None else str(settings.tier.root)
    state = {
        "format": _FORMAT,
        "quota": settings.quota,
        "tier": tier,
        "file_memory": settings.file_memory,
    }
    replace_file(paths.store_settings(node), seal(state), sync=True, mode=owner_file_mode(paths.home))


def set_quota(paths: Paths, node: NodeId, quota: int | None) -> None:
    """Set the bytes that the store of a node may hold; None: as many as fit. Raises InputError, OSError."""
    if quota is not None and quota < 0:
        raise InputError(f"A quota is a number of bytes from 0 on. Received: {quota}")
    write_settings(paths, node, replace(read_settings(paths, node), quota=quota))


def set_file_memory(paths: Paths, node: NodeId, limit: int | None) -> None:
    """Set the bytes of memory that files of `insitu://` may use in a store; None: a share of the host's.

    Raises InputError, OSError.
    """
    if limit is not None and limit < 0:
        raise InputError(f"A limit of memory is a number of bytes from 0 on. Received: {limit}")
    write_settings(paths, node, replace(read_settings(paths, node), file_memory=limit))


def set_tier(paths: Paths, node: NodeId, tier: TierPaths | None) -> None:
    """Give a node's store a second path, one that `check_tier` has returned, or take it away again with None.

    Raises OSError.
    """
    old = read_settings(paths, node)
    if tier is not None:
        _make_root(paths, tier)
    write_settings(paths, node, replace(old, tier=tier))
    if old.tier is not None and old.tier != tier:
        remove_empty_folders(old.tier)


def _make_root(paths: Paths, tier: TierPaths) -> None:
    """Make the folder of a store on a second path, where others may have put something else. Raises
    OSError."""
    tier.root.mkdir(exist_ok=True)
    with open_folder(tier.root.parent, tier.root) as opened:
        if is_shared(paths.home):
            os.chown(opened, -1, paths.home.stat().st_gid)
        opened.chmod(folder_mode(paths.home))
    sync_folder(tier.root.parent)


def check_tier(paths: Paths, node: NodeId, path: Path | None, store_id: str) -> TierPaths | None:
    """Return the folder that a node's store gets on a second path; None for None.

    Raises InputError for a path that can't be used, and where partitions lie on another one now.
    """
    new = None if path is None else TierPaths(tier_folder(check_tier_path(paths, path), store_id))
    old = read_settings(paths, node).tier
    if old is not None and old != new and (count := count_files(old)):
        raise InputError(
            f"A second path can be changed or taken away while no partitions lie there. Received: {count} "
            f"file(s) of {node} in {old.root}. Move them back with `insitu tier CACHE --to fast` first"
        )
    if old is not None and old != new and (count := count_links(paths, node, old)):
        raise InputError(
            f"A second path can be changed or taken away while no partitions lie there. Received: {count} "
            f"partition(s) of {node} in {old.root}, which isn't there now. Mount it, and move them back with "
            f"`insitu tier CACHE --to fast` first; or delete their caches with `insitu delete CACHE`"
        )
    return new


def check_tier_path(paths: Paths, path: Path) -> Path:
    """Return a folder that can be a second path, absolute. Raises InputError."""
    rule = "--tier names a folder on another disk that is there, and that insitu can write to"
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"{rule}. Received: {path}. Make the folder, or mount the disk first")
    path = path.resolve()
    home = paths.home.resolve()
    if path.is_relative_to(home):
        raise InputError(f"{rule}. Received: {path}, which lies in INSITU_HOME. Name a folder outside of it")
    found = path.stat()
    if found.st_mode & stat.S_IWOTH and not found.st_mode & STICKY:
        raise InputError(
            f"{rule}, and that not every user may write to. Received: {path} with mode "
            f"{stat.S_IMODE(found.st_mode):o}. Name a folder in it, or take that right away: chmod o-w {path}"
        )
    return path


def count_files(tier: TierPaths) -> int:
    """Return how many partitions and leftovers lie on a second path."""
    return sum(len(names) for _, _, names in os.walk(tier.root))


def count_links(paths: Paths, node: NodeId, tier: TierPaths) -> int:
    """Return how many partitions of a store lie on its second path, whether its disk is mounted or not."""
    count = 0
    for parent, _, names in os.walk(paths.node(node)):
        for name in names:
            with contextlib.suppress(OSError):  # most aren't links
                count += Path(os.readlink(os.path.join(parent, name))).is_relative_to(tier.root)
    return count


def remove_empty_folders(tier: TierPaths) -> None:
    """Remove the folders on a second path that hold no file."""
    with contextlib.suppress(OSError):
        for _, folders, _, opened in os.fwalk(tier.root, topdown=False):
            for folder in folders:
                with contextlib.suppress(OSError):
                    os.rmdir(folder, dir_fd=opened)
        tier.root.rmdir()


def remove_slow_version(paths: Paths, node: NodeId, cache: str, version: int) -> None:
    """Remove what the store of a node has of a version on its second path."""
    with contextlib.suppress(GridError, OSError):
        tier = read_settings(paths, node).tier
        if tier is None:
            return
        store = tier.cache_store(cache)
        with open_folder(tier.root.parent, store) as opened:
            shutil.rmtree(opened / tier.version(cache, version).name, ignore_errors=True)
        with open_folder(tier.root.parent, tier.root) as opened:
            (opened / store.name).rmdir()
