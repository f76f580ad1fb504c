"""Partitions on the second path of a store, such as a larger and slower disk.

In the store a link takes the place of the file, so that readers find it by the same name, with the same
bytes. A partition moves in four steps: the bytes are copied to a new file and synced; they are read back and
compared with the checksum; the file gets its name; a rename puts the link, or the file, in the place of what
was there. A move that is killed before the last step leaves the partition where it was, and a file that
nothing links to, which `sweep_tier` removes. A process that moves or sweeps holds the lock on the cache.

A process that has the old file open reads on in it. Its room is free when the last one has closed it.

Members of a shared home may write to these folders. So a folder is opened first, and what is written, renamed
and removed in it is named by its descriptor: a link that takes its place meanwhile leads nowhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from insitu.access import apply_modes, file_mode, folder_mode, is_shared
from insitu.durable import is_staged_file, staged_file, sync_folder
from insitu.errors import GridError
from insitu.grid.files import full_disk_as_error
from insitu.grid.partitions import checksum_text, file_checksum, make_corrupt_error
from insitu.grid.verification import check_size, record_written
from insitu.guarded_paths import open_folder
from insitu.paths import Paths, TierPaths
from insitu.spec import CacheSpec, NodeId, PartitionInfo

MOVING = ".moving"
"""The end of names, in a store, of what is about to take a partition's place."""
_SLICE_BYTES = 4 << 20

OnRead = Callable[[int], None]
"""Called with the number of bytes that have just been copied."""
Moved = dict[tuple[int, int], Path]
"""Where files of versions that share them have been moved to, by device and inode of the file that moved."""


def find_slow(path: Path) -> Path | None:
    """Return where the partition that has the name `path` in a store lies on the second path; None: it lies
    in the store."""
    try:
        return Path(os.readlink(path))
    except OSError:
        return None


def lies_in_tier(tier: TierPaths | None, place: Path) -> bool:
    """Return whether `place`, where a link in a store leads, is a partition's place on its second path.

    In a shared home other users make links, too. What one of those leads to elsewhere is never written to or
    removed.
    """
    if tier is None or place.parent.parent.parent != tier.root or ".." in place.parts:
        return False
    return _is_folder(place.parent.parent) and _is_folder(place.parent) and not place.is_symlink()


def find_slow_copies(paths: Paths, cache: CacheSpec) -> dict[int, list[NodeId]]:
    """Return the nodes on whose second path each partition lies, by partition; only those that do."""
    found: dict[int, list[NodeId]] = {}
    owners = {owner for info in cache.partitions for owner in info.owners}
    # Nearly always there are none, and a cache may have many partitions.
    links = {owner: _has_links(paths.version(owner, cache.name, cache.version)) for owner in owners}
    for info in cache.partitions if any(links.values()) else ():
        for owner in info.owners:
            if (
                links[owner]
                and find_slow(paths.partition(owner, cache.name, cache.version, info.index)) is not None
            ):
                found.setdefault(info.index, []).append(owner)
    return found


def _has_links(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.is_symlink() for entry in entries)
    except OSError:
        return False


def note_read(paths: Paths, node: NodeId, cache: CacheSpec) -> None:
    """Write down that a dataset has just opened a version in the store of a node, where that is possible."""
    path = paths.last_read(node, cache.name, cache.version)
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, file_mode(paths.home)))
        os.utime(path)


def move_to_slow(
    paths: Paths,
    tier: TierPaths,
    node: NodeId,
    cache: CacheSpec,
    info: PartitionInfo,
    moved: Moved,
    on_read: OnRead,
) -> int:
    """Move one copy of a partition to the second path of its store. Returns its bytes; 0: it is there.

    `moved` is the same for all versions of a cache. Raises CorruptPartition for a copy that isn't as it was
    written, which stays where it is; StorageFull; GridError.
    """
    path = paths.partition(node, cache.name, cache.version, info.index)
    if find_slow(path) is not None:
        return 0
    target = tier.partition(cache.name, cache.version, info.index)
    check_size(path, info)
    with tier_errors(tier):
        make_tier_folder(paths, tier, target.parent)
        key = _inode(path)
        known = moved.get(key)
        with open_in_tier(tier, target.parent) as there:
            if known is not None:
                link_file(known, there / target.name)
            else:
                with moving_file(there / target.name) as staged:
                    copy_verified(path, staged, info, file_mode(paths.home), on_read)
                    staged.replace(there / target.name)
            sync_folder(there)
        with open_in_store(paths, path.parent) as here:
            put_link(here / path.name, target)
            sync_folder(here)
            record = paths.verified(node, cache.name, cache.version, info.index)
            record_written(here / path.name, info, here / record.name)
    moved[key] = target
    return info.bytes


def move_to_fast(
    paths: Paths,
    tier: TierPaths,
    node: NodeId,
    cache: CacheSpec,
    info: PartitionInfo,
    moved: Moved,
    on_read: OnRead,
) -> int:
    """Move one copy of a partition back into its store. Returns its bytes; 0: it is there already.

    As `move_to_slow` otherwise.
    """
    path = paths.partition(node, cache.name, cache.version, info.index)
    source = find_slow(path)
    if source is None:
        return 0
    check_size(path, info)
    with full_disk_as_error(path, "What was moved before stays moved; the rest lies where it was"):
        key = _inode(source)
        with open_in_store(paths, path.parent) as here, moving_file(here / path.name) as staged:
            known = moved.get(key)
            if known is not None:
                link_file(known, staged)
            else:
                copy_verified(source, staged, info, file_mode(paths.home), on_read)
            staged.replace(here / path.name)
            sync_folder(here)
            record = paths.verified(node, cache.name, cache.version, info.index)
            record_written(here / path.name, info, here / record.name)
    moved[key] = path
    if lies_in_tier(tier, source):
        # A leftover if it can't be removed.
        with contextlib.suppress(OSError), open_in_tier(tier, source.parent) as there:
            (there / source.name).unlink()
    return info.bytes


def open_in_tier(tier: TierPaths, folder: Path) -> contextlib.AbstractContextManager[Path]:
    """Yield a path to a folder on a second path, where nothing may be a link. Raises OSError."""
    return open_folder(tier.root.parent, folder)


def open_in_store(paths: Paths, folder: Path) -> contextlib.AbstractContextManager[Path]:
    """Yield a path to a folder of a store. Links of this user and of the home's owner are followed, as from a
    home to a larger disk, others' aren't. Raises OSError."""
    return open_folder(paths.home, folder, follow=True)


@contextlib.contextmanager
def tier_errors(tier: TierPaths) -> Iterator[None]:
    """Turn the system's errors while partitions move to a second path into StorageFull and GridError."""
    left = "What was moved before stays moved; the rest lies where it was"
    try:
        with full_disk_as_error(tier.root, left, "Free some space there"):
            yield
    except OSError as error:
        raise GridError(
            f"A second path must be a folder that insitu can write to. Received: {tier.root}, where "
            f"{error.filename or 'a file'} can't be used ({error.strerror}). {left}. Mount it, or correct "
            f"who owns it"
        ) from error


def copy_verified(source: Path, target: Path, info: PartitionInfo, mode: int, on_read: OnRead) -> None:
    """Copy a partition to the new file `target`, synced and read back. Keeps the time of its last change.

    Raises CorruptPartition where `source` isn't as it was written, GridError where `target` doesn't give back
    what was written, OSError.
    """
    crc32 = done = 0
    room = memoryview(bytearray(_SLICE_BYTES))
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    with (
        open(source, "rb", 0, opener=_open_itself) as old,
        os.fdopen(os.open(target, flags, 0o600), "wb", 0) as new,
    ):
        while size := read_into(old, room, source):
            crc32 = zlib.crc32(room[:size], crc32)
            write_all(new.fileno(), room[:size])
            os.posix_fadvise(old.fileno(), done, size, os.POSIX_FADV_DONTNEED)
            done += size
            on_read(size)
        if checksum_text(crc32) != info.checksum:
            why = f"its checksum is {checksum_text(crc32)}, expected {info.checksum}"
            raise make_corrupt_error(source, why)
        found = os.fstat(old.fileno())
        os.fchmod(new.fileno(), mode)
        os.utime(new.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
        os.fsync(new.fileno())
        # What is read back comes from the device.
        os.posix_fadvise(new.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if file_checksum(target, lambda size: None) != info.checksum:
        raise GridError(
            f"A disk must give back what was written to it. Received: other bytes than those of {source} "
            f"from {target.parent.resolve()}. The partition stays where it was. Replace that disk"
        )


def _open_itself(name: str, flags: int) -> int:
    """Open a file, not what a link in its place leads to."""
    return os.open(name, flags | os.O_NOFOLLOW)


def read_into(file: IO[bytes], room: memoryview, path: Path) -> int:
    """Read what comes next of a partition; 0: nothing. Raises CorruptPartition where the disk fails."""
    try:
        return int(file.readinto(room))  # type: ignore[attr-defined]
    except OSError as error:
        raise make_corrupt_error(path, f"it can't be read ({error.strerror})") from error


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of `data`. Raises OSError."""
    while data:
        data = data[os.write(descriptor, data) :]


def link_file(source: Path, target: Path) -> None:
    """Give a file one more name, `target`, which may be in use; where that is impossible, copy it. Raises
    OSError."""
    with staged_file(target) as staged:
        try:
            os.link(source, staged)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links, or a file with too many
            shutil.copy2(source, staged)
            with staged.open("rb") as file:
                os.fsync(file.fileno())
        staged.replace(target)


def put_link(path: Path, target: Path) -> None:
    """Put a link to `target` in the place of the file at `path`, in one step. Raises OSError."""
    with moving_file(path) as staged:
        staged.symlink_to(target)
        staged.replace(path)


@contextlib.contextmanager
def moving_file(path: Path) -> Iterator[Path]:
    """Yield the path of a new file beside `path`, to be renamed to it. One that is left is removed.

    Unlike those of `staged_file` it is known as that of a move: who holds the lock may remove it.
    """
    staged = path.with_suffix(MOVING)
    staged.unlink(missing_ok=True)
    try:
        yield staged
    finally:
        staged.unlink(missing_ok=True)


def make_tier_folder(paths: Paths, tier: TierPaths, folder: Path) -> None:
    """Make a folder on a second path, and those between, with the modes of the home. Raises OSError."""
    here, mode = tier.root, folder_mode(paths.home)
    for name in folder.relative_to(tier.root).parts:
        with open_in_tier(tier, here) as opened:
            try:
                (opened / name).mkdir(mode=mode)
            except FileExistsError:
                pass
            else:
                with open_folder(opened, opened / name) as made:
                    made.chmod(mode)
                sync_folder(opened)
        here = here / name
    with open_in_tier(tier, here):
        pass


def open_tier(paths: Paths, tier: TierPaths) -> None:
    """Give what lies on a second path the group and the modes of the home. Raises OSError."""
    group = paths.home.stat().st_gid if is_shared(paths.home) else None
    apply_modes(paths.home, tier.root, group=group)


def find_leftovers(paths: Paths, tier: TierPaths, node: NodeId, cache: str) -> list[Path]:
    """Return what moves of a cache have left: files on the second path that no name in the store leads to,
    and files in the store that were to take a partition's place. A move that is under way has such files."""
    stores = _list_folders(paths.cache_store(node, cache))
    found = [file for folder in stores for file in folder.glob(f"*{MOVING}")]
    for folder in _list_folders(tier.cache_store(cache)):
        store = paths.cache_store(node, cache) / folder.name
        for file in _list(folder):
            # A scrub holds no lock while it puts a good copy in the place of one here.
            if find_slow(store / file.name) != file and not is_staged_file(file):
                found.append(file)
    return found


def sweep_tier(paths: Paths, tier: TierPaths, node: NodeId, cache: str) -> int:
    """Remove what moves that were killed, and dropped versions, have left of a cache on a second path.

    The caller holds the lock on the cache. Returns the bytes removed.
    """
    removed = 0
    for file in find_leftovers(paths, tier, node, cache):
        is_slow = file.is_relative_to(tier.root)
        opening = open_in_tier(tier, file.parent) if is_slow else open_in_store(paths, file.parent)
        with contextlib.suppress(OSError), opening as opened:
            size = (opened / file.name).lstat().st_size
            (opened / file.name).unlink()
            removed += size
    for folder in (*_list(tier.cache_store(cache)), tier.cache_store(cache)):
        with contextlib.suppress(OSError), open_in_tier(tier, folder.parent) as opened:
            (opened / folder.name).rmdir()
    return removed


def _list(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _list_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder of insitu's. What a link leads to isn't insitu's to remove."""
    return [found for found in _list(folder) if not folder.is_symlink() and _is_folder(found)]


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _inode(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise GridError(f"A partition is a file. Received: {path} of mode {found.st_mode:o}. Remove it")
    return found.st_dev, found.st_ino
