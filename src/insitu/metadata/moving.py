"""Copies all records of a cluster from one metadata store to another, and marks both.

| key | whose | value |
|---|---|---|
| `moving` | a store that is filled, and isn't the truth yet | where its records come from |
| `moved` | a store that isn't the truth any more | where that is |

A copy that was interrupted is begun again: it changes what differs. Leases and revisions are new. Ids of
transactions are copied, too, so that a lost answer is looked up in the new store.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence

from insitu.base.errors import CorruptMetadata, InputError
from insitu.metadata.fencing import HEAD_KEY
from insitu.metadata.interface import Compare, Delete, MetadataStore, Operation, Put, Record

MOVING, MOVED = "moving", "moved"
_MARKS = frozenset({MOVING, MOVED, HEAD_KEY})
_PAGE = 500
_LEASE_SECONDS = 1200.0
"""That of a record which had one: as long as the longest that insitu grants for records which are copied."""
_MOST_OPERATIONS, _MOST_BYTES = 90, 700_000


def read_records(store: MetadataStore) -> dict[str, Record]:
    """Return all records of a store that nobody changes, without marks and the key of a head."""
    found: dict[str, Record] = {}
    last = ""
    while page := store.range("", last, _PAGE)[0]:
        found |= {record.key: record for record in page}
        last = page[-1].key
    return {key: record for key, record in found.items() if key not in _MARKS}


def read_mark(store: MetadataStore, mark: str) -> str | None:
    """Return what a mark says; None: the store hasn't it."""
    found = store.get([mark])[0].get(mark)
    return None if found is None else found.value.decode(errors="replace")


def put_mark(store: MetadataStore, mark: str, text: str) -> None:
    """Mark a store."""
    store.transact([], [Put(mark, text.encode())], secrets.token_hex(16))


def remove_mark(store: MetadataStore, mark: str) -> None:
    """Remove a mark. Nothing is changed if the store hasn't it."""
    if read_mark(store, mark) is not None:
        store.transact([], [Delete(mark)], secrets.token_hex(16))


def require_truth(store: MetadataStore, name: str) -> None:
    """Raise InputError if a store of this name is marked: a head doesn't begin with it."""
    moved, moving = read_mark(store, MOVED), read_mark(store, MOVING)
    if moved is not None:
        raise InputError(
            f"A head begins with the metadata store that has the truth. Received: {name}, which was moved: "
            f"the truth is in {moved}. Use that one's home, or move it back by `insitu repair --metadata`"
        )
    if moving is not None:
        raise InputError(
            f"A head begins with a whole metadata store. Received: {name}, to which {moving} was being moved "
            f"when that was interrupted. Run the same `insitu repair --metadata` again"
        )


def require_target(store: MetadataStore, name: str, origin: str) -> None:
    """Raise InputError unless a store may be filled from `origin`: it is empty, or marked as moved, or as
    filled from there."""
    moving = read_mark(store, MOVING)
    if moving not in (None, origin):
        raise InputError(
            f"Metadata is moved from one place. Received: {origin}, and {name}, to which {moving} was being "
            f"moved when that was interrupted. Run `insitu repair --metadata` there again"
        )
    if read_mark(store, MOVED) is None and moving is None and read_records(store):
        raise InputError(
            f"Metadata is moved to an empty store. Received: {name}, which holds records of this cluster, "
            f"and isn't one that was moved. If they are older, remove them first"
        )


def copy_records(
    records: Mapping[str, Record], store: MetadataStore, origin: str, made: Iterable[str] = ()
) -> None:
    """Give a store exactly these records, by transactions, and read them back. It is marked as filled from
    `origin` before, and knows the ids `made` then. Raises MetadataError, and CorruptMetadata if something
    else is read back."""
    store.transact([], [Put(MOVING, origin.encode()), Delete(MOVED)], secrets.token_hex(16))
    mark = Compare(MOVING, store.get([MOVING])[0][MOVING].revision)
    known = read_records(store)
    leased = any(record.lease for record in records.values())
    lease = store.grant(_LEASE_SECONDS) if leased else 0
    changes: list[Operation] = [Delete(key) for key in known if key not in records]
    for key, record in records.items():
        before = known.get(key)
        if before is None or (before.value, before.lease > 0) != (record.value, record.lease > 0):
            changes.append(Put(key, record.value, lease if record.lease else 0))
    steps = [(secrets.token_hex(16), batch) for batch in _cut(changes)]
    # An id has a revision of its own, so it is no version of a file.
    for id, batch in [*steps, *((id, list[Operation]()) for id in made)]:
        if not store.transact([mark], batch, id).succeeded:
            raise CorruptMetadata(
                f"One command moves metadata. Received: another one that moves {origin}, too. Run one again"
            )
    found = read_records(store)
    wrong = sorted(key for key in records.keys() | found.keys() if _value(records, key) != _value(found, key))
    if wrong:
        raise CorruptMetadata(
            f"What is moved is read back. Received: another value for {', '.join(wrong[:5])}, of "
            f"{len(wrong)} in all. The truth is where it was. Look at the disks of the new store, and try "
            f"again"
        )


def _value(records: Mapping[str, Record], key: str) -> bytes | None:
    return records[key].value if key in records else None


def _cut(changes: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Yield the changes in transactions that both stores take."""
    batch: list[Operation] = []
    size = 0
    for each in changes:
        length = len(each.key.encode()) + (len(each.value) if isinstance(each, Put) else 0)
        if batch and (len(batch) >= _MOST_OPERATIONS or size + length > _MOST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += length
    if batch:
        yield batch
