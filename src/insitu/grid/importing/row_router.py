"""Routes the rows of an import to all stores that hold their partitions, by one interface.

Stores whose files this process writes are `StoresHere`; those of other hosts are `StoresElsewhere`
(`transfer/row_sending.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from insitu.base.errors import GridError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.grid.intake import Finished, PartitionBuilders, RowPlan, count_routed
from insitu.grid.sources import Block

Rows = npt.NDArray[np.int64]
_ANY = np.iinfo(np.int64).max


class RowStores(Protocol):
    """Stores that take the rows of one import, by one channel. Destinations have the numbers of its plan.

    All raise GridError, OSError, and TextsTooLong where blocks need fewer rows.
    """

    def open(self, *, adopt: bool) -> Iterable[tuple[int, int]]:
        """Make ready; with `adopt` take over the staged rows. Returns (destination, rows that are there) for
        each destination in each store."""
        ...

    def begin(self, unit: int, counts: Rows) -> None:
        """Take rows from `unit` on, before which destinations have `counts` rows."""
        ...

    def append(self, block: Block, destinations: Rows | None) -> None:
        """Add the rows of `block`, row i to `destinations[i]`, or all to destination 0 if it is None. Those
        that the stores don't hold are passed over."""
        ...

    def finish(self, units: int) -> Iterable[tuple[int, NodeId, Finished]]:
        """Complete all partitions, of which `units` have been read. Returns what has become of each."""
        ...

    def stop(self, *, close: bool) -> None:
        """End all threads; with `close` no more rows are taken. Staged rows stay."""
        ...


class StoresHere:
    """Stores in this home, whose partitions this process builds."""

    def __init__(self, paths: Paths, plan: RowPlan, nodes: Collection[NodeId]) -> None:
        """`nodes` hold some of the partitions. Raises OSError."""
        owners = ([node for node in each.owners if node in nodes] for each in plan.destinations)
        #: By destination: the nodes that hold it.
        self._held = {number: held for number, held in enumerate(owners) if held}
        self._builders = PartitionBuilders(paths, plan, self._held)
        for primary, *_ in self._builders.files:
            primary.parent.mkdir(parents=True, exist_ok=True)
        self._numbers = list(self._held)
        self._has_all = len(self._held) == len(plan.destinations)
        #: By destination: its number among these; `len(self._held)`: it is none.
        self._own = np.full(len(plan.destinations), len(self._held), np.int64)
        self._own[self._numbers] = np.arange(len(self._held))

    def open(self, *, adopt: bool) -> Iterable[tuple[int, int]]:
        if not adopt:
            return zip(self._numbers, itertools.repeat(0), strict=False)
        return zip(self._numbers, map(int, self._builders.adopt()), strict=True)

    def begin(self, unit: int, counts: Rows) -> None:
        self._builders.begin_at(counts[self._numbers])

    def append(self, block: Block, destinations: Rows | None) -> None:
        own = destinations if self._has_all or destinations is None else self._own[destinations]
        self._builders.append(block, own)

    def finish(self, units: int) -> Iterable[tuple[int, NodeId, Finished]]:
        finished = zip(self._held.items(), self._builders.finish(), strict=True)
        return [(number, nodes[0], each) for (number, nodes), each in finished]

    def stop(self, *, close: bool) -> None:
        self._builders.stop()


class RowRouter:
    """All stores of one import. Begin with `open` and `begin`; call `stop` at the end.

    `rows[d]` counts what destination d has so far.
    """

    def __init__(self, plan: RowPlan, stores: Sequence[RowStores]) -> None:
        self.rows: Rows = np.zeros(len(plan.destinations), np.int64)
        self._plan, self._stores = plan, stores

    def open(self, *, adopt: bool) -> Rows:
        """Make all stores ready; with `adopt` they take over the staged rows. Returns the rows that each
        destination has in all of its stores. Raises GridError, OSError."""
        adopted = np.full(len(self.rows), _ANY)
        for stores in self._stores:
            for number, rows in stores.open(adopt=adopt):
                adopted[number] = min(adopted[number], rows)
        return adopted

    def begin(self, unit: int, counts: Sequence[int]) -> None:
        """Take rows from `unit` on, before which destinations have `counts` rows. Raises GridError."""
        self.rows[:] = counts
        for stores in self._stores:
            stores.begin(unit, self.rows)

    def append(self, block: Block, destinations: Rows | None) -> None:
        """Add the rows of `block`, row i to `destinations[i]`, or all to destination 0 if it is None.

        Raises GridError, TextsTooLong, OSError.
        """
        for stores in self._stores:
            stores.append(block, destinations)
        self.record_rows(count_routed(block, destinations, len(self.rows)))

    def record_rows(self, counts: Rows) -> None:
        """Count rows, also those that nodes have read and sent themselves."""
        self.rows += counts

    def finish(self, units: int) -> list[Finished]:
        """Complete all partitions, and see that all copies are alike. `units` have been read.

        Raises GridError, TextsTooLong, OSError.
        """
        found: list[list[tuple[NodeId, Finished]]] = [[] for _ in self.rows]
        for stores in self._stores:
            for number, node, each in stores.finish(units):
                found[number].append((node, each))
        return [self._check(number, of) for number, of in enumerate(found)]

    def _check(self, number: int, found: Sequence[tuple[NodeId, Finished]]) -> Finished:
        each = self._plan.destinations[number]
        finished = check_same(found, f"partition {each.partition} of {each.cache}")
        if finished.rows != self.rows[number]:
            raise GridError(
                f"Partition {each.partition} of {each.cache} must have {self.rows[number]} rows. Received: "
                f"{finished.rows}. Import again"
            )
        return finished

    def stop(self, *, close: bool) -> None:
        """End all threads; with `close` other hosts take no more rows. Staged rows stay."""
        for stores in self._stores:
            stores.stop(close=close)


def check_same(found: Sequence[tuple[NodeId, Finished]], what: str) -> Finished:
    """Return what all owners say of one partition. Raises GridError if they differ."""
    for (one, first), (other, second) in itertools.pairwise(found):
        if first != second:
            raise GridError(
                f"All copies of a partition have the same bytes. Received: {what} with {first.bytes} bytes "
                f"and {first.checksum} on {one}, with {second.bytes} and {second.checksum} on {other}. The "
                f"hosts must have the same versions of insitu and pyarrow, and memory without faults"
            )
    return found[0][1]
