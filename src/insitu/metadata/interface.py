"""The interface of a metadata store: keys with revisions, transactions with comparisons, watches, leases.

It is what etcd offers (https://etcd.io/docs/v3.5/learning/api/), cut down to what insitu needs.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from insitu.base.errors import InputError

MAX_VALUE_BYTES = 512 * 1024
"""A value's bytes at most. etcd takes requests of 1.5 MiB."""
MAX_KEY_BYTES = 4096
"""A key's bytes in UTF-8 at most."""
MAX_TRANSACTION_BYTES = 1024 * 1024
"""Bytes of keys and values of one transaction at most. Compared keys count twice, as they may come back."""
IDLE_SECONDS = 2.0
"""After how long a watch says that nothing has changed."""
MAX_OPERATIONS = 100
"""Comparisons, and operations, of one transaction at most. etcd takes 128 unless configured otherwise."""


@dataclass(frozen=True, slots=True)
class Record:
    """A key with its value."""

    #: The key.
    key: str
    #: Its value.
    value: bytes
    #: The revision of the store at which the key was written last.
    revision: int
    #: The id of the lease with which the key goes; 0: it stays.
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction: the key was written last at a revision, has a value, or isn't there.

    A store that was restored from a copy gives revisions again, to other changes. If that matters, compare a
    value that nobody writes twice.
    """

    #: The key.
    key: str
    #: The revision; 0: there must be no such key.
    revision: int = 0
    #: The value; None: the revision counts.
    value: bytes | None = None

    def holds(self, record: Record | None) -> bool:
        """Return whether the condition holds for what the key is; None: it isn't there."""
        if self.value is not None:
            return record is not None and record.value == self.value
        return self.revision == (0 if record is None else record.revision)


def compare_found(keys: Iterable[str], found: Mapping[str, Record | None]) -> list[Compare]:
    """Return the conditions that some keys are still as they were found; None, or no record: not there."""
    records = ((key, found.get(key)) for key in keys)
    return [Compare(key, 0 if record is None else record.revision) for key, record in records]


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key."""

    #: The key.
    key: str
    #: Its new value.
    value: bytes
    #: The id of a lease that is alive; 0: none.
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key. A key that isn't there is no error."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a transaction."""

    #: True: all comparisons held, and all operations are done. False: nothing was changed.
    succeeded: bool
    #: The revision of the store: that of the change, or that at which a comparison failed.
    revision: int
    #: If a comparison failed: what the compared keys are now, without those that aren't there.
    found: tuple[Record, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """One key that has changed."""

    #: The key.
    key: str
    #: The revision of the change.
    revision: int
    #: Its new value; None: the key was removed.
    value: bytes | None


class MetadataStore(Protocol):
    """All truth of a cluster. For several threads.

    Reads are linearizable. Every call raises StoreUnavailable if no answer comes within its deadline, or that
    of `end_calls_by`: a transaction may have been made then, and asking again with its id says so.
    """

    def get(self, keys: Sequence[str]) -> tuple[dict[str, Record], int]:
        """Return the records of keys that are there, all as they were at one revision, and that revision."""

    def range(self, prefix: str, after: str = "", limit: int = 1000) -> tuple[list[Record], int]:
        """Return up to `limit` records whose keys begin with `prefix` and come after the key `after`, in the
        order of their UTF-8 bytes, and the revision of the store at which they were read."""

    def transact(self, compare: Sequence[Compare], operations: Sequence[Operation], id: str) -> Outcome:
        """Make a change if all comparisons hold; it is whole and on disk before this returns.

        `id` was made by the caller (16 random bytes as hexadecimal digits). A transaction of this id that
        succeeded within the last ten minutes isn't made again: its outcome is returned. One that was answered
        with False is never made later, and may be tried again with the same id.

        Each key has one operation at most. Raises LeaseEnded if a key was to go with a lease that isn't
        alive, StorageFull if the store has no room; nothing is changed then.
        """

    def list_made(self) -> list[str]:
        """Return the ids of transactions that succeeded, of those that the store knows."""

    def watch(self, prefix: str, revision: int) -> Iterator[list[Change]]:
        """Yield the changes of keys that begin with `prefix`, those of one revision together, in order, from
        `revision` (exclusive). An empty list says that nothing has changed for some seconds.

        Raises RevisionCompacted if the store doesn't remember so far back: read all again.
        """

    def grant(self, seconds: float) -> int:
        """Return the id of a new lease, which ends `seconds` after it was kept last. Its keys end with it."""

    def keep(self, lease: int) -> bool:
        """Keep a lease. Return False if it has ended."""

    def revoke(self, lease: int) -> None:
        """End a lease, and remove its keys."""

    def close(self) -> None:
        """Close connections. Leases remain until their time is over."""


# A caller that is waited for itself gives its calls less time


_ENDS_AT: ContextVar[float] = ContextVar("ends_at", default=math.inf)


@contextlib.contextmanager
def end_calls_by(deadline: float) -> Iterator[None]:
    """Have calls of this thread end at `deadline`, of time.monotonic, if their own isn't earlier."""
    before = _ENDS_AT.set(min(deadline, _ENDS_AT.get()))
    try:
        yield
    finally:
        _ENDS_AT.reset(before)


def find_deadline(seconds: float) -> float:
    """Return when a call ends that may take `seconds`, on time.monotonic: see `end_calls_by`."""
    return min(time.monotonic() + seconds, _ENDS_AT.get())


# Both stores refuse before they begin: keys, values and transactions beyond the limits


_MAX_LEASE_SECONDS = 86_400.0


def encode_text(text: str) -> bytes:
    """Return a key, or the beginning of one, as UTF-8. Raises InputError."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"A key of metadata is text that UTF-8 has. Received: {text!a}") from error


def encode_key(key: str) -> bytes:
    """Return a whole key as UTF-8. Raises InputError."""
    data = encode_text(key)
    if not 0 < len(data) <= MAX_KEY_BYTES:
        raise InputError(
            f"A key of metadata has 1 to {MAX_KEY_BYTES} bytes. Received: {len(data)} ({key[:60]!r})"
        )
    return data


def find_end(prefix: bytes) -> bytes:
    """Return the first bytes after all that begin with `prefix`, which is UTF-8 and so has no byte 255. All
    keys begin with the empty one."""
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b"\xff"


def check_transaction(compare: Sequence[Compare], operations: Sequence[Operation], id: str) -> None:
    """Raise InputError if a transaction breaks a limit of the interface."""
    if not re.fullmatch("[0-9a-f]{32}", id):
        raise InputError(f"A transaction's id is 32 hexadecimal digits. Received: {id!r}")
    for what, count in (("comparisons", len(compare)), ("operations", len(operations))):
        if count > MAX_OPERATIONS:
            raise InputError(
                f"A transaction has up to {MAX_OPERATIONS} {what}. Received: {count}. Make several of it"
            )
    compared, changed = [encode_key(each.key) for each in compare], [encode_key(o.key) for o in operations]
    if len(set(compared)) < len(compared) or len(set(changed)) < len(changed):
        raise InputError(
            "A transaction compares each key once, and changes each key once. Received: a key twice, of "
            + ", ".join(sorted({each.key[:60] for each in (*compare, *operations)})[:10])
        )
    values = [(each.key, len(each.value)) for each in operations if isinstance(each, Put)]
    for key, size in values:
        if size > MAX_VALUE_BYTES:
            raise InputError(
                f"A value of metadata has up to {MAX_VALUE_BYTES} bytes. Received: {size} for {key}. Keep it "
                f"in a file, and its name here"
            )
    total = 2 * sum(map(len, compared)) + sum(map(len, changed)) + sum(size for _, size in values)
    total += sum(len(each.value) for each in compare if each.value is not None)
    if total > MAX_TRANSACTION_BYTES:
        raise InputError(
            f"A transaction has up to {MAX_TRANSACTION_BYTES} bytes in all. Received: {total}. Make several "
            f"of it"
        )


def check_lease_seconds(seconds: float) -> None:
    """Raise InputError if a lease can't have this length."""
    if not (math.isfinite(seconds) and 0 < seconds <= _MAX_LEASE_SECONDS):
        raise InputError(
            f"A lease lasts more than 0 and up to {_MAX_LEASE_SECONDS:.0f} seconds. Received: {seconds}"
        )


def check_limit(limit: int) -> None:
    """Raise InputError if `limit` isn't a number of records."""
    if limit < 1:
        raise InputError(f"A range has a limit of at least 1 record. Received: {limit}")
