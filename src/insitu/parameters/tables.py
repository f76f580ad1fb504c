"""Sparse tables: rows by int64 key, created when a key is first used, updated row by row.

A row's first value is a pure function of (seed, table, key). So it depends neither on the order in which keys
come nor on the number of servers, and a row that was evicted starts from it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import InputError, ParameterError
from insitu.parameters import native
from insitu.parameters.copy_on_write import SavedRowIndex, TableSnapshot
from insitu.parameters.growable_array import GrowableArray
from insitu.parameters.rules import Initializer, as_dtype, mix64
from insitu.parameters.updaters import ElementwiseUpdater, Updater, make_updater, set_learning_rate

Array = NDArray[Any]
_BLOCK_BYTES = 1 << 17
"""Bytes of the rows that are updated at a time, so that they stay in the cache."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """When rows of a table are removed. Raises InputError for bad values."""

    #: A row goes that had no gradient for so many updates of the table; None: no row goes for its age.
    max_age: int | None = None
    #: A row with so many gradients or more doesn't go for its age; 0: any may.
    min_count: int = 0
    #: Most rows on each server: those that had a gradient longest ago go; None: any number.
    max_rows: int | None = None
    #: Updates of the table from one eviction to the next.
    every: int = 1000

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | np.integer) and not (value is None and name.startswith("max")):
                raise InputError(f"An eviction's {name} must be a whole number. Received: {value!r}")
        for name in ("max_age", "max_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"An eviction's {name} must be at least 1, or None. Received: {value}")
        if self.every < 1 or self.min_count < 0:
            raise InputError(
                f"An eviction's every must be at least 1 and min_count at least 0. Received: {self}"
            )


@dataclass(frozen=True, slots=True)
class Table:
    """The definition of a table. Raises InputError for bad values."""

    #: Unique among the tables of a job; 1 to 1000 characters.
    name: str
    #: Elements of a row.
    width: int
    #: float32, float64 or float16.
    dtype: str = "float32"
    #: Config of an `Initializer`.
    initializer: Mapping[str, Any] | str = "uniform"
    #: Config for `make_updater`.
    updater: Mapping[str, Any] | str = "sgd"
    #: Seed of the first values.
    seed: int = 0
    #: When rows are removed; None: never.
    eviction: Eviction | None = None

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 1000:
            raise InputError(f"A table's name has 1 to 1000 characters. Received: {self.name[:50]!r}")
        if not 1 <= self.width <= 1 << 20:
            raise InputError(f"A table's rows have 1 to {1 << 20} elements. Received: {self.width}")
        if as_dtype(self.dtype).kind != "f":
            raise InputError(f"A table is of float32, float64 or float16. Received: {self.dtype}")
        Initializer(self.initializer, self.seed, self.name)
        make_updater(self.updater)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Table:
        """Return the table that `to_json` described. Raises InputError, TypeError."""
        eviction = data.get("eviction")
        return cls(**{**data, "eviction": None if eviction is None else Eviction(**eviction)})


class RowStore:
    """The rows of one table on one server."""

    def __init__(self, table: Table, *, updater: Updater | None = None, limit: int | None = None) -> None:
        """`limit`: most bytes of each array (None: the machine's memory)."""
        #: The definition.
        self.table = table
        #: The number of each key's row.
        self.index = HashIndex(limit)
        #: Updates of this table on this server.
        self.updates = 0
        #: Rows evicted so far.
        self.evicted = 0
        self._limit = limit
        #: The snapshot that is being read; rows are saved to it before they change.
        self._snapshot: TableSnapshot | None = None
        #: Kept from one snapshot to the next, with its memory.
        self._saved_rows: SavedRowIndex | None = None
        self._dtype = as_dtype(table.dtype)
        self._initializer = Initializer(table.initializer, table.seed, table.name)
        self._updater = updater or make_updater(table.updater)
        self._values = GrowableArray((table.width,), self._dtype, limit=limit)
        self._initial_slots = self._updater.row_slots()
        self._slots = {
            slot: GrowableArray((table.width,), self._dtype, limit=limit) for slot in self._initial_slots
        }
        #: How often, and at which update, each row last had a gradient; None without eviction.
        tracks_use = table.eviction is not None
        self._use_counts = GrowableArray((), np.dtype(np.uint32), limit=limit) if tracks_use else None
        self._last_used = GrowableArray((), np.dtype(np.int64), limit=limit) if tracks_use else None
        self._block = max(1, _BLOCK_BYTES // (table.width * self._dtype.itemsize))

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Bytes in use by rows, slots, keys, the index, and what evictions need."""
        row = self._values.array[:1].nbytes * (1 + len(self._slots))
        return self.index.nbytes + len(self) * (row + (12 if self._use_counts is not None else 0))

    def set_learning_rate(self, rate: float) -> None:
        """Continue with another learning rate. The slots stay."""
        set_learning_rate(self._updater, rate)

    def set_updater(self, updater: Updater) -> None:
        """Replace the updater by one of other settings. Raises InputError if it has other slots."""
        if updater.row_slots().keys() != self._initial_slots.keys():
            raise InputError(
                f"An updater of table {self.table.name!r} must have the slots {sorted(self._initial_slots)}. "
                f"Received one with: {sorted(updater.row_slots())}. Change its settings, not its kind"
            )
        self._updater = updater

    def pull(self, keys: Keys, out: Array, *, create: bool = True) -> None:
        """Write the rows of `keys`, int64[n], to `out`, [n, width].

        A key without a row gets one, unless `create` is False: then its first values are written and nothing
        is kept.
        """
        found, missing = self.index.find_with_missing(keys)
        if missing.size and create:
            self._create(keys, found, missing)
        native.take(self._values.array, found, out)
        if missing.size and not create:
            first = np.empty((missing.size, self.table.width), self._dtype)
            self._initializer.fill(keys[missing], first)
            out[missing] = first

    def push(self, keys: Keys, gradients: Array) -> None:
        """Make one update from `gradients`, [n, width], for `keys`, int64[n].

        Those of equal keys are added up first, in the order given.
        """
        if len(keys) > 1 and not bool((keys[1:] > keys[:-1]).all()):
            keys, gradients = sum_duplicates(keys, gradients)
        found, missing = self.index.find_with_missing(keys)
        if missing.size:
            self._create(keys, found, missing)
        self._save_rows(found)
        self._update(found, gradients)
        self.updates += 1
        self._record_use(found)

    def _update(self, found: NDArray[np.int32], gradients: Array) -> None:
        values, updater = self._values.array, self._updater
        if isinstance(updater, ElementwiseUpdater) and updater.update_rows_compiled(
            values, found, gradients, self.updates
        ):
            return
        slots = {name: slot.array for name, slot in self._slots.items()}
        updated = np.empty((min(len(found), self._block), *values.shape[1:]), values.dtype)
        state = {name: np.empty_like(updated) for name in slots}
        for low in range(0, len(found), self._block):
            rows = found[low : low + self._block]
            part = {name: array[: len(rows)] for name, array in state.items()}
            native.take(values, rows, updated[: len(rows)])
            for name, slot in slots.items():
                native.take(slot, rows, part[name])
            updater.update_rows(updated[: len(rows)], gradients[low : low + len(rows)], part, self.updates)
            native.put(values, rows, updated[: len(rows)])
            for name, slot in slots.items():
                native.put(slot, rows, part[name])

    def _create(self, keys: Keys, found: NDArray[np.int32], missing: NDArray[np.intp]) -> None:
        """Create rows for keys[missing], and write their numbers to `found`."""
        new, which = find_distinct(keys[missing])
        first = len(self.index)
        # If rows were evicted, the new ones overwrite memory that a snapshot may still read.
        self._save_rows(np.arange(first, first + len(new), dtype=np.int32))
        self._extend(len(new))
        self._initializer.fill(new, self._values.array[first : first + len(new)])
        for name, slot in self._slots.items():
            slot.array[first : first + len(new)] = self._initial_slots[name]
        found[missing] = self.index.add(new)[which]

    def _extend(self, count: int) -> None:
        first = self._values.extend(count)
        for slot in self._slots.values():
            slot.extend(count)
        if self._use_counts is not None and self._last_used is not None:
            self._use_counts.extend(count)
            self._last_used.extend(count)
            self._use_counts.array[first : first + count] = 0
            self._last_used.array[first : first + count] = self.updates

    # Eviction

    def _record_use(self, found: NDArray[np.int32]) -> None:
        eviction = self.table.eviction
        if eviction is None or self._use_counts is None or self._last_used is None:
            return
        self._use_counts.array[found] += np.uint32(1)
        self._last_used.array[found] = self.updates
        if self.updates % eviction.every == 0:
            self._evict(eviction, self._use_counts.array[: len(self)], self._last_used.array[: len(self)])

    def _evict(self, eviction: Eviction, use_counts: Array, last_used: Array) -> None:
        keep = np.ones(len(self), np.bool_)
        if eviction.max_age is not None:
            keep = self.updates - last_used < eviction.max_age
            if eviction.min_count:
                keep |= use_counts >= eviction.min_count
        if eviction.max_rows is not None and int(keep.sum()) > eviction.max_rows:
            kept = np.flatnonzero(keep)
            # Ties are broken by key, so that the order in which rows came doesn't matter.
            order = np.lexsort((self.index.keys.array[: len(self)][kept], last_used[kept]))
            keep[kept[order[: len(kept) - eviction.max_rows]]] = False
        self._compact(keep)

    def _compact(self, keep: NDArray[np.bool_]) -> None:
        """Move the last rows that stay into the places of those that go."""
        left = int(keep.sum())
        if left == len(keep):
            return
        self.evicted += len(keep) - left
        holes = np.flatnonzero(~keep[:left])
        movers = np.flatnonzero(keep[left:]) + left
        self._save_rows(holes)
        for growable in self._list_arrays():
            growable.array[holes] = growable.array[movers]
            growable.truncate(left)
        self.index.rebuild()

    def _list_arrays(self) -> list[GrowableArray]:
        use = [g for g in (self._use_counts, self._last_used) if g is not None]
        return [self.index.keys, self._values, *self._slots.values(), *use]

    # Copies

    def arrays(self) -> dict[str, Array]:
        """Return all of the table by kind: keys, values, slots. Views, valid until the table changes."""
        count = len(self)
        named = {"keys": self.index.keys, "values": self._values}
        named |= {f"slot:{name}": slot for name, slot in self._slots.items()}
        if self._use_counts is not None and self._last_used is not None:
            named |= {"counts": self._use_counts, "touched": self._last_used}
        return {name: growable.array[:count] for name, growable in named.items()}

    def begin_snapshot(self) -> TableSnapshot:
        """Return all rows as they are now, to be read while the table changes, until `end_snapshot`. One at a
        time."""
        self._saved_rows = self._saved_rows or SavedRowIndex(self._limit)
        self._snapshot = TableSnapshot(self.arrays(), self._saved_rows, self._limit)
        return self._snapshot

    def end_snapshot(self) -> None:
        """Stop saving rows that change. The snapshot can't be read any more."""
        self._snapshot = None

    def _save_rows(self, numbers: NDArray[Any]) -> None:
        """Save rows that are about to change, if a snapshot is being read."""
        if self._snapshot is not None:
            self._snapshot.save(numbers)

    def load(self, arrays: Mapping[str, Array], *, updates: int | None = None) -> None:
        """Set rows, in place of those of the same keys. New rows get fresh slots if none are given.

        `arrays` as `arrays()` returns them; "keys", distinct, and "values" must be there. `updates` sets the
        count of updates.
        """
        keys = np.ascontiguousarray(arrays["keys"], np.int64)
        found, missing = self.index.find_with_missing(keys)
        if missing.size:
            self._create(keys, found, missing)
        self._save_rows(found)
        for name, target in self.arrays().items():
            if name != "keys" and name in arrays:
                target[found] = arrays[name]
        if updates is not None:
            self.updates = updates


def sum_duplicates(keys: Keys, gradients: Array) -> tuple[Keys, Array]:
    """Return (distinct keys ascending, the sum of each one's gradients in the order given)."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(keys) else order
    if not len(keys):
        return ordered, gradients
    return ordered[starts], np.add.reduceat(gradients[order], starts, axis=0)


# Finds the row of each key: a hash table with linear probing, which looks up many keys at a time.
#
# The buckets hold 32-bit row numbers only. The keys are stored by row in an array of their own, which a table
# needs anyway. A quarter to a half of the buckets is in use, so each row costs 8 to 16 bytes


Keys = NDArray[np.int64]
RowNumbers = NDArray[np.int32]

_EMPTY = -1
_NO_ROWS = np.empty(0, np.intp)
_MIN_BUCKETS = 1 << 10
_MAX_LOAD = 0.5
"""Most of the buckets that may be in use."""
MAX_ROWS = 2**31 - 2


class HashIndex:
    """Gives each key, int64, the number of its row, from 0 in the order in which keys were added."""

    def __init__(self, limit: int | None = None) -> None:
        #: The key of each row.
        self.keys = GrowableArray((), np.dtype(np.int64), limit=limit)
        #: Row numbers, _EMPTY if there is none; a power of two of them.
        self._buckets: RowNumbers = np.full(_MIN_BUCKETS, _EMPTY, np.int32)

    def __len__(self) -> int:
        return self.keys.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the buckets and the keys."""
        return int(self._buckets.nbytes) + 8 * len(self)

    def find(self, keys: Keys) -> RowNumbers:
        """Return the rows of `keys`, int64[n]; -1 for each key that isn't there."""
        return self.find_with_missing(keys)[0]

    def find_with_missing(self, keys: Keys) -> tuple[RowNumbers, NDArray[np.intp]]:
        """Return (the result of `find`; the indices of `keys` that aren't there)."""
        found = np.empty(len(keys), np.int32)
        missing = native.find(keys, self._buckets, self.keys.array, found)
        return found, _NO_ROWS if missing == 0 else np.flatnonzero(found < 0)

    def _hash_to_buckets(self, keys: Keys) -> NDArray[np.int64]:
        words = mix64(keys.view(np.uint64))
        words &= np.uint64(len(self._buckets) - 1)
        return words.view(np.int64)

    def add(self, keys: Keys) -> RowNumbers:
        """Add `keys`, distinct and not there yet. Return their rows, ascending. Raises ParameterError."""
        if len(self) + len(keys) > MAX_ROWS:
            raise ParameterError(
                f"A table holds at most {MAX_ROWS:,} rows on one server. Received: "
                f"{len(self) + len(keys):,}. Use more servers (--ps), or let rows be evicted"
            )
        first = self.keys.extend(len(keys))
        self.keys.array[first : first + len(keys)] = keys
        rows = np.arange(first, first + len(keys), dtype=np.int32)
        if len(self) > _MAX_LOAD * len(self._buckets):
            self.rebuild()
        else:
            self._insert(keys, rows)
        return rows

    def rebuild(self) -> None:
        """Fill new buckets from the keys, as many as leave them a quarter full or less."""
        size = _MIN_BUCKETS
        while len(self) > 0.5 * _MAX_LOAD * size:
            size *= 2
        self._buckets = np.full(size, _EMPTY, np.int32)
        step = 1 << 20
        for low in range(0, len(self), step):
            high = min(len(self), low + step)
            self._insert(self.keys.array[low:high], np.arange(low, high, dtype=np.int32))

    def _insert(self, keys: Keys, rows: RowNumbers) -> None:
        table, mask = self._buckets, len(self._buckets) - 1
        buckets = self._hash_to_buckets(keys)
        while rows.size:
            free = table[buckets] == _EMPTY
            # Among several rows for one bucket the last is written; the others then see that it isn't theirs.
            table[buckets[free]] = rows[free]
            left = table[buckets] != rows
            buckets, rows = (buckets[left] + 1) & mask, rows[left]


def find_distinct(keys: Any) -> tuple[Keys, NDArray[np.intp]]:
    """Return (distinct keys ascending; for each key, its index among these)."""
    found, inverse = np.unique(keys, return_inverse=True)
    return found, inverse.reshape(-1)
