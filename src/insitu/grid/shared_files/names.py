"""The names of `insitu://`: a tree of folders and files in the metadata store.

A change is decided by what the tree is at one revision, and made by one transaction, which compares all
that it was decided by. If something of that has changed meanwhile, it is decided again.

A change has an id, made by the caller. If its answer is lost, the caller asks again with `again`, and a
change that was made is found by its id. The first call may still be on its way then. So before such a change
is refused, its id is used up, and the first call changes nothing any more.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from insitu.grid.shared_files.entries import FILE, FOLDER, Entry
from insitu.grid.shared_files.name_records import (
    NEVER,
    VOLUMES,
    Folder,
    Garbage,
    encode_file,
    garbage_key,
    make_folder_id,
    moves_key,
    name_key,
    names_prefix,
    read_name,
    used_key,
    volume_key,
)
from insitu.metadata import Compare, Delete, MetadataStore, Operation, Put, Record, compare_found

_TRIES = 200
_USED_UP_SECONDS = 1200.0
"""Seconds for which an id stays used up: for longer than the store knows those that were made."""
_PAGE = 500
Seen = dict[str, Record | None]
"""Values of keys that were read, None: they aren't there."""
Decision = tuple[Seen, list[Operation]]
"""The basis of a change, and its effect."""


class UsedUp(Exception):
    """A change of this id is never made. It may be asked for with another id."""


class _Changed(Exception):
    """The basis of a change has changed meanwhile."""


@dataclass(frozen=True, slots=True)
class ListedPath:
    """One line of a listing."""

    #: The path in its volume.
    path: str
    #: FILE or FOLDER.
    kind: str
    #: Bytes of a file; 0 of a folder.
    size: int
    #: When it was changed, in seconds since 1970.
    modified: float
    #: Number of nodes that store a file.
    copies: int = 1


@dataclass(slots=True)
class _Way:
    """The target of a path."""

    #: The names of the path.
    names: list[str]
    #: The ids of the folders on the way, the volume's root first, as far as they are there.
    folders: list[str]
    #: The record of the path; None: nothing is there.
    record: Record | None = None
    #: The entry or folder of the record.
    found: Entry | Folder | None = None
    #: The path of a file that is in the place of a folder.
    blocked: str = ""


def _make_error(number: int, path: str, why: str = "") -> OSError:
    return OSError(number, why or os.strerror(number), path)


def _revision(record: Record | None) -> int:
    return 0 if record is None else record.revision


class NameTree:
    """The names that a metadata store holds. For several threads. Paths are checked by the caller.

    Methods that change something raise OSError with the `errno` that Linux has for it: ENOENT, EEXIST,
    EISDIR, ENOTDIR, ENOTEMPTY; ESTALE if another version is there; EAGAIN if too many change the same
    names. All raise StoreUnavailable.
    """

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    # Reading

    def look(self, volume: str, path: str) -> Entry | Folder | None:
        """Return what a path stands for, None: nothing is there."""
        (way,), _ = self._follow(volume, path)
        return way.found

    def list_children(self, volume: str, path: str, after: str, limit: int) -> list[ListedPath]:
        """Return up to `limit` direct entries of a folder, by name, behind the name `after`; nothing for what
        is no folder."""
        for _ in range(_TRIES):
            (way,), seen = self._follow(volume, path)
            if not isinstance(way.found, Folder):
                return []
            prefix = names_prefix(volume, way.found.id)
            records, _ = self._store.range(prefix, prefix + after, limit)
            if self._is_still(seen):
                return [_describe(path, record) for record in records]
        raise _make_error(errno.EAGAIN, path)

    def list_below(self, volume: str, path: str, after: str, limit: int) -> list[ListedPath]:
        """Return up to `limit` of all entries below a folder, each folder before its content, behind the path
        `after` of such a listing. Names that change meanwhile may be in it or not."""
        (way,), _ = self._follow(volume, path)
        if not isinstance(way.found, Folder):
            return []
        folder, prefix = way.found, path
        levels: list[tuple[str, Iterator[Record]]] = []
        rest = after[len(path) :].strip("/").split("/") if after else []
        for name in rest:
            levels.append((prefix, self._iterate(volume, folder.id, name)))
            record = self._get(name_key(volume, folder.id, name))
            found = None if record is None else read_name(record)
            if not isinstance(found, Folder):
                break
            folder, prefix = found, _join(prefix, name)
        else:
            levels.append((prefix, self._iterate(volume, folder.id, "")))
        listed: list[ListedPath] = []
        while levels and len(listed) < limit:
            prefix, records = levels[-1]
            next_one = next(records, None)
            if next_one is None:
                levels.pop()
                continue
            listed.append(_describe(prefix, next_one))
            found = read_name(next_one)
            if isinstance(found, Folder):
                levels.append((listed[-1].path, self._iterate(volume, found.id, "")))
        return listed

    def list_volumes(self) -> list[str]:
        """Return the names of all volumes."""
        return [record.key.removeprefix(VOLUMES) for record in self._read_range(VOLUMES, "")]

    def list_files(self, volume: str) -> tuple[list[tuple[str, Entry]], bool]:
        """Return all files with their paths, and whether none was missed.

        Whatever was there when this began, and still is at the end, is in it. One whose path is "" is in a
        folder that was removed.
        """
        before = self._get(moves_key(volume))
        files, folders = list[tuple[str, str, Entry]](), dict[str, tuple[str, str]]()
        prefix = names_prefix(volume)
        for record in self._read_range(prefix, ""):
            parent, _, name = record.key.removeprefix(prefix).partition("/")
            if not name:
                continue
            found = read_name(record)
            if isinstance(found, Folder):
                folders[found.id] = parent, name
            else:
                files.append((parent, name, found))
        root = self._get(volume_key(volume))
        paths = {} if root is None else _find_paths(root, folders)
        listed = [(_join(paths[p], name) if p in paths else "", entry) for p, name, entry in files]
        return listed, _revision(before) == _revision(self._get(moves_key(volume)))

    # Changing

    def publish(
        self, volume: str, path: str, entry: Entry, expected: int | None, change: str, *, again: bool = False
    ) -> int:
        """Put a file at its path, in the place of the one that is there. Return its version.

        `expected` is the version of the one that is there, which this one extends; 0: there is none; None:
        any.
        """

        def decide() -> Decision:
            (way,), seen = self._follow(volume, path)
            if way.blocked:
                raise _make_error(errno.ENOTDIR, way.blocked)
            if isinstance(way.found, Folder):
                raise _make_error(errno.EISDIR, path)
            if expected is not None and expected != _revision(way.record):
                what = "there is a file" if expected == 0 else "another process has changed it"
                raise _make_error(errno.EEXIST if expected == 0 else errno.ESTALE, path, what)
            key, operations = _make_way(volume, way)
            operations.append(Put(key, encode_file(entry)))
            if way.found is not None:
                operations += _record_garbage(volume, change, _find_garbage(way.found, entry, bool(expected)))
            return seen, operations

        return self._change(change, again, decide)

    def make_folder(self, volume: str, path: str, change: str, *, again: bool = False) -> None:
        """Make a folder, unless it is there."""

        def decide() -> Decision:
            (way,), seen = self._follow(volume, path)
            if isinstance(way.found, Folder):
                return seen, []
            if way.found is not None:
                raise _make_error(errno.EEXIST, path, "it is a file")
            if way.blocked:
                raise _make_error(errno.ENOTDIR, way.blocked)
            key, operations = _make_way(volume, way)
            return seen, [*operations, Put(key, Folder(make_folder_id(), time.time()).encode())]

        self._change(change, again, decide)

    def remove(self, volume: str, path: str, change: str, *, recursive: bool, again: bool = False) -> None:
        """Remove a file, or a folder, which must be empty unless `recursive`."""

        def decide() -> Decision:
            (way,), seen = self._follow(volume, path)
            if way.record is None:
                raise _make_error(errno.ENOENT, path)
            operations: list[Operation] = [Delete(way.record.key)]
            if not path:
                operations.append(Delete(moves_key(volume)))
            match way.found:
                case Folder(id) if recursive:
                    operations += _record_garbage(volume, change, Garbage(folder=id))
                case Folder():
                    operations += self._take_empty(volume, path, way.found, seen)
                case Entry() as entry:
                    garbage = Garbage("", entry.lists, entry.blocks)
                    operations += _record_garbage(volume, change, garbage)
            return seen, operations

        self._change(change, again, decide)

    def rename(self, volume: str, source: str, target: str, change: str, *, again: bool = False) -> None:
        """Move a file, which replaces one at `target`, or a folder with all in it, which replaces an empty
        one."""

        def decide() -> Decision:
            (old, new), seen = self._follow(volume, source, target)
            if old.record is None or old.found is None:
                raise _make_error(errno.ENOENT, source)
            if source == target:
                return seen, []
            if isinstance(old.found, Folder) and target.startswith(f"{source}/"):
                raise _make_error(errno.EINVAL, target, "it is in what is moved")
            if new.blocked:
                raise _make_error(errno.ENOTDIR, new.blocked)
            key, operations = _make_way(volume, new)
            operations += [Put(key, old.record.value), Delete(old.record.key)]
            match old.found, new.found:
                case Folder(), Folder() as replaced:
                    operations += self._take_empty(volume, target, replaced, seen)
                case Folder(), Entry():
                    raise _make_error(errno.ENOTDIR, target)
                case Entry(), Folder():
                    raise _make_error(errno.EISDIR, target)
                case Entry(), Entry() as replaced:
                    garbage = Garbage("", replaced.lists, replaced.blocks)
                    operations += _record_garbage(volume, change, garbage)
            return seen, [*operations, Put(moves_key(volume), b"")]

        self._change(change, again, decide)

    def _take_empty(self, volume: str, path: str, folder: Folder, seen: Seen) -> list[Operation]:
        """Return what removes the content of an empty folder. Raises OSError with ENOTEMPTY for another."""
        prefix = names_prefix(volume, folder.id)
        # Who puts a name into it writes this key, so the transaction fails then.
        seen[prefix] = self._get(prefix)
        if not self._store.range(prefix, prefix, 1)[0]:
            return [Delete(prefix)]
        if self._is_still(seen):
            raise _make_error(errno.ENOTEMPTY, path)
        raise _Changed

    def _change(self, change: str, again: bool, decide: Callable[[], Decision]) -> int:
        """Make a change once. Return the revision at which it was made."""
        for _ in range(_TRIES):
            if again and (made := self._find_made(change)):
                return made
            try:
                seen, operations = decide()
            except _Changed:
                continue
            except OSError:
                if again and (made := self._use_up(change)):
                    return made
                raise
            if not operations:
                return self._use_up(change) if again else 0
            compare = compare_found(seen, seen)
            outcome = self._store.transact(compare, operations, change)
            if outcome.succeeded:
                return self._confirm(change, outcome.revision)
        raise OSError(errno.EAGAIN, "too many others change the same names")

    def _find_made(self, change: str) -> int:
        """Return the revision at which a change was made, 0: it wasn't. Raises UsedUp."""
        outcome = self._store.transact([Compare(NEVER, 1)], [], change)
        return self._confirm(change, outcome.revision) if outcome.succeeded else 0

    def _confirm(self, change: str, revision: int) -> int:
        """Return `revision`, if what was made of an id then is its change. Raises UsedUp."""
        if self._get(used_key(change)) is not None:
            raise UsedUp
        return revision

    def _use_up(self, change: str) -> int:
        """See to it that a change isn't made any more. Return the revision at which it was, 0: it wasn't."""
        lease = self._store.grant(_USED_UP_SECONDS)
        outcome = self._store.transact([], [Put(used_key(change), b"", lease)], change)
        if self._get(used_key(change)) is not None:
            return 0
        self._store.revoke(lease)
        return outcome.revision

    # The store

    def _follow(self, volume: str, *paths: str) -> tuple[list[_Way], Seen]:
        """Return the targets of paths, all at one revision, and the records that say so."""
        for _ in range(_TRIES):
            seen: Seen = {}
            ways = [self._follow_one(volume, path, seen) for path in paths]
            if self._is_still(seen):
                return ways, seen
        raise OSError(errno.EAGAIN, "too many others change the same names")

    def _follow_one(self, volume: str, path: str, seen: Seen) -> _Way:
        way = _Way(path.split("/") if path else [], [])
        key = volume_key(volume)
        for number in range(len(way.names) + 1):
            if key not in seen:
                seen[key] = self._get(key)
            record = seen[key]
            if record is None:
                return way
            found = read_name(record)
            if number == len(way.names):
                way.record, way.found = record, found
                return way
            if isinstance(found, Entry):
                way.blocked = "/".join(way.names[:number])
                return way
            way.folders.append(found.id)
            key = name_key(volume, found.id, way.names[number])
        return way

    def _get(self, key: str) -> Record | None:
        return self._store.get([key])[0].get(key)

    def _is_still(self, seen: Seen) -> bool:
        """Return whether keys are at one revision what they were when each was read."""
        if len(seen) == 1:
            return True
        found, _ = self._store.get(list(seen))
        return all(_revision(found.get(key)) == _revision(record) for key, record in seen.items())

    def _iterate(self, volume: str, folder: str, after: str) -> Iterator[Record]:
        """Yield the names in a folder, behind the name `after`."""
        prefix = names_prefix(volume, folder)
        return self._read_range(prefix, prefix + after)

    def _read_range(self, prefix: str, after: str) -> Iterator[Record]:
        while True:
            records, _ = self._store.range(prefix, after, _PAGE)
            yield from records
            if len(records) < _PAGE:
                return
            after = records[-1].key


def _make_way(volume: str, way: _Way) -> tuple[str, list[Operation]]:
    """Return the key of a name, and what makes the folders on the way to it that aren't there."""
    now, folders, operations = time.time(), list(way.folders), list[Operation]()
    if folders and way.record is None:
        operations.append(Put(names_prefix(volume, folders[-1]), b""))
    if not folders:
        root = Folder(make_folder_id(), now)
        operations.append(Put(volume_key(volume), root.encode()))
        folders.append(root.id)
    for name in way.names[len(folders) - 1 : -1]:
        folder = Folder(make_folder_id(), now)
        operations.append(Put(name_key(volume, folders[-1], name), folder.encode()))
        folders.append(folder.id)
    return name_key(volume, folders[-1], way.names[-1]), operations


def _find_garbage(old: Entry, new: Entry, goes_on: bool) -> Garbage:
    """Return what of a version no file has once another one is in its place."""
    kept = {block.key for block in (*new.lists, *new.blocks)}
    blocks = tuple(block for block in old.blocks if block.key not in kept)
    if not goes_on:
        return Garbage("", tuple(block for block in old.lists if block.key not in kept), blocks)
    # Blocks that the new lists name aren't known here. Those left over are found as blocks of no file.
    return Garbage("", (), blocks) if old.lists == new.lists else Garbage()


def _record_garbage(volume: str, change: str, garbage: Garbage) -> list[Operation]:
    return [Put(garbage_key(volume, change), garbage.encode())] if garbage != Garbage() else []


def _find_paths(root: Record, folders: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Return the paths of folders that can be reached, by id, given parent and name of each."""
    top = read_name(root)
    paths = {top.id: ""} if isinstance(top, Folder) else {}
    for start in folders:
        way, folder = list[str](), start
        while folder not in paths and folder in folders and len(way) <= len(folders):
            way.append(folder)
            folder = folders[folder][0]
        if folder in paths:
            for each in reversed(way):
                parent, name = folders[each]
                paths[each] = _join(paths[parent], name)
    return paths


def _describe(folder: str, record: Record) -> ListedPath:
    path, found = _join(folder, record.key.rpartition("/")[2]), read_name(record)
    if isinstance(found, Folder):
        return ListedPath(path, FOLDER, 0, found.modified)
    return ListedPath(path, FILE, found.size, found.modified, found.copies)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
