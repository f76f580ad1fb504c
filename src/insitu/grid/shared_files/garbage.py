"""Garbage that changes of names leave, until its blocks are removed.

A change notes it in its own transaction, so it is known exactly. Nothing more can come into a folder that was
removed: a change compares the folder's name, which isn't there any more.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from insitu.grid.shared_files.entries import Entry
from insitu.grid.shared_files.name_records import (
    Folder,
    Garbage,
    garbage_prefix,
    names_prefix,
    read_garbage,
    read_name,
)
from insitu.metadata import Delete, MetadataStore, Record

_LISTED = 1000
_AT_ONCE = 90
"""Records that one transaction removes."""


class GarbageList:
    """The notes of a metadata store. Methods raise StoreUnavailable, GridError."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    def list_keys(self) -> list[str]:
        """Return the keys of notes, a thousand at most."""
        return [record.key for record in self._store.range(garbage_prefix(), "", _LISTED)[0]]

    def collect(self, key: str) -> Iterator[tuple[str, Garbage]]:
        """Yield volume and blocks of what a note says, part by part. A part is forgotten once the
        next part is asked for, so it can be begun again."""
        record = self._store.get([key])[0].get(key)
        if record is None:
            return
        volume, garbage = key.removeprefix(garbage_prefix()).partition("/")[0], read_garbage(record)
        yield volume, garbage
        if garbage.folder:
            yield from self._empty(volume, garbage.folder)
        self._delete([record])

    def _empty(self, volume: str, folder: str) -> Iterator[tuple[str, Garbage]]:
        way = [folder]
        while way:
            records = self._read(volume, way[-1], _AT_ONCE)
            names = [read_name(record) for record in records if not record.key.endswith("/")]
            inner = (each.id for each in names if isinstance(each, Folder))
            full = next((each for each in inner if self._read(volume, each, 1)), None)
            if full is not None:
                way.append(full)
                continue
            files = [each for each in names if isinstance(each, Entry)]
            lists, blocks = (block for f in files for block in f.lists), (b for f in files for b in f.blocks)
            yield volume, Garbage("", tuple(lists), tuple(blocks))
            self._delete(records)
            if len(records) < _AT_ONCE:
                way.pop()

    def _read(self, volume: str, folder: str, limit: int) -> list[Record]:
        return self._store.range(names_prefix(volume, folder), "", limit)[0]

    def _delete(self, records: list[Record]) -> None:
        if records:
            self._store.transact([], [Delete(record.key) for record in records], secrets.token_hex(16))
