"""The files of a cluster for a task that trains: what can't be published now is kept on its disk."""

from __future__ import annotations

import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from insitu.base.errors import GridError
from insitu.cluster.files.asking import CLIENT_SECONDS, Suspects
from insitu.cluster.files.client import FileClient
from insitu.cluster.files.names_client import Names, NamesAway
from insitu.cluster.files.peers import Fields, Peers, View
from insitu.cluster.files.publisher import Publisher
from insitu.cluster.files.waiting_changes import (
    APPEND,
    MAKE,
    PUBLISH,
    REMOVE,
    RENAME,
    Attempt,
    WaitingChange,
    is_within,
    join_parts,
)
from insitu.cluster.files.waiting_folder import WaitingFolder
from insitu.grid.shared_files import (
    FILE,
    FOLDER,
    Block,
    Entry,
    ListedPath,
    checksum_block,
    unpack_blocks,
)


class TaskFileClient(FileClient):
    """The files of a cluster. While the head is unreachable, changes wait on this task's disk, in order, and
    reads see them.

    A path that no waiting change has to do with is then what it was when this process asked for it last, or
    changed it. Listings, and paths that it doesn't know, raise NamesAway. A fork of the process has no part
    in this.
    """

    def __init__(
        self,
        names: Names,
        peers: Peers,
        find_view: Callable[..., View],
        suspects: Suspects,
        folder: WaitingFolder,
        *,
        in_thread: bool = True,
    ) -> None:
        super().__init__(names, peers, find_view, suspects)
        self._process = os.getpid()
        self._known = KnownPaths()
        self._folder = folder
        plain = FileClient(names, peers, find_view, suspects)
        self.publisher = Publisher(plain, folder, self._known.record_change, in_thread=in_thread)

    @property
    def _keeps(self) -> bool:
        return self._process == os.getpid()

    @property
    def _is_waiting(self) -> bool:
        return self._keeps and self.publisher.is_waiting

    # Names

    def _ask_names(self, kind: str, volume: str, path: str, *, is_change: bool, **fields: Any) -> Fields:
        try:
            return super()._ask_names(kind, volume, path, is_change=is_change, **fields)
        except GridError as error:  # such as of a head that knows no names until they are put back
            raise NamesAway(error.message, may_be_made=is_change) from error

    def look(self, volume: str, path: str) -> Found:
        if not self._keeps:
            return super().look(volume, path)
        deadline = time.monotonic() + CLIENT_SECONDS
        while True:
            seen, moves = self.publisher.foresee(volume, path)
            if seen.kind != "":
                return (join_parts(seen.parts), FILE) if seen.parts else (None, _kind(seen.kind))
            if not moves or self.publisher.away:
                try:
                    base, kind = self._look_base(volume, seen.base)
                except NamesAway:
                    if self.publisher.foresee(volume, path) == (seen, moves):
                        raise
                    continue
                if self.publisher.foresee(volume, path) == (seen, moves):
                    break
            # Without the head all is known or not at once, so what another thread has changed counts.
            if not self.publisher.away and time.monotonic() > deadline:
                raise self.publisher.make_error()
            self.publisher.pause()
        if not seen.parts:
            return base, kind
        return join_parts(seen.parts if base is None else (base, *seen.parts)), FILE

    def _look_base(self, volume: str, path: str) -> Found:
        if not self.publisher.away:
            try:
                found = super().look(volume, path)
            except NamesAway as error:
                self.publisher.record_away(error)
            else:
                with self.publisher.changed:
                    self._known.note(volume, path, found)
                return found
        with self.publisher.changed:
            known = self._known.find(volume, path)
        if known is None:
            raise self.publisher.make_error()
        return known

    def look_to_change(self, volume: str, path: str) -> Found:
        try:
            return self.look(volume, path)
        except NamesAway:
            if not self._keeps:
                raise
            return None, None

    def _list(self, kind: str, volume: str, path: str) -> Iterator[ListedPath]:
        if self._keeps:
            self._wait_for_publishing()
        try:
            yield from super()._list(kind, volume, path)
        except NamesAway as error:
            if self._keeps:
                self.publisher.record_away(error)
            raise

    def _wait_for_publishing(self) -> None:
        """Return once nothing waits. Raises NamesAway at once if the head is unreachable."""
        deadline = time.monotonic() + CLIENT_SECONDS
        while self.publisher.is_waiting:
            if self.publisher.away or time.monotonic() > deadline:
                raise self.publisher.make_error()
            self.publisher.pause()

    def publish(
        self,
        volume: str,
        path: str,
        entry: Entry,
        expected: int | None,
        *,
        replaces: int | None = None,
        unwritten: Sequence[tuple[Block, bytes]] = (),
        appended: bytes | None = None,
    ) -> int:
        is_new = expected is not None and appended is None
        if is_new or not self._keeps:
            if self._is_waiting:
                raise self.publisher.make_error()
            return super().publish(volume, path, entry, expected, replaces=replaces, unwritten=unwritten)
        kind = PUBLISH if expected is None else APPEND
        change = WaitingChange(kind, volume, path, entry.modified, entry)
        if not self._is_waiting and not self._has_local(entry):
            self.write_parts(volume, path, entry, expected if replaces is None else replaces, unwritten)
            fields = {"entry": entry.to_json(), "expected": expected}
            answer, attempt = self._try(PUBLISH, change, fields)
            if answer is not None:
                version = int(answer["version"])
                self._record_done(change, replace(entry, version=version))
                return version
            if attempt is not None:
                change = replace(change, attempt=replace(attempt, entry=entry, expected=expected))
        if appended is not None:
            self.publisher.append(change, appended, entry.copies)
        else:
            for block, data in unwritten:
                self._folder.put_block(block.key, data)
            self._keep_blocks_here(volume, entry)
            self.publisher.add(change)
        return 0

    def append_later(self, volume: str, path: str, data: bytes, copies: int) -> bool:
        if not self._is_waiting:
            return False
        self.publisher.append(WaitingChange(APPEND, volume, path, time.time()), data, copies)
        return True

    def rename(self, volume: str, source: str, target: str) -> None:
        self._make_or_keep(WaitingChange(RENAME, volume, source, time.time(), target=target))

    def remove(self, volume: str, path: str, *, recursive: bool) -> None:
        self._make_or_keep(WaitingChange(REMOVE, volume, path, time.time(), recursive=recursive))

    def make_folder(self, volume: str, path: str) -> None:
        self._make_or_keep(WaitingChange(MAKE, volume, path, time.time()))

    def _make_or_keep(self, change: WaitingChange) -> None:
        if not self._is_waiting:
            answer, attempt = self._try(change.kind, change, change.fields)
            if answer is not None:
                self._record_done(change, None)
                return
            change = replace(change, attempt=attempt)
        self.publisher.add(change)

    def _try(self, kind: str, change: WaitingChange, fields: Fields) -> tuple[Fields | None, Attempt | None]:
        """Ask for a change. Return the answer; None: the head is unreachable, and what it may have done."""
        while True:
            id = secrets.token_hex(16)
            try:
                answer = self.change(kind, change.volume, change.path, id, again=False, **fields)
            except NamesAway as error:
                if not self._keeps:
                    raise
                self.publisher.record_away(error)
                return None, Attempt(id) if error.may_be_made else None
            if "used_up" not in answer:
                return answer, None

    def _record_done(self, change: WaitingChange, entry: Entry | None) -> None:
        if self._keeps:
            with self.publisher.changed:
                self._known.record_change(change, entry)

    # Blocks

    def _has_local(self, entry: Entry) -> bool:
        """Return whether some of a file was written while the head was unreachable."""
        return any(self._folder.has_block(block.key) for block in self._list_all(entry))

    def _list_all(self, entry: Entry) -> list[Block]:
        """Return the blocks of a file that isn't published, and those that name them, if they are here."""
        found = [*entry.lists, *entry.blocks]
        for block in entry.lists:
            data = self._folder.read_block(block.key)
            found += () if data is None else unpack_blocks(data)
        return found

    def _keep_blocks_here(self, volume: str, entry: Entry) -> None:
        """Bring the blocks of a file that are on nodes alone to this task's disk."""
        blocks = [*entry.lists, *self.list_blocks(volume, entry.lists, entry.blocks)]
        for block in blocks:
            if not self._folder.has_block(block.key):
                self._folder.put_block(block.key, super().read_block(volume, block))

    def write_block(self, volume: str, data: bytes, copies: int) -> Block:
        return (
            self._folder.make_block(data) if self._is_waiting else super().write_block(volume, data, copies)
        )

    def read_block(self, volume: str, block: Block) -> bytes:
        data = self._folder.read_block(block.key) if self._keeps else None
        if data is not None and checksum_block(data) == block.checksum:
            return data
        return super().read_block(volume, block)

    def keep_blocks(self, volume: str, blocks: Sequence[Block]) -> int:
        there = [block for block in blocks if not self._folder.has_block(block.key)]
        return super().keep_blocks(volume, there) if there else 0


def _kind(kind: str) -> str | None:
    return kind if kind in (FILE, FOLDER) else None


# Remembers what paths stood for when this process asked for them last, or changed them


_MOST = 10_000
"""Paths that are remembered."""
Found = tuple[Entry | None, str | None]
"""A file, and the kind of what is at a path, as `FileClient.look` returns them."""


class KnownPaths:
    """For several threads, which hold a lock of the caller."""

    def __init__(self) -> None:
        #: The oldest first.
        self._found: OrderedDict[tuple[str, str], Found] = OrderedDict()

    def find(self, volume: str, path: str) -> Found | None:
        """Return what a path stood for last, None: this process doesn't know."""
        return self._found.get((volume, path))

    def note(self, volume: str, path: str, found: Found) -> None:
        """Note what a path stands for."""
        self._found[volume, path] = found
        self._found.move_to_end((volume, path))
        if found[1] is not None:
            while "/" in path:
                path = path.rpartition("/")[0]
                self._found[volume, path] = (None, FOLDER)
        while len(self._found) > _MOST:
            self._found.popitem(last=False)

    def record_change(self, change: WaitingChange, entry: Entry | None = None) -> None:
        """Note that a change was made. `entry` is the file that it has published."""
        volume = change.volume
        if change.kind in (RENAME, REMOVE):
            for path in (change.path, change.target) if change.kind == RENAME else (change.path,):
                for key in [key for key in self._found if key[0] == volume and is_within(key[1], path)]:
                    del self._found[key]
            self.note(volume, change.path, (None, None))
        elif change.kind in (PUBLISH, APPEND) and entry is not None:
            self.note(volume, change.path, (entry, FILE))
        elif change.kind == MAKE:
            self.note(volume, change.path, (None, FOLDER))
