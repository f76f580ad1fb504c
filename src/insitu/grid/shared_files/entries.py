"""Entries: what the name of a file of `insitu://VOLUME/...` stands for."""

from __future__ import annotations

import math
import re
import secrets
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

from insitu.base.errors import InputError
from insitu.base.spec import check_simple_name

BLOCK_BYTES = 4 << 20
"""Bytes of a block at most. Blocks of a file that grows by small pieces are smaller."""
MAX_COPIES = 16
MAX_PATH_BYTES, MAX_NAME_BYTES = 4096, 255
MAX_DEPTH = 40
"""Names of a path at most: a transaction compares each folder on the way."""
MAX_LISTED = 64
"""Blocks that an entry names itself at most. Those of a larger file are named in blocks of their own."""
FILE, FOLDER = "file", "folder"
_KEY = _CHANGE = re.compile(r"[0-9a-f]{32}")
_MANIFEST_KEY = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{8}")
_CHECKSUM = re.compile(r"xxh3:[0-9a-f]{32}")
_PACKED = struct.Struct("<16sI16s")
_MAX_NUMBER = 1 << 62


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a file, which never changes."""

    #: 32 hex digits, drawn by the writer.
    key: str
    #: Bytes.
    size: int
    #: Checksum of its bytes, as `checksum_block` returns it.
    checksum: str

    def to_json(self) -> list[Any]:
        return [self.key, self.size, self.checksum]


@dataclass(frozen=True, slots=True)
class Entry:
    """A version of a file."""

    #: Bytes.
    size: int
    #: Seconds since 1970 by the clock of the process that has written it.
    modified: float
    #: Number of nodes that store each block.
    copies: int = 1
    #: Blocks that name the first blocks of the file, as `pack_blocks` writes them.
    lists: tuple[Block, ...] = ()
    #: The blocks that follow those, in order.
    blocks: tuple[Block, ...] = ()
    #: The revision of the metadata store at which it was published or moved; 0: it wasn't yet.
    version: int = 0

    @property
    def block_count(self) -> int:
        """How many blocks the file has."""
        return sum(block.size for block in self.lists) // _PACKED.size + len(self.blocks)

    def to_json(self) -> list[Any]:
        lists, blocks = ([block.to_json() for block in each] for each in (self.lists, self.blocks))
        return [self.size, self.modified, self.copies, lists, blocks, self.version]


def checksum_block(data: bytes | memoryview) -> str:
    """Return the checksum of a block's bytes."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"


def make_block(data: bytes, key: str = "") -> Block:
    """Return the description of a block that will be written; without `key` with a new one."""
    return Block(key or secrets.token_hex(16), len(data), checksum_block(data))


def check_key(value: Any) -> str:
    """Return the key of a block or a manifest. Raises InputError for anything else."""
    if type(value) is not str or not (_KEY.fullmatch(value) or _MANIFEST_KEY.fullmatch(value)):
        raise InputError(f"A block's key has 32 hex digits. Received: {value!r:.100}")
    return value


def is_manifest(key: str) -> bool:
    """Return whether a key is that of a manifest, not of a part of a file."""
    return "-" in key


def check_change(value: Any) -> str:
    """Return the id of a change. Raises InputError for anything else."""
    if type(value) is not str or not _CHANGE.fullmatch(value):
        raise InputError(f"A change's id has 32 hex digits. Received: {value!r:.100}")
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
    names = value.split("/") if value else []
    if len(names) > MAX_DEPTH:
        raise InputError(f"A path has {MAX_DEPTH} names at most. Received: {len(names)} in {value!r:.100}")
    for name in names:
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


def check_count(name: str, value: Any, low: int, high: int) -> int:
    """Return a whole number in [low, high). Raises InputError for anything else."""
    if type(value) is not int or not low <= value < high:
        raise InputError(f"{name} must be a whole number in [{low}, {high}). Received: {value!r:.100}")
    return value


def parse_block(value: Any) -> Block:
    """Return a block that another process describes. Raises InputError."""
    if not isinstance(value, list) or len(value) != 3:
        raise InputError(f"A block is key, bytes and checksum. Received: {value!r:.100}")
    key, size, checksum = value
    if type(key) is not str or not _KEY.fullmatch(key):
        raise InputError(f"A block's key has 32 hex digits. Received: {key!r:.100}")
    if type(checksum) is not str or not _CHECKSUM.fullmatch(checksum):
        raise InputError(f"A checksum is xxh3: and 32 hex digits. Received: {checksum!r:.100}")
    return Block(key, check_count("bytes", size, 1, BLOCK_BYTES + 1), checksum)


def _parse_blocks(value: Any) -> tuple[Block, ...]:
    if not isinstance(value, list) or len(value) > MAX_LISTED:
        raise InputError(f"An entry names {MAX_LISTED} blocks at most. Received: {value!r:.100}")
    return tuple(map(parse_block, value))


def parse_entry(value: Any) -> Entry:
    """Return an entry that another process describes. Raises InputError."""
    if not isinstance(value, list) or len(value) != 6:
        raise InputError(f"An entry has six fields. Received: {value!r:.100}")
    size, modified, copies, lists, blocks, version = value
    if type(modified) not in (int, float) or not math.isfinite(modified):
        raise InputError(f"A time is a number of seconds. Received: {modified!r:.100}")
    entry = Entry(
        check_count("size", size, 0, _MAX_NUMBER),
        float(modified),
        check_count("copies", copies, 1, MAX_COPIES + 1),
        _parse_blocks(lists),
        _parse_blocks(blocks),
        check_count("version", version, 0, _MAX_NUMBER),
    )
    if not lists and size != sum(block.size for block in entry.blocks):
        raise InputError(f"A file has the bytes of its blocks. Received: {size}, and blocks of others")
    return entry


def pack_blocks(blocks: Iterable[Block]) -> bytes:
    """Return the names of blocks as the content of others."""
    return b"".join(
        _PACKED.pack(bytes.fromhex(block.key), block.size, bytes.fromhex(block.checksum[5:]))
        for block in blocks
    )


def unpack_blocks(data: bytes) -> tuple[Block, ...]:
    """Return what `pack_blocks` was given. Raises InputError for anything else."""
    if len(data) % _PACKED.size:
        raise InputError(f"A list of blocks has entries of {_PACKED.size} bytes. Received: {len(data)} bytes")
    found = [
        Block(key.hex(), size, f"xxh3:{digest.hex()}") for key, size, digest in _PACKED.iter_unpack(data)
    ]
    if not all(0 < block.size <= BLOCK_BYTES for block in found):
        raise InputError(f"A block has 1 to {BLOCK_BYTES} bytes. Received: a list with others")
    return tuple(found)


BLOCKS_A_LIST = BLOCK_BYTES // _PACKED.size
"""Blocks that one block can name."""
