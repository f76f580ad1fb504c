"""Entries: what a name of `insitu://VOLUME/...` stands for, and how entries of several nodes are joined."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

from insitu.errors import InputError
from insitu.spec import check_simple_name

BLOCK_BYTES = 4 << 20
"""Bytes of a block at most. Blocks of a file that grows by small pieces are smaller."""
MAX_COPIES = 16
MAX_PATH_BYTES, MAX_NAME_BYTES = 4096, 255
MAX_BLOCKS = 1 << 20
MAX_ENTRIES = 1 << 16
FILE, FOLDER, DELETED = "file", "folder", "deleted"
_KEY = re.compile(r"[0-9a-f]{32}")
_CHECKSUM = re.compile(r"xxh3:[0-9a-f]{32}")
_MAX_NUMBER = 1 << 62


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a file, which never changes."""

    #: 32 hex digits, drawn by the writer.
    key: str
    #: Bytes.
    size: int
    #: Of its bytes, as `checksum_block` returns it.
    checksum: str

    def to_json(self) -> list[Any]:
        return [self.key, self.size, self.checksum]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a path of a volume is, by the newest commit that changed it."""

    #: The path in its volume, without a slash at either end.
    path: str
    #: The number of the commit. It grows in a volume; 0: not committed yet.
    stamp: int
    #: The node that has committed it.
    writer: str
    #: FILE, FOLDER, or DELETED, which is kept so that a node with old data learns of it.
    kind: str
    #: Seconds since 1970 by the clock of `writer`.
    modified: float
    #: On how many nodes each block is to lie.
    copies: int = 1
    #: The content of a file, in order.
    blocks: tuple[Block, ...] = ()

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return sum(block.size for block in self.blocks)

    @property
    def order(self) -> tuple[int, str]:
        """Of two entries for a path the one with the greater order counts, on every node."""
        return self.stamp, self.writer

    def to_json(self) -> list[Any]:
        blocks = [block.to_json() for block in self.blocks]
        return [self.path, self.stamp, self.writer, self.kind, self.modified, self.copies, blocks]


def checksum_block(data: bytes | memoryview) -> str:
    """Return the checksum of a block's bytes."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"


def check_key(value: Any) -> str:
    """Return the key of a block. Raises InputError for anything else."""
    if type(value) is not str or not _KEY.fullmatch(value):
        raise InputError(f"A block's key has 32 hex digits. Received: {value!r:.100}")
    return value


def check_volume(value: Any) -> str:
    """Return the name of a volume. Raises InputError."""
    if type(value) is not str:
        raise InputError(f"A volume's name must be text. Received: {value!r:.100}")
    return check_simple_name("A volume's name", value)


def check_path(value: Any) -> str:
    """Return a path in a volume; "" is the volume itself. Raises InputError for one that isn't plain."""
    if type(value) is not str or len(value.encode(errors="surrogatepass")) > MAX_PATH_BYTES:
        raise InputError(f"A path has {MAX_PATH_BYTES} bytes at most. Received: {value!r:.100}")
    for name in value.split("/") if value else ():
        if name in ("", ".", "..") or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
            raise InputError(
                f"Names in insitu:// are texts of {MAX_NAME_BYTES} bytes at most that can be printed, and "
                f"neither '.' nor '..'. Received: {name!r:.100} in {value!r:.200}"
            )
    return value


def split_path(url: str) -> tuple[str, str]:
    """Return volume and path of `insitu://VOLUME/PATH`, with or without the scheme; ("", "") for all volumes.

    Slashes at the end, and several in a row, count as none and one. Raises InputError.
    """
    text = url.partition("://")[2] if "://" in url else url
    names = [name for name in text.split("/") if name]
    if not names:
        return "", ""
    return check_volume(names[0]), check_path("/".join(names[1:]))


def _number(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value < high:
        raise InputError(f"{name} must be a whole number in [{low}, {high}). Received: {value!r:.100}")
    return value


def parse_block(value: Any) -> Block:
    """Return a block that another process describes. Raises InputError."""
    if not isinstance(value, list) or len(value) != 3:
        raise InputError(f"A block is key, bytes and checksum. Received: {value!r:.100}")
    key, size, checksum = value
    if type(checksum) is not str or not _CHECKSUM.fullmatch(checksum):
        raise InputError(f"A checksum is xxh3: and 32 hex digits. Received: {checksum!r:.100}")
    return Block(check_key(key), _number("bytes", size, 1, BLOCK_BYTES + 1), checksum)


def parse_entry(value: Any) -> Entry:
    """Return an entry that another process describes. Raises InputError."""
    if not isinstance(value, list) or len(value) != 7:
        raise InputError(f"An entry has seven fields. Received: {value!r:.100}")
    path, stamp, writer, kind, modified, copies, blocks = value
    if kind not in (FILE, FOLDER, DELETED):
        raise InputError(f"An entry is a file, a folder or deleted. Received: {kind!r:.100}")
    if type(modified) not in (int, float) or not math.isfinite(modified):
        raise InputError(f"A time is a number of seconds. Received: {modified!r:.100}")
    if not isinstance(blocks, list) or len(blocks) > MAX_BLOCKS or (blocks and kind != FILE):
        raise InputError(f"A file has {MAX_BLOCKS} blocks at most, others none. Received: others")
    if not check_path(path):
        raise InputError("An entry has a path. Received: that of the whole volume")
    if type(writer) is not str:
        raise InputError(f"A node's name must be text. Received: {writer!r:.100}")
    return Entry(
        path,
        _number("stamp", stamp, 0, _MAX_NUMBER),
        check_simple_name("A node's name", writer) if writer else "",
        kind,
        float(modified),
        _number("copies", copies, 1, MAX_COPIES + 1),
        tuple(map(parse_block, blocks)),
    )


def encode_entries(entries: Iterable[Entry]) -> list[Any]:
    return [entry.to_json() for entry in entries]


def parse_entries(value: Any) -> list[Entry]:
    """Return what `encode_entries` was given. Raises InputError for anything else."""
    if not isinstance(value, list) or len(value) > MAX_ENTRIES:
        raise InputError(f"entries is a list of {MAX_ENTRIES} at most. Received: {value!r:.100}")
    return [parse_entry(each) for each in value]
