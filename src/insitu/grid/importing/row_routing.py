"""Gives the rows of an import to all owners of their partitions: builders in this home, and other hosts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from insitu.base.disk.durable import sync_tree
from insitu.base.errors import GridError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.grid.intake import Finished, PartitionBuilders, RowPlan, check_same
from insitu.grid.sources import Block

if TYPE_CHECKING:
    from insitu.grid.transfer import RemoteStores

_SYNCED_ONE_BY_ONE = 100
"""Files up to which each is made to survive a power cut alone; with more, all are at once."""

Rows = npt.NDArray[np.int64]


class RowRouter:
    """All owners of one import's partitions. Begin with `open` and `begin`; call `stop` at the end.

    `rows[d]` counts what destination d has so far.
    """

    def __init__(
        self,
        paths: Paths,
        plan: RowPlan,
        here: Collection[NodeId],
        remote: RemoteStores | None,
        readers: Sequence[NodeId] = (),
    ) -> None:
        """`here` are nodes whose stores are in this home and are written from here; `remote` are all agents.

        `readers` are nodes that read the sources; none: this process does. Raises OSError.
        """
        self.rows: Rows = np.zeros(len(plan.destinations), np.int64)
        self._paths, self._plan, self._remote = paths, plan, remote
        self._here = {n: [o for o in d.owners if o in here] for n, d in enumerate(plan.destinations)}
        self._local = [number for number, owners in self._here.items() if owners]
        targets = [self._target(number, self._here[number][0]) for number in self._local]
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
        #: By destination: its number among the local ones; `len(self._local)`: it is none.
        self._own = np.full(len(plan.destinations), len(self._local), np.int64)
        self._own[self._local] = np.arange(len(self._local))
        self._builders: PartitionBuilders | None = None
        if targets:
            self._builders = PartitionBuilders(
                plan.columns, plan.block_rows, targets, drop_pages=plan.drop_pages, codec=plan.codec
            )
        known = () if remote is None else remote.all_nodes
        #: Nodes on other hosts that hold partitions.
        self.owners_elsewhere = [
            node for node in known if node not in here and any(node in d.owners for d in plan.destinations)
        ]
        self._local_adopted: Rows = np.zeros(len(self._local), np.int64)
        self._sender = None
        self._readers = list(readers)
        if remote is not None and self.owners_elsewhere and not readers:
            self._sender = remote.imports.make_sender(plan, self.owners_elsewhere)

    def _target(self, number: int, node: NodeId) -> Path:
        each = self._plan.destinations[number]
        return self._paths.staged(each.cache, self._plan.token).partition(node, each.partition)

    def open(self, *, adopt: bool) -> Rows:
        """Make all owners ready; with `adopt` they take over the staged rows. Returns the rows that each
        destination has on all of its owners. Raises GridError, OSError."""
        adopted = np.full(len(self.rows), np.iinfo(np.int64).max)
        if self._builders is not None:
            if adopt:
                self._local_adopted = self._builders.adopt()
            adopted[self._local] = self._local_adopted
        if self._remote is not None:
            nodes = sorted({*self.owners_elsewhere, *self._readers})
            for node, counts in self._remote.imports.open(nodes, self._plan, adopt=adopt).items():
                held = self._plan.held_by(node)
                adopted[held] = np.minimum(adopted[held], counts)
        return adopted

    def begin(self, unit: int, counts: Sequence[int]) -> None:
        """Take rows from `unit` on, before which destinations have `counts` rows. Raises GridError."""
        self.rows[:] = counts
        if self._builders is not None:
            self._builders.begin_at(self.rows[self._local], self._local_adopted)
        if self._remote is not None:
            for node in self.owners_elsewhere:
                counts_there = self.rows[self._plan.held_by(node)].tolist()
                self._remote.imports.begin(node, self._plan.token, unit, counts_there)
        if self._sender is not None:
            self._sender.begin_unit(unit)

    def append(self, block: Block, destinations: Rows | None) -> None:
        """Add the rows of `block`, row i to `destinations[i]`, or all to destination 0 if it is None.

        Raises GridError, TextsTooLong, OSError.
        """
        if self._builders is not None:
            is_whole = len(self._local) == len(self.rows)
            own = destinations if is_whole or destinations is None else self._own[destinations]
            self._builders.append(block, own)
        if self._sender is not None:
            self._sender.append(block, destinations)
        if destinations is None:
            self.rows[0] += block.rows
        else:
            self.rows += np.bincount(destinations, minlength=len(self.rows))

    def note_rows(self, counts: Rows) -> None:
        """Count rows that nodes have read and sent themselves."""
        self.rows += counts

    def finish(self, units: int) -> list[Finished]:
        """Complete all partitions, copy them to backups in this home, and see that all copies are alike.

        `units` have been read. Raises GridError, TextsTooLong, OSError.
        """
        if self._sender is not None and self._remote is not None:
            self._sender.end_unit()
            self._sender.flush()
            self._remote.sent.update(self._sender.sent)
        found: list[list[tuple[NodeId, Finished]]] = [[] for _ in self.rows]
        self._finish_here(found)
        if self._remote is not None and self.owners_elsewhere:
            ends = self._remote.imports.finish(self.owners_elsewhere, self._plan.token, units)
            for node, finished in ends.items():
                for number, each in zip(self._plan.held_by(node), finished, strict=True):
                    found[number].append((node, each))
        return [self._check(number, of) for number, of in enumerate(found)]

    def _finish_here(self, found: list[list[tuple[NodeId, Finished]]]) -> None:
        if self._builders is None:
            return
        one_by_one = sum(map(len, self._here.values())) <= _SYNCED_ONE_BY_ONE
        for own, number in enumerate(self._local):
            size, checksum = self._builders.finish(own, sync=one_by_one)
            primary, *others = self._here[number]
            copies = [self._target(number, node) for node in others]
            copy_to_backups(self._target(number, primary), copies, sync=one_by_one)
            columns = tuple(self._builders.column_bytes(own, 1))
            raw = self._builders.raw_bytes(own)
            ended = Finished(int(self._builders.rows[own]), size, checksum, raw, columns)
            found[number].append((primary, ended))
        if not one_by_one:
            for name in self._plan.names:
                sync_tree(self._paths.staged(name, self._plan.token).root)

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
        if self._sender is not None:
            self._sender.__exit__()
        if self._builders is not None:
            self._builders.stop()
        if self._remote is not None and close:
            self._remote.imports.close({*self.owners_elsewhere, *self._readers}, self._plan.token)


def copy_to_backups(staged_primary: Path, copies: Sequence[Path], *, sync: bool) -> None:
    """Copy a staged partition to the staged folders of its backups in this home. Raises OSError."""
    for copy in copies:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(staged_primary, copy)
        if sync:
            with copy.open("rb") as file:
                os.fsync(file.fileno())
