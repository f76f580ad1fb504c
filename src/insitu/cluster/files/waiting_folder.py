"""The folder on the disk of a task that holds changes which wait, and the blocks of their files.

FOLDER/
  lock               held by the process that adds changes or publishes them
  0000000012.json    a change; they are published in this order
  blocks/KEY         the bytes of a block
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path

from insitu.base.disk.access import make_folder
from insitu.base.disk.durable import replace_file, sync_folder, write_synced
from insitu.base.errors import ClusterError, InputError
from insitu.cluster.files.waiting_changes import WaitingChange, parse_waiting
from insitu.grid.shared_files import Block, make_block, unpack_blocks

_REFUSED = ".refused"


class WaitingFolder:
    """A folder, which is made when the first change comes. All methods raise OSError."""

    def __init__(self, path: Path, home: Path) -> None:
        """`path` is in `home`, whose modes it gets."""
        self.path = path
        self._home = home
        self._blocks = path / "blocks"
        self._lock: int | None = None

    def open(self, *, make: bool = False) -> None:
        """Take the lock, if the folder is there or must be made. Raises ClusterError if another process has
        it."""
        if self._lock is not None or not (make or self.path.exists()):
            return
        make_folder(self._home, self._blocks)
        for folder in (self.path, *self.path.parents):
            sync_folder(folder)
            if folder == self._home:
                break
        # A lock of the process, which its forks don't have.
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ClusterError(
                f"One process at a time publishes what waits in {self.path}. Received: another one does. "
                f"Wait until it has ended"
            ) from error
        self._lock = lock

    def close(self) -> None:
        """Give the lock back. A folder in which nothing waits goes."""
        if self._lock is None:
            return
        if not self._list():
            with contextlib.suppress(OSError):
                for left in self._blocks.iterdir():
                    left.unlink()
                self._blocks.rmdir()
                (self.path / "lock").unlink()
                self.path.rmdir()
                self.path.parent.rmdir()
        os.close(self._lock)
        self._lock = None

    def _list(self) -> list[Path]:
        return [file for file in self.path.iterdir() if file.suffix in (".json", _REFUSED)]

    def list_refused(self) -> list[Path]:
        """Return the files of changes that were set aside."""
        return sorted(self.path.glob(f"*{_REFUSED}"))

    def find_last_number(self) -> int:
        """Return the highest number of a change that is here."""
        return 0 if self._lock is None else max((int(file.stem) for file in self._list()), default=0)

    def load(self) -> list[WaitingChange]:
        """Return what a process that has ended has left, in order. Blocks of no change go. Raises
        ClusterError for what can't be read."""
        if self._lock is None:
            return []
        changes = []
        files = sorted(self._list())
        for file in files:
            if file.suffix == _REFUSED:
                continue
            try:
                changes.append(parse_waiting(json.loads(file.read_bytes()), int(file.stem)))
            except (ValueError, InputError) as error:
                raise ClusterError(
                    f"What waits is published in order. Received: {file}, which can't be read: {error}. "
                    f"Remove that file to publish the others"
                ) from error
        if not any(file.suffix == _REFUSED for file in files):
            named = {block.key for block in self.list_blocks(changes)}
            for path in self._blocks.iterdir():
                if path.name not in named:
                    path.unlink()
        return changes

    def save(self, change: WaitingChange) -> None:
        """Keep a change, in the place of the one of its number."""
        self.open(make=True)
        if change.entry is not None:
            sync_folder(self._blocks)  # its blocks have names before it names them
        text = json.dumps(change.to_json())
        replace_file(self._find(change), text.encode(), sync=True, mode=0o600)

    def _find(self, change: WaitingChange) -> Path:
        return self.path / f"{change.number:010d}.json"

    def remove(self, change: WaitingChange) -> None:
        """Remove a change and its blocks."""
        blocks = self.list_blocks([change])
        self._find(change).unlink(missing_ok=True)
        self._unlink(blocks)

    def remove_blocks(self, old: WaitingChange, new: WaitingChange) -> None:
        """Remove the blocks of a change that the one in its place doesn't have."""
        if old.entry != new.entry:
            kept = {block.key for block in self.list_blocks([new])}
            self._unlink(block for block in self.list_blocks([old]) if block.key not in kept)

    def _unlink(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            (self._blocks / block.key).unlink(missing_ok=True)

    def set_aside(self, change: WaitingChange) -> Path:
        """Have a change that was refused wait no more. Return the file that describes it."""
        return self._find(change).rename(self._find(change).with_suffix(_REFUSED))

    # Blocks

    def list_blocks(self, changes: Iterable[WaitingChange]) -> list[Block]:
        """Return all blocks of changes."""
        found = []
        for change in changes:
            if change.entry is not None:
                for block in change.entry.lists:
                    data = self.read_block(block.key)
                    found += [block, *(() if data is None else unpack_blocks(data))]
                found += change.entry.blocks
        return found

    def make_block(self, data: bytes) -> Block:
        """Keep some bytes as a new block."""
        block = make_block(data)
        self.put_block(block.key, data)
        return block

    def put_block(self, key: str, data: bytes) -> None:
        self.open(make=True)
        write_synced(self._blocks / key, data, 0o600)

    def has_block(self, key: str) -> bool:
        return self._lock is not None and (self._blocks / key).exists()

    def read_block(self, key: str) -> bytes | None:
        """Return the bytes of a block, None: they aren't here."""
        if self._lock is None:
            return None
        try:
            return (self._blocks / key).read_bytes()
        except FileNotFoundError:
            return None
