"""Changes that wait until the head can be asked again, in order; pure: without disk, clock and network.

A change that the head was never asked for can be left out if a later one makes it void, so that an hour of
checkpoints takes the room of those that are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from insitu.base.errors import InputError
from insitu.grid.shared_files import (
    FILE,
    FOLDER,
    MAX_LISTED,
    Entry,
    check_change,
    check_path,
    check_volume,
    parse_entry,
)

PUBLISH, APPEND, RENAME, REMOVE, MAKE = "publish", "append", "rename", "remove", "folder"
ABSENT = "absent"
"""The state of a path at which nothing is."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request to the head, which may have performed it."""

    #: The id of the change.
    change: str
    #: For an append, the whole file with the appended part.
    entry: Entry | None = None
    #: The version that this replaces.
    expected: int | None = None

    def to_json(self) -> list[Any]:
        return [self.change, None if self.entry is None else self.entry.to_json(), self.expected]


@dataclass(frozen=True, slots=True)
class WaitingChange:
    """A change that waits."""

    #: PUBLISH, APPEND, RENAME, REMOVE or MAKE.
    kind: str
    #: The first name of its path.
    volume: str
    #: The path that it changes, in the volume.
    path: str
    #: When it was made, in seconds since 1970 by the clock of this process.
    made: float
    #: For PUBLISH the file, for APPEND the appended part.
    entry: Entry | None = None
    #: The new path of RENAME.
    target: str = ""
    #: An option of REMOVE.
    recursive: bool = False
    #: None: the head was never asked for it.
    attempt: Attempt | None = None
    #: Its place in the order.
    number: int = 0
    #: Whether a process that has ended has made it.
    is_left: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what another process needs to continue it."""
        return {
            "kind": self.kind,
            "volume": self.volume,
            "path": self.path,
            "made": self.made,
            "entry": None if self.entry is None else self.entry.to_json(),
            "target": self.target,
            "recursive": self.recursive,
            "attempt": None if self.attempt is None else self.attempt.to_json(),
        }

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the request to the head beside the path."""
        if self.kind == RENAME:
            return {"target": self.target}
        return {"recursive": self.recursive} if self.kind == REMOVE else {}

    def touches(self, path: str) -> bool:
        """Return whether it has to do with a path, its content, or a folder above it."""
        mine = (self.path, self.target) if self.kind == RENAME else (self.path,)
        return any(is_within(each, path) or is_within(path, each) for each in mine)


def parse_waiting(value: Any, number: int) -> WaitingChange:
    """Return a change that a process which has ended has described. Raises InputError."""
    try:
        entry, attempt = value["entry"], value["attempt"]
        if value["kind"] not in (PUBLISH, APPEND, RENAME, REMOVE, MAKE):
            raise InputError(f"Nobody knows this change: {value['kind']!r:.100}")
        if attempt is not None:
            change, asked, expected = attempt
            asked = None if asked is None else parse_entry(asked)
            attempt = Attempt(check_change(change), asked, expected)
        return WaitingChange(
            value["kind"],
            check_volume(value["volume"]),
            check_path(value["path"]),
            float(value["made"]),
            None if entry is None else parse_entry(entry),
            check_path(value["target"]),
            value["recursive"] is True,
            attempt,
            number,
            is_left=True,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"A change that waits can't be read. Received: {error!r}") from error


def is_within(path: str, folder: str) -> bool:
    """Return whether a path is a folder or in it."""
    return path == folder or not folder or path.startswith(f"{folder}/")


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The state of a path once all that waits is published."""

    #: FILE, FOLDER, ABSENT; "": what the head says of `base`.
    kind: str
    #: The previous path.
    base: str
    #: The file in parts, one behind the other, and behind what is at `base` if `kind` is "".
    parts: tuple[Entry, ...] = ()


def foresee(changes: Sequence[WaitingChange], volume: str, path: str) -> Foreseen:
    """Return what a path stands for behind some changes, if none of them is refused."""
    parts: tuple[Entry, ...] = ()
    for change in reversed(changes):
        if change.volume != volume:
            continue
        made = change.target if change.kind == RENAME else change.path
        if change.kind != REMOVE and path != made and is_within(made, path):
            return Foreseen(FOLDER, path)
        if change.kind == MAKE and path == made:
            return Foreseen(FOLDER, path)
        if change.kind in (PUBLISH, APPEND) and change.entry is not None:
            if path == made:
                parts = (change.entry, *parts)
                if change.kind == PUBLISH:
                    return Foreseen(FILE, path, parts)
            elif is_within(path, made):
                return Foreseen(ABSENT, path)
        if change.kind == RENAME and is_within(path, made):
            path = change.path + path[len(made) :]
        elif change.kind in (RENAME, REMOVE) and is_within(path, change.path):
            return Foreseen(FILE if parts else ABSENT, path, parts)
    return Foreseen("", path, parts)


def join_parts(parts: Iterable[Entry]) -> Entry:
    """Return a file made of parts. Only the first may have lists of blocks."""
    first, *rest = parts
    for part in rest:
        first = replace(
            first,
            size=first.size + part.size,
            modified=part.modified,
            blocks=(*first.blocks, *part.blocks),
        )
    return first


def find_void(changes: Sequence[WaitingChange], new: WaitingChange) -> list[WaitingChange | int]:
    """Return what becomes of changes that are void once `new` comes behind them: the numbers of those that
    go, and those that are made otherwise."""
    found: list[WaitingChange | int] = []
    for index, old in enumerate(changes):
        if old.volume != new.volume or old.kind not in (PUBLISH, APPEND) or old.attempt is not None:
            continue
        if any(
            each.kind in (RENAME, REMOVE) and each.volume == old.volume and each.touches(old.path)
            for each in changes[index + 1 :]
        ):
            continue
        if new.kind == PUBLISH and new.path == old.path:
            found.append(old.number)
        elif new.kind == REMOVE and is_within(old.path, new.path) and (new.recursive or old.path == new.path):
            folder = old.path.rpartition("/")[0]
            # The folders that the file would have made stay.
            found.append(replace(old, kind=MAKE, path=folder, entry=None) if folder else old.number)
    return found


def find_to_extend(changes: Sequence[WaitingChange], new: WaitingChange, blocks: int) -> WaitingChange | None:
    """Return the change to which the `blocks` that `new` appends can be added; None: it is one of its own."""
    last = next((c for c in reversed(changes) if c.volume == new.volume and c.touches(new.path)), None)
    if last is None or last.kind not in (PUBLISH, APPEND) or last.path != new.path:
        return None
    if new.attempt is not None or last.attempt is not None or last.entry is None or last.entry.lists:
        return None
    return last if len(last.entry.blocks) + blocks <= MAX_LISTED else None
