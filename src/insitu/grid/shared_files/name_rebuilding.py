"""Puts names back into a metadata store that has none, and knows whether that is due.

| key | value |
|---|---|
| `files/origin` | which metadata store this is; it is made once nothing of another one is to be put back |
| `files/rebuilding` | what the ids of folders begin with that are being put back |
| `earlier/files` | nothing; the cluster has had a store before, so nodes that come later may hold its files |

Manifests on nodes carry the id of the metadata store that has their files. So a file of a lost store isn't
taken for one that was removed.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from insitu.base.errors import GridError
from insitu.grid.shared_files.entries import Entry
from insitu.grid.shared_files.name_records import (
    VOLUMES,
    Folder,
    encode_file,
    make_folder_id,
    name_key,
    read_name,
    volume_key,
)
from insitu.metadata import Compare, Delete, MetadataStore, Operation, Put, Record, compare_found

ORIGIN, REBUILDING, _EARLIER = "files/origin", "files/rebuilding", "earlier/files"
_AT_ONCE = 60
"""Operations of one transaction."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Which metadata store it is whose names these are."""

    #: Its id, 8 hex digits.
    id: str
    #: One more than that of the store whose names were put back, or moved; a store that began empty has 1.
    generation: int = 1
    #: Whether somebody has said that files of other stores, which are on nodes, aren't needed.
    forgets: bool = False
    #: Whether no node may have other files than those that were put back, of which this store doesn't know.
    is_whole: bool = True

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class NamesState:
    """The content of a metadata store."""

    #: Which store it is; None: that isn't decided yet.
    origin: Origin | None
    #: Whether it has names.
    has_names: bool
    #: Whether names are being put back, or were until that was interrupted.
    is_rebuilding: bool


def read_state(store: MetadataStore) -> NamesState:
    """Return what a metadata store holds. Raises StoreUnavailable, GridError."""
    found, _ = store.get([ORIGIN, REBUILDING])
    has_names = bool(store.range(VOLUMES, "", 1)[0])
    return NamesState(_parse_origin(found.get(ORIGIN)), has_names, REBUILDING in found)


def advance_generation(records: Mapping[str, Record]) -> dict[str, Record]:
    """Return records for another metadata store, whose revisions begin at 1: manifests of its files count for
    more than the earlier ones. Raises GridError."""
    origin = _parse_origin(records.get(ORIGIN))
    if origin is None:
        return dict(records)
    moved = replace(origin, generation=origin.generation + 1)
    return {**records, ORIGIN: Record(ORIGIN, moved.encode(), 0)}


def _parse_origin(record: Record | None) -> Origin | None:
    if record is None:
        return None
    try:
        value = json.loads(record.value)
        generation = int(value["generation"])
        is_whole = bool(value.get("is_whole", generation == 1))
        return Origin(str(value["id"]), generation, bool(value["forgets"]), is_whole)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GridError(
            f"{ORIGIN} says which metadata store it is. Received: {record.value!r:.200}"
        ) from error


def make_origin(store: MetadataStore) -> None:
    """Note that nothing remains to be put back of another metadata store. Nothing is done if names are."""
    compare = [Compare(ORIGIN, 0), Compare(REBUILDING, 0)]
    origin = Origin(secrets.token_hex(4), is_whole=_EARLIER not in store.get([_EARLIER])[0])
    store.transact(compare, [Put(ORIGIN, origin.encode())], secrets.token_hex(16))


def record_earlier(store: MetadataStore) -> None:
    """Note in a new store that the cluster has had another one."""
    store.transact([], [Put(_EARLIER, b"")], secrets.token_hex(16))


def forget_others(store: MetadataStore, generation: int) -> None:
    """Note that files of other metadata stores aren't needed. `generation`: the highest of these."""
    found, _ = store.get([ORIGIN, REBUILDING])
    known = _parse_origin(found.get(ORIGIN)) or Origin(secrets.token_hex(4), generation + 1)
    compare = compare_found((ORIGIN, REBUILDING), found)
    put = Put(ORIGIN, Origin(known.id, known.generation, forgets=True).encode())
    if REBUILDING in found or not store.transact(compare, [put], secrets.token_hex(16)).succeeded:
        raise GridError("Names are being put back by another process. Wait for its end")


def rebuild_names(
    store: MetadataStore, files: Mapping[str, Mapping[str, Entry]], generation: int, *, is_whole: bool = False
) -> None:
    """Put names, by volume and path, into a metadata store that has none. `generation` is the highest of
    their manifests. Unless `is_whole`, nodes may have other files, whose blocks stay. If this is interrupted,
    nobody sees any of the names, and it may be done again.

    Raises GridError if the store has names, StoreUnavailable.
    """
    found, _ = store.get([ORIGIN, REBUILDING])
    if REBUILDING in found:
        _remove(store, found[REBUILDING].value.decode())
    _check(not store.range(VOLUMES, "", 1)[0])
    own = secrets.token_hex(8)
    compare = compare_found((ORIGIN, REBUILDING), found)
    begun = store.transact(compare, [Put(REBUILDING, own.encode())], secrets.token_hex(16))
    _check(begun.succeeded)
    roots = {volume: Folder(_make_id(own), time.time()) for volume in files}
    _write(store, (put for v, paths in files.items() for put in _encode(v, own, roots[v], paths)))
    origin = Origin(secrets.token_hex(4), generation + 1, is_whole=is_whole)
    if not _finish(store, roots, Compare(REBUILDING, begun.revision), origin):
        _remove(store, own)
        store.transact([Compare(REBUILDING, begun.revision)], [Delete(REBUILDING)], secrets.token_hex(16))
        _check(False)


def _finish(store: MetadataStore, roots: Mapping[str, Folder], is_ours: Compare, origin: Origin) -> bool:
    """Have all names seen. Return whether nobody else has written names of these volumes meanwhile."""
    puts = [Put(volume_key(volume), root.encode()) for volume, root in roots.items()]
    end: list[Operation] = [Delete(REBUILDING), Put(ORIGIN, origin.encode())]
    for start in range(0, max(1, len(puts)), _AT_ONCE):
        part = puts[start : start + _AT_ONCE]
        compare = [is_ours, *(Compare(put.key, 0) for put in part)]
        operations = [*part, *(end if start + _AT_ONCE >= len(puts) else [])]
        if not store.transact(compare, operations, secrets.token_hex(16)).succeeded:
            return False
    return True


def _check(is_empty: bool) -> None:
    if not is_empty:
        raise GridError(
            "Names are put back into a metadata store that has none. Received: one in which another process "
            "has put names meanwhile. `insitu repair` compares it with what is on nodes"
        )


def _make_id(own: str) -> str:
    """Return the id of a folder, which says that it was put back by `own`."""
    return own + make_folder_id()[len(own) :]


def _remove(store: MetadataStore, own: str) -> None:
    """Remove the names that one rebuilding has written."""
    for prefix in (VOLUMES, "files/names/"):
        after = ""
        while records := store.range(prefix, after, _AT_ONCE)[0]:
            after = records[-1].key
            if removed := [Delete(record.key) for record in records if _is_of(record, own)]:
                store.transact([], removed, secrets.token_hex(16))


def _is_of(record: Record, own: str) -> bool:
    if not record.key.startswith(VOLUMES):
        return record.key.split("/")[3].startswith(own)
    root = read_name(record)
    return isinstance(root, Folder) and root.id.startswith(own)


def _encode(volume: str, own: str, root: Folder, paths: Mapping[str, Entry]) -> Iterable[Operation]:
    folders = {"": root.id}
    for path, entry in sorted(paths.items()):
        *names, name = path.split("/")
        parent = ""
        for each in names:
            folder = f"{parent}/{each}".lstrip("/")
            if folder not in folders:
                made = Folder(_make_id(own), entry.modified)
                yield Put(name_key(volume, folders[parent], each), made.encode())
                folders[folder] = made.id
            parent = folder
        yield Put(name_key(volume, folders[parent], name), encode_file(entry))


def _write(store: MetadataStore, operations: Iterable[Operation]) -> None:
    batch: list[Operation] = []
    for each in operations:
        batch.append(each)
        if len(batch) == _AT_ONCE:
            store.transact([], batch, secrets.token_hex(16))
            batch = []
    if batch:
        store.transact([], batch, secrets.token_hex(16))
