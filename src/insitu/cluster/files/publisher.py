"""Publishes a task's writes to `insitu://` while the head was unreachable, in order, once it is back."""

from __future__ import annotations

import errno
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from insitu.base.errors import InputError, Unpublished
from insitu.base.wording import format_count
from insitu.cluster.files.client import FileClient, make_file_error
from insitu.cluster.files.names_client import NamesAway
from insitu.cluster.files.waiting_changes import (
    APPEND,
    PUBLISH,
    REMOVE,
    RENAME,
    Attempt,
    Foreseen,
    WaitingChange,
    find_to_extend,
    find_void,
    foresee,
    join_parts,
)
from insitu.cluster.files.waiting_folder import WaitingFolder
from insitu.grid.shared_files import BLOCK_BYTES, FILE, FOLDER, Entry

RETRY_SECONDS, _PAUSE_SECONDS = 1.0, 0.05
_SMALL_BYTES = 256 << 10
"""A block of what waits that is shorter is written again together with what is appended."""
_REMEMBERED_SECONDS = 500.0
"""Seconds for which the head knows the id of a change, and less."""
_APPENDED_BYTES = 32 * BLOCK_BYTES
"""Bytes that one change appends at most."""
_NOT_NOW = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN})
"""Errors after which a change is tried again."""


def tell(text: str) -> None:
    """Say something in the log of the task."""
    sys.stderr.write(f"[insitu] {text}\n")


class Publisher:
    """The changes of one task that wait. For several threads.

    `client` asks nodes and the head. `on_done` is called with each change that was made, and the file that it
    has published. Without `in_thread` only `advance` publishes.
    """

    def __init__(
        self,
        client: FileClient,
        folder: WaitingFolder,
        on_done: Callable[[WaitingChange, Entry | None], None] = lambda change, entry: None,
        *,
        in_thread: bool = True,
    ) -> None:
        self.folder = folder
        self._client = client
        self._on_done = on_done
        self._in_thread = in_thread
        #: Held while the fields below are read or written, and notified of each change of them.
        self.changed = threading.Condition(threading.RLock())
        self._changes: list[WaitingChange] = []
        #: The one that is published now.
        self._busy: WaitingChange | None = None
        self._number = 0
        #: Why the head can't be asked, "": it can be.
        self._away = ""
        #: Why nothing is published, as it was said last.
        self._said = ""
        #: Changes that were made since the head was unreachable.
        self._done = 0
        self._thread: threading.Thread | None = None

    def load(self) -> int:
        """Take over what a process that has ended has left. Return how many changes that is. Raises OSError,
        ClusterError."""
        self.folder.open()
        with self.changed:
            self._changes = self.folder.load()
            self._number = self.folder.find_last_number()
            if self._changes:
                self._start()
            return len(self._changes)

    # Changes that wait

    @property
    def away(self) -> str:
        """Why the head can't be asked, "": it can be."""
        return self._away

    @property
    def is_waiting(self) -> bool:
        """Return whether a change has to wait: the head is unreachable, or others wait."""
        return bool(self._away or self._changes)

    def count(self) -> int:
        """Return how many changes wait."""
        return len(self._changes)

    def make_error(self) -> NamesAway:
        """Return the error for what can't be said now, for the caller to raise."""
        return NamesAway(self._away or "Changes of this task wait until they are published")

    def foresee(self, volume: str, path: str) -> tuple[Foreseen, bool]:
        """Return what a path stands for once all is published, and whether that changes just now."""
        with self.changed:
            found = foresee(self._changes, volume, path)
            busy = self._busy
            moves = busy is not None and busy.volume == volume
            return found, moves and any(busy.touches(each) for each in (path, found.base))  # type: ignore[union-attr]

    def record_away(self, error: NamesAway) -> None:
        """Note that the head can't be asked."""
        with self.changed:
            if not self._away:
                tell(
                    f"Files of insitu:// can't be published now: {error.message}. What this task writes is "
                    f"kept in {self.folder.path}, and published once the head is back. Training continues"
                )
            self._away = error.message
            self._start()

    def add(self, change: WaitingChange) -> None:
        """Have a change wait. Raises OSError if the disk takes no more, and then it doesn't wait."""
        with self.changed:
            self._check(change)
            busy = None if self._busy is None else self._busy.number
            numbered = replace(change, number=self._number + 1)
            self.folder.save(numbered)
            self._number += 1
            before, self._changes = self._changes, [*self._changes, numbered]
            for void in find_void(before, numbered):
                if isinstance(void, int):
                    self._drop(void, busy)
                elif void.number != busy:
                    self._replace(void)
            self._start()

    def _check(self, change: WaitingChange) -> None:
        found = foresee(self._changes, change.volume, change.path)
        if change.kind in (RENAME, REMOVE) and not found.parts and found.kind not in ("", FOLDER):
            raise make_file_error(errno.ENOENT, change.volume, change.path)
        if change.kind in (PUBLISH, APPEND) and found.kind == FOLDER:
            raise make_file_error(errno.EISDIR, change.volume, change.path)

    def append(self, change: WaitingChange, data: bytes, copies: int) -> None:
        """Have a change wait that appends something. Raises OSError as `add`."""
        for start in range(0, max(1, len(data)), _APPENDED_BYTES):
            part = data[start : start + _APPENDED_BYTES]
            with self.changed:
                last = find_to_extend(self._changes, change, 1 + len(part) // BLOCK_BYTES)
                if last is None or last is self._busy or last.entry is None:
                    self.add(replace(change, entry=self._make_part(part, change.made, copies)))
                else:
                    self._extend(last, last.entry, part, change.made)

    def _make_part(self, data: bytes, made: float, copies: int) -> Entry:
        parts = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
        return Entry(len(data), made, copies, (), tuple(self.folder.make_block(part) for part in parts))

    def _extend(self, last: WaitingChange, entry: Entry, data: bytes, made: float) -> None:
        """Append to a file that waits. Its last block is written again if it is short."""
        kept = entry
        if entry.blocks and entry.blocks[-1].size < _SMALL_BYTES:
            tail = entry.blocks[-1]
            short = self.folder.read_block(tail.key)
            if short is not None:
                data = short + data
                kept = replace(entry, size=entry.size - tail.size, blocks=entry.blocks[:-1])
        joined = join_parts((kept, self._make_part(data, made, entry.copies)))
        self._replace(replace(last, entry=joined, made=made))

    def _replace(self, change: WaitingChange) -> None:
        """Put a change in the place of the one of its number."""
        old = next(each for each in self._changes if each.number == change.number)
        self.folder.save(change)
        self._changes = [change if each is old else each for each in self._changes]
        self.folder.remove_blocks(old, change)

    def _drop(self, number: int, busy: int | None = None) -> None:
        old = next((each for each in self._changes if each.number == number), None)
        if old is not None and number != busy:
            self._changes = [each for each in self._changes if each is not old]
            self.folder.remove(old)

    # Publishing

    def _start(self) -> None:
        if self._in_thread and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="insitu-publisher", daemon=True)
            self._thread.start()
        self.changed.notify_all()

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.is_waiting)
            try:
                is_done = self.advance()
            except OSError as error:  # of the task's own disk
                tell(f"What waits in {self.folder.path} can't be published: {error}")
                is_done = False
            if not is_done:
                time.sleep(RETRY_SECONDS)

    def advance(self, *, raises: bool = False) -> bool:
        """Publish the first change that waits, or see whether the head is back. Return whether that was
        done. `raises`: raise why it couldn't be done now."""
        entry: Entry | None = None
        why: BaseException | None = None
        change: WaitingChange | None = None
        try:
            if self._away:
                self._client.list_volumes()
            with self.changed:
                self._busy = change = self._changes[0] if self._changes else None
            if change is not None:
                entry = self._publish(change)
        except Exception as error:  # who publishes must not end before all is published
            why = error
        with self.changed:
            self._busy = None
            self._end(change, entry, why)
            self.changed.notify_all()
        if why is None or not self._is_not_now(why):
            return True
        if raises:
            raise why
        return False

    @staticmethod
    def _is_not_now(error: BaseException) -> bool:
        if isinstance(error, OSError):
            return error.errno in _NOT_NOW
        return not isinstance(error, InputError)

    def _end(self, change: WaitingChange | None, entry: Entry | None, why: BaseException | None) -> None:
        """Note what has become of a change."""
        if why is not None and self._is_not_now(why):
            if isinstance(why, NamesAway):
                self._away = why.message
            elif str(why) != self._said:
                self._said = str(why)
                tell(
                    f"{format_count(len(self._changes), 'change')} of insitu:// can't be published yet: {why}"
                )
            return
        self._away = self._said = ""
        if change is not None:
            # Its attempt was noted meanwhile.
            change = next(each for each in self._changes if each.number == change.number)
            missing = isinstance(why, FileNotFoundError) and change.kind == REMOVE
            if why is None or missing:
                self._done += 1
                if not change.is_left:  # what others have written since may be there
                    self._on_done(change, entry)
                self._drop(change.number)
            else:
                self._changes = [each for each in self._changes if each is not change]
                kept = self.folder.set_aside(change)
                what = f"insitu://{change.volume}/{change.path}"
                tell(f"A change of {what} that waited was refused: {why}. {kept} and its blocks stay")
        if not self._changes and self._done:
            tell(f"Published what waited for the head: {format_count(self._done, 'change')} of insitu://")
            self._done = 0

    def _publish(self, change: WaitingChange) -> Entry | None:
        """Make a change. Return the file that it publishes. Raises OSError, InsituError."""
        # Once the head has forgotten its id, the same request is another change.
        is_forgotten = change.attempt is not None and time.time() - change.made > _REMEMBERED_SECONDS
        if (change.is_left or is_forgotten) and change.kind != APPEND and self._is_newer(change):
            tell(
                f"insitu://{change.volume}/{change.path} was written again since this task, or a process of "
                f"it that has ended, began a {change.kind} of it. That isn't done any more"
            )
            return None
        if is_forgotten and change.kind == RENAME and self._is_renamed(change):
            return None
        if change.entry is not None:
            self._send_blocks(change, change.entry.copies)
        if change.kind == APPEND:
            return self._append(change)
        if change.entry is None:
            fields = change.fields
        else:
            found, _ = self._client.look(change.volume, change.path)
            replaces = None if found is None else found.version
            self._client.write_parts(change.volume, change.path, change.entry, replaces)
            fields = {"entry": change.entry.to_json(), "expected": None}
        again = change.attempt is not None
        version = self._ask(change, change.attempt or self._note(change, Attempt("")), again=again, **fields)
        return None if change.entry is None else replace(change.entry, version=version)

    def _is_newer(self, change: WaitingChange) -> bool:
        """Return whether another process has written there since a change was made."""
        for path in (change.path, change.target) if change.kind == RENAME else (change.path,):
            entry, kind = self._client.look(change.volume, path)
            if entry is not None and entry.modified > change.made:
                return True
            if kind == FOLDER and change.kind in (RENAME, REMOVE):
                below = self._client.list_below(change.volume, path)
                if any(each.kind == FILE and each.modified > change.made for each in below):
                    return True
        return False

    def _is_renamed(self, change: WaitingChange) -> bool:
        """Return whether nothing has the old name any more, and something the new one."""
        kinds = [self._client.look(change.volume, path)[1] for path in (change.path, change.target)]
        return kinds[0] is None and kinds[1] is not None

    def _send_blocks(self, change: WaitingChange, copies: int) -> None:
        for block in self.folder.list_blocks([change]):
            data = self.folder.read_block(block.key)
            if data is None:
                raise make_file_error(
                    errno.ENODATA, change.volume, change.path, "a block of it is gone from the disk"
                )
            self._client.send_block(change.volume, block, data, copies)

    def _note(self, change: WaitingChange, attempt: Attempt) -> Attempt:
        """Note on the disk what the head is about to be asked for, with an id of its own."""
        attempt = replace(attempt, change=secrets.token_hex(16))
        with self.changed:
            current = next(each for each in self._changes if each.number == change.number)
            self._replace(replace(current, attempt=attempt))
        return attempt

    def _ask(self, change: WaitingChange, attempt: Attempt, *, again: bool, **fields: object) -> int:
        """Ask for a change. Return the version that it has published."""
        kind = PUBLISH if change.kind == APPEND else change.kind
        while True:
            answer = self._client.change(
                kind, change.volume, change.path, attempt.change, again=again, **fields
            )
            if "used_up" not in answer:
                return int(answer.get("version", 0))
            attempt, again = self._note(change, attempt), False

    def _append(self, change: WaitingChange) -> Entry:
        """Publish the file with what is appended to it, once."""
        attempt, again = change.attempt, change.attempt is not None
        while True:
            if attempt is not None and not self._is_there(change, attempt):
                if (current := self._find_appended(change, attempt, by_content=True)) is not None:
                    return current
                attempt = None
            if attempt is None or attempt.entry is None:
                current, kind = self._client.look(change.volume, change.path)
                if kind == FOLDER:
                    raise make_file_error(errno.EISDIR, change.volume, change.path)
                attempt, again = self._note(change, self._make_attempt(change, current)), False
            entry = attempt.entry or Entry(0, change.made)
            try:
                self._client.write_parts(change.volume, change.path, entry, attempt.expected)
                asked = entry.to_json()
                version = self._ask(change, attempt, again=again, entry=asked, expected=attempt.expected)
                return replace(entry, version=version)
            except OSError as error:
                if error.errno not in (errno.ESTALE, errno.EEXIST):
                    raise
                is_old = time.time() - change.made > _REMEMBERED_SECONDS
                current = self._find_appended(change, attempt, by_content=is_old) if again else None
                if current is not None:
                    return current
                attempt = None

    def _make_attempt(self, change: WaitingChange, current: Entry | None) -> Attempt:
        part = change.entry or Entry(0, change.made)
        base = current or Entry(0, change.made, part.copies)
        size = base.size + part.size
        blocks = [*base.blocks, *part.blocks]
        entry = self._client.make_entry(change.volume, base.lists, blocks, base.copies, size)
        return Attempt("", replace(entry, modified=change.made), base.version)

    def _is_there(self, change: WaitingChange, attempt: Attempt) -> bool:
        """Return whether nodes still have the blocks of what was asked for: nobody has kept them since."""
        entry = attempt.entry
        if entry is None:
            return False
        return not self._client.keep_blocks(change.volume, (*entry.lists, *entry.blocks))

    def _find_appended(self, change: WaitingChange, attempt: Attempt, *, by_content: bool) -> Entry | None:
        """Return the file, if it has the last block of an attempt, which it has from that alone, or
        `by_content` what the attempt would have appended, at its place. A head that has put names back knows
        files, and no ids."""
        current, _ = self._client.look(change.volume, change.path)
        part, asked = change.entry, attempt.entry
        if current is None or part is None or asked is None or current.size < asked.size or not part.size:
            return None
        blocks = self._client.list_blocks(change.volume, current.lists, current.blocks)
        has_last = (*asked.lists, *asked.blocks)[-1] in (*current.lists, *blocks)
        if has_last or not by_content:
            return current if has_last else None
        start, data, wanted = 0, bytearray(), asked.size - part.size
        for block in blocks:
            if start < asked.size and start + block.size > wanted:
                if not data:
                    first = start
                data += self._client.read_block(change.volume, block)
            start += block.size
        mine = [self.folder.read_block(block.key) or b"" for block in part.blocks]
        return current if data[wanted - first :][: part.size] == b"".join(mine) else None

    # The end

    def wait(self, seconds: float) -> bool:
        """Return whether all is published within some seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.is_waiting, seconds)

    def pause(self) -> None:
        """Return once something has changed, or soon."""
        with self.changed:
            self.changed.wait(_PAUSE_SECONDS)

    def finish(self, seconds: float, why: str = "The script has ended") -> None:
        """Return once all is published. Raises Unpublished after some seconds."""
        with self.changed:
            if self._changes:
                count = format_count(len(self._changes), "change")
                tell(f"{why}. First, {count} of insitu:// must be published, within {seconds:.0f} s")
                self.changed.wait_for(lambda: not self._changes, seconds)
            left = list(self._changes)
        if left:
            names = sorted({f"insitu://{change.volume}/{change.path}" for change in left})
            more = f", and {len(names) - 3} more" if len(names) > 3 else ""
            raise Unpublished(
                f"What a task writes to insitu:// is published before it ends, within {seconds:.0f} s. "
                f"Received: {format_count(len(left), 'unpublished change')} of {', '.join(names[:3])}{more}: "
                f"{self._away or self._said}. Once the head is back, publish them, on this host: insitu fs "
                f"publish {self.folder.path}"
            )
        self.folder.close()
