"""Manifests of files: small blocks on the nodes that hold a file's own, which say what its name is.

Blocks carry no names. If the metadata store is lost, manifests are all that is known of names. A writer puts
one beside the blocks before it publishes them, without a version: `confirmed` is one of a file that the
head's upkeep has found in the metadata store.

A manifest's key is `ENTRY-NAME-STORE`: digests of the file's content and of path and version, and the id of
the metadata store, zeros from a writer. So a list of keys says which manifests agree with a metadata store.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from insitu.base.errors import InputError
from insitu.grid.shared_files.entries import (
    Entry,
    check_count,
    check_path,
    check_volume,
    checksum_block,
    parse_entry,
)

_NO_STORE = "0" * 8
_OF_VOLUME = "0" * 32
_MAX_NUMBER = 1 << 62


@dataclass(frozen=True, slots=True)
class FileManifest:
    """Description of one file on the nodes of its blocks."""

    #: Its volume.
    volume: str
    #: Its path; "": the manifest is of the volume, and says when its manifests were all there, and agreed.
    path: str
    #: The version of the file. Its own version is 0 if a writer hasn't published it yet.
    entry: Entry
    #: The version that a writer has seen in its place; 0: none.
    replaces: int = 0
    #: The id of the metadata store that has it; "": nobody has found it there yet.
    store: str = ""
    #: How often names of insitu:// had been rebuilt in that store, and those before it.
    generation: int = 0
    #: The revision of the metadata store at which it was found there.
    seen: int = 0
    #: How many files the volume had; of a volume alone.
    files: int = 0

    @property
    def is_confirmed(self) -> bool:
        """Whether the metadata store had this file under this name."""
        return bool(self.store)

    @property
    def digest(self) -> str:
        """The digest of what the file is, without its name."""
        return find_digest(self.entry) if self.path else _OF_VOLUME

    @property
    def key(self) -> str:
        """Its key among blocks."""
        name = f"{self.path}\0{self.entry.version}".encode()
        digest = hashlib.blake2b(name, digest_size=8).hexdigest()
        return f"{self.digest}-{digest}-{self.store or _NO_STORE}"

    @property
    def beside(self) -> str:
        """The key of the block on whose nodes it is, so that it is lost only together with that."""
        blocks = (*self.entry.lists, *self.entry.blocks)
        return blocks[0].key if blocks else self.key

    def encode(self) -> bytes:
        """Return it as the bytes of a block."""
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("volume", "path", "replaces", "store", "generation", "seen", "files")
        }
        body = json.dumps({**fields, "entry": self.entry.to_json()}).encode()
        return f"{checksum_block(body)}\n".encode() + body


def parse_manifest(data: bytes) -> FileManifest:
    """Return what a block says. Raises InputError if it is no manifest, or a damaged one."""
    checksum, _, body = data.partition(b"\n")
    if checksum.decode(errors="replace") != checksum_block(body):
        raise InputError("A manifest has the checksum that it names. Received: another one")
    try:
        value = json.loads(body)
        store = value["store"]
        if type(store) is not str or len(store) not in (0, len(_NO_STORE)):
            raise InputError(f"The id of a metadata store has 8 hex digits. Received: {store!r:.100}")
        numbers = {
            name: check_count(name, value[name], 0, _MAX_NUMBER)
            for name in ("replaces", "generation", "seen", "files")
        }
        volume, path = check_volume(value["volume"]), check_path(value["path"])
        return FileManifest(volume, path, parse_entry(value["entry"]), store=store, **numbers)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"A manifest has fields as this version writes them. Received: {error}") from error


def find_digest(entry: Entry) -> str:
    """Return a value that identifies a version of a file, wherever it is moved."""
    text = json.dumps(replace(entry, version=0).to_json())
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def split_key(key: str) -> tuple[str, str]:
    """Return the digest of the file, and the id of the metadata store, of a manifest's key. They are "" for
    the manifest of a volume, and of a writer."""
    digest, _, rest = key.partition("-")
    store = rest.rpartition("-")[2]
    return "" if digest == _OF_VOLUME else digest, "" if store == _NO_STORE else store
