"""How the metadata store keeps the names of `insitu://`.

| key | value |
|---|---|
| `files/volumes/VOLUME` | the volume's root, a folder |
| `files/names/VOLUME/FOLDER/NAME` | a name in a folder: another folder, or a version of a file |
| `files/names/VOLUME/FOLDER/` | nothing; written whenever a name comes into the folder |
| `files/moves/VOLUME` | nothing; written whenever a name gets another key |
| `files/garbage/VOLUME/CHANGE` | what a change has made useless: blocks, or a folder with all in it |
| `files/used/CHANGE` | nothing; the id of a change that is never made, see `names.py` |

FOLDER is the id of a folder, which it keeps when it is moved. So moving or removing one changes its own name
alone, however much is in it.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from insitu.base.errors import GridError, InputError
from insitu.grid.shared_files.entries import FILE, FOLDER, Block, Entry, parse_block, parse_entry
from insitu.metadata import Record

VOLUMES = "files/volumes/"
NEVER = "files/never"
"""A key that is never there."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, or the root of a volume."""

    #: The name of its content. It never changes.
    id: str
    #: When it was made, in seconds since 1970.
    modified: float

    def encode(self) -> bytes:
        return json.dumps({FOLDER: self.id, "modified": self.modified}).encode()


@dataclass(frozen=True, slots=True)
class Garbage:
    """Content without a name."""

    #: A folder with all in it; "": none.
    folder: str = ""
    #: Blocks that name blocks, which are garbage, too.
    lists: tuple[Block, ...] = ()
    #: Blocks of files.
    blocks: tuple[Block, ...] = ()

    def encode(self) -> bytes:
        lists, blocks = ([block.to_json() for block in each] for each in (self.lists, self.blocks))
        return json.dumps({"folder": self.folder, "lists": lists, "blocks": blocks}).encode()


def volume_key(volume: str) -> str:
    return VOLUMES + volume


def names_prefix(volume: str, folder: str = "") -> str:
    """Return what the keys of all names of a volume, or of a folder, begin with."""
    return f"files/names/{volume}/{folder}/" if folder else f"files/names/{volume}/"


def name_key(volume: str, folder: str, name: str) -> str:
    return f"{names_prefix(volume, folder)}{name}"


def moves_key(volume: str) -> str:
    return f"files/moves/{volume}"


def garbage_key(volume: str, change: str) -> str:
    return f"{garbage_prefix()}{volume}/{change}"


def garbage_prefix() -> str:
    return "files/garbage/"


def used_key(change: str) -> str:
    return f"files/used/{change}"


def make_folder_id() -> str:
    return secrets.token_hex(16)


def encode_file(entry: Entry) -> bytes:
    return json.dumps({FILE: entry.to_json()[:-1]}).encode()


def read_name(record: Record) -> Entry | Folder:
    """Return what a name stands for. Raises GridError if the record is none of a name."""
    value = _load(record)
    try:
        if FILE in value:
            return parse_entry([*value[FILE], record.revision])
        return Folder(str(value[FOLDER]), float(value["modified"]))
    except (KeyError, TypeError, ValueError, InputError) as error:
        raise _make_error(record) from error


def read_garbage(record: Record) -> Garbage:
    """Return what is garbage. Raises GridError if the record doesn't say it."""
    value = _load(record)
    try:
        lists, blocks = (tuple(map(parse_block, value[name])) for name in ("lists", "blocks"))
        return Garbage(str(value["folder"]), lists, blocks)
    except (KeyError, TypeError, InputError) as error:
        raise _make_error(record) from error


def _load(record: Record) -> dict[str, Any]:
    try:
        value = json.loads(record.value)
    except (ValueError, RecursionError) as error:
        raise _make_error(record) from error
    if not isinstance(value, dict):
        raise _make_error(record)
    return value


def _make_error(record: Record) -> GridError:
    return GridError(
        f"The metadata store must hold names of insitu:// as this version writes them. "
        f"Received: {record.key!r}, {record.value[:100]!r}"
    )
