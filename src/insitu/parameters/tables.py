"""A sparse table: rows by int64 key, made when a key is first used, updated row by row.

A row's first value is a pure function of (seed, table, key), so neither the order in which keys come nor the
number of servers matters. A row that is evicted starts over from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import InputError
from insitu.parameters import native
from insitu.parameters.copy_on_write import SavedRowIndex, TableSnapshot
from insitu.parameters.growable_array import GrowableArray
from insitu.parameters.hashing import Initializer
from insitu.parameters.key_index import KeyIndex, Keys, distinct
from insitu.parameters.sharding_plan import as_dtype
from insitu.parameters.updaters import ElementwiseUpdater, Updater, make_updater

Array = NDArray[Any]
_BLOCK_BYTES = 1 << 17
"""Bytes of the rows that are updated at a time."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Which rows go. Looked at after every `every` updates of the table.

    A row goes that had no gradient for `max_age` updates and fewer than `min_count` in all (0: however
    many). With `max_rows`, of those left the ones that had a gradient longest ago go until so many are left
    on each server.
    """

    max_age: int | None = None
    min_count: int = 0
    max_rows: int | None = None
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
    """What a table is. `width` elements a row; see `Initializer` and `make_updater` for the configs."""

    name: str
    width: int
    dtype: str = "float32"
    initializer: Mapping[str, Any] | str = "uniform"
    updater: Mapping[str, Any] | str = "sgd"
    seed: int = 0
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
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Table:
        eviction = data.get("eviction")
        return cls(**{**data, "eviction": None if eviction is None else Eviction(**eviction)})


class RowStore:
    """The rows of one table that one server holds."""

    def __init__(self, table: Table, *, updater: Updater | None = None, limit: int | None = None) -> None:
        """`limit` bytes may be used at most by each array (None: the machine's memory)."""
        self.table = table
        self.index = KeyIndex(limit)
        self.updates = 0
        """Updates of this table here."""
        self.evicted = 0
        """Rows evicted so far."""
        self._limit = limit
        self._moment: TableSnapshot | None = None
        self._notes: SavedRowIndex | None = None
        self._dtype = as_dtype(table.dtype)
        self._initializer = Initializer(table.initializer, table.seed, table.name)
        self._updater = updater or make_updater(table.updater)
        self._values = GrowableArray((table.width,), self._dtype, limit=limit)
        self._first = self._updater.row_slots()
        self._slots = {slot: GrowableArray((table.width,), self._dtype, limit=limit) for slot in self._first}
        counted = table.eviction is not None
        self._counts = GrowableArray((), np.dtype(np.uint32), limit=limit) if counted else None
        self._touched = GrowableArray((), np.dtype(np.int64), limit=limit) if counted else None
        self._block = max(1, _BLOCK_BYTES // (table.width * self._dtype.itemsize))

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Bytes in use, by rows, slots, keys, the index, and the account for evictions."""
        row = self._values.array[:1].nbytes * (1 + len(self._slots))
        return self.index.nbytes + len(self) * (row + (12 if self._counts is not None else 0))

    def adjust(self, updater: Updater) -> None:
        """Goes on with an updater of other settings. Raises InputError where its slots are others."""
        if updater.row_slots().keys() != self._first.keys():
            raise InputError(
                f"Table {self.table.name!r} has the slots {sorted(self._first)}; an updater with others "
                f"can't go on with them. Received one with: {sorted(updater.row_slots())}"
            )
        self._updater = updater

    def pull(self, keys: Keys, out: Array, *, create: bool = True) -> None:
        """Writes the rows of `keys`, int64[n], to `out`, [n, width]. Unknown keys get rows where `create`;
        otherwise their first values are written and nothing is kept."""
        found, missing = self.index.look_up(keys)
        if missing.size and create:
            self._create(keys, found, missing)
        native.take(self._values.array, found, out)
        if missing.size and not create:
            first = np.empty((missing.size, self.table.width), self._dtype)
            self._initializer.fill(keys[missing], first)
            out[missing] = first

    def push(self, keys: Keys, gradients: Array) -> None:
        """One update from `gradients`, [n, width], for `keys`, int64[n]: those of equal keys are added up
        first, in the order given."""
        if len(keys) > 1 and not bool((keys[1:] > keys[:-1]).all()):
            keys, gradients = summed(keys, gradients)
        found, missing = self.index.look_up(keys)
        if missing.size:
            self._create(keys, found, missing)
        self._keep(found)
        self._update(found, gradients)
        self.updates += 1
        self._account(found)

    def _update(self, found: NDArray[np.int32], gradients: Array) -> None:
        values, updater = self._values.array, self._updater
        if isinstance(updater, ElementwiseUpdater) and updater.sweep_rows(
            values, found, gradients, self.updates
        ):
            return
        held = {name: slot.array for name, slot in self._slots.items()}
        moved = np.empty((min(len(found), self._block), *values.shape[1:]), values.dtype)
        state = {name: np.empty_like(moved) for name in held}
        for low in range(0, len(found), self._block):
            rows = found[low : low + self._block]
            part = {name: array[: len(rows)] for name, array in state.items()}
            native.take(values, rows, moved[: len(rows)])
            for name, slot in held.items():
                native.take(slot, rows, part[name])
            updater.update_rows(moved[: len(rows)], gradients[low : low + len(rows)], part, self.updates)
            native.put(values, rows, moved[: len(rows)])
            for name, slot in held.items():
                native.put(slot, rows, part[name])

    def _create(self, keys: Keys, found: NDArray[np.int32], missing: NDArray[np.intp]) -> None:
        """Makes rows for keys[missing], and writes their numbers to `found`."""
        new, which = distinct(keys[missing])
        first = len(self.index)
        # Where rows were evicted, those that were there are overwritten.
        self._keep(np.arange(first, first + len(new), dtype=np.int32))
        self._extend(len(new))
        self._initializer.fill(new, self._values.array[first : first + len(new)])
        for name, slot in self._slots.items():
            slot.array[first : first + len(new)] = self._first[name]
        found[missing] = self.index.add(new)[which]

    def _extend(self, count: int) -> None:
        first = self._values.extend(count)
        for slot in self._slots.values():
            slot.extend(count)
        if self._counts is not None and self._touched is not None:
            self._counts.extend(count)
            self._touched.extend(count)
            self._counts.array[first : first + count] = 0
            self._touched.array[first : first + count] = self.updates

    # Eviction

    def _account(self, found: NDArray[np.int32]) -> None:
        eviction = self.table.eviction
        if eviction is None or self._counts is None or self._touched is None:
            return
        self._counts.array[found] += np.uint32(1)
        self._touched.array[found] = self.updates
        if self.updates % eviction.every == 0:
            self._evict(eviction, self._counts.array[: len(self)], self._touched.array[: len(self)])

    def _evict(self, eviction: Eviction, counts: Array, touched: Array) -> None:
        keep = np.ones(len(self), np.bool_)
        if eviction.max_age is not None:
            keep = self.updates - touched < eviction.max_age
            if eviction.min_count:
                keep |= counts >= eviction.min_count
        if eviction.max_rows is not None and int(keep.sum()) > eviction.max_rows:
            kept = np.flatnonzero(keep)
            # Ties go by key, so that the order in which rows came doesn't matter.
            order = np.lexsort((self.index.keys.array[: len(self)][kept], touched[kept]))
            keep[kept[order[: len(kept) - eviction.max_rows]]] = False
        self._compact(keep)

    def _compact(self, keep: NDArray[np.bool_]) -> None:
        """Moves the last rows that stay into the places of those that go."""
        left = int(keep.sum())
        if left == len(keep):
            return
        self.evicted += len(keep) - left
        holes = np.flatnonzero(~keep[:left])
        movers = np.flatnonzero(keep[left:]) + left
        self._keep(holes)
        for growing in self._all():
            growing.array[holes] = growing.array[movers]
            growing.shrink(left)
        self.index.rebuild()

    def _all(self) -> list[GrowableArray]:
        account = [g for g in (self._counts, self._touched) if g is not None]
        return [self.index.keys, self._values, *self._slots.values(), *account]

    # Copies

    def arrays(self) -> dict[str, Array]:
        """Everything that is kept, by name: keys, values, slots. Views, valid until the table changes."""
        count = len(self)
        named = {"keys": self.index.keys, "values": self._values}
        named |= {f"slot:{name}": slot for name, slot in self._slots.items()}
        if self._counts is not None and self._touched is not None:
            named |= {"counts": self._counts, "touched": self._touched}
        return {name: growing.array[:count] for name, growing in named.items()}

    def moment(self) -> TableSnapshot:
        """All rows as they are now, whatever becomes of them, until `let_go`. One at a time."""
        self._notes = self._notes or SavedRowIndex(self._limit)
        self._moment = TableSnapshot(self.arrays(), self._notes, self._limit)
        return self._moment

    def let_go(self) -> None:
        """Nobody reads the moment that was taken any more."""
        self._moment = None

    def _keep(self, numbers: NDArray[Any]) -> None:
        """Rows are about to be changed."""
        if self._moment is not None:
            self._moment.keep(numbers)

    def load(self, arrays: Mapping[str, Array], *, updates: int | None = None) -> None:
        """Puts rows in, over those of the same keys; the slots where they are given start anew otherwise.

        `arrays` as `arrays()` gives them; "keys", distinct, and "values" must be there.
        """
        keys = np.ascontiguousarray(arrays["keys"], np.int64)
        found, missing = self.index.look_up(keys)
        if missing.size:
            self._create(keys, found, missing)
        self._keep(found)
        for name, target in self.arrays().items():
            if name != "keys" and name in arrays:
                target[found] = arrays[name]
        if updates is not None:
            self.updates = updates


def summed(keys: Keys, gradients: Array) -> tuple[Keys, Array]:
    """(distinct keys ascending, the sum of each one's gradients in the order given)."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(keys) else order
    if not len(keys):
        return ordered, gradients
    return ordered[starts], np.add.reduceat(gradients[order], starts, axis=0)
