"""The columns of a cache as a dataset reads them: partitions opened once, rows taken, bytes counted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from insitu.errors import CorruptPartition, UnknownCache
from insitu.grid.catalog import Catalog
from insitu.grid.copies_here import find_missing_here
from insitu.grid.damaged_copies import DAMAGED
from insitu.grid.layout import Rows, ShuffledPlan, WindowOrder
from insitu.grid.order_ahead import OrdersAhead
from insitu.grid.partitions import BlockChecks, TextValues, is_variable
from insitu.grid.read_ahead import ReadAhead, ShardSource, WindowedColumns, read_rows
from insitu.grid.reads import READS
from insitu.grid.shard_columns import ShardColumns
from insitu.grid.shard_memory import ShardMemory, bytes_in_memory
from insitu.grid.store import Copy, announce_opening, open_blocks, open_copy
from insitu.grid.structure import Structure
from insitu.grid.tiers import note_read
from insitu.grid.verification import is_cut_short
from insitu.paths import Paths
from insitu.processes import memory_bytes
from insitu.spec import CacheSpec, NodeId, ShardMap

Read = tuple[Structure, int, tuple[tuple[int, Rows], ...]]
"""(structure of arrays, rows, origins) of one batch of one shard."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A partition, and the bytes that a row of the chosen columns takes."""

    #: The copy that is read.
    copy: Copy
    #: Bytes of the file that a row of the chosen columns takes; a mean where there is text.
    row_bytes: float
    #: Which of its blocks are right, of those read in place. None: all, or none is read in place.
    checks: BlockChecks | None


class CacheReader:
    """The chosen columns of one version of a cache. Shared by all datasets that are chained from one.

    `names` are the columns that are read: `features`, then `label` where there is one.
    """

    def __init__(
        self,
        paths: Paths,
        cache: CacheSpec,
        shard_map: ShardMap,
        shards: tuple[int, ...],
        node: NodeId | None,
        features: tuple[str, ...],
        label: str | None,
        version_at: Callable[[int | None], CacheSpec] | None = None,
    ) -> None:
        """`version_at` returns the version of an epoch (None: the newest); without it all read `cache`."""
        self.cache = cache
        self._version_at = version_at
        #: The reader of the version that was asked for last, if it isn't `cache`.
        self._later: CacheReader | None = None
        self.shard_map = shard_map
        self.shards = shards
        self.names = features if label is None else (*features, label)
        self._paths = paths
        self._node = node
        self._features = features
        self.label = label
        columns = {column.name: column for column in cache.columns}
        self._columns = [columns[name] for name in self.names]
        self._opened: dict[int, _Opened] = {}
        self._prefaulted: set[int] = set()
        self._shards: dict[int, ShardColumns | ShardMemory] = {}
        self.orders = OrdersAhead()
        #: What `_stand_in` has returned for each shard, until a partition is opened again.
        self._alike: dict[int, _Opened | None] = {}
        self._sources: dict[int, ShardSource] = {}
        self._ahead: ReadAhead | None = None
        #: The first window of the next epoch of each shard, and the process that reads it.
        self._prepared: dict[int, tuple[int, WindowedColumns]] = {}
        self._opening = threading.Lock()
        #: The nodes in whose stores it is noted that the version was opened.
        self._noted: set[NodeId] = set()

    @property
    def exceeds_memory(self) -> bool:
        """Whether this task's shards, decompressed, take more than half of the memory."""
        cache, rows = self.cache, sum(self.starts(shard)[-1] for shard in self.shards)
        needed = bytes_in_memory(cache.columns, cache.column_bytes, self.names) if cache.codec else 0
        return needed * rows // max(1, cache.rows) > memory_bytes() // 2

    def read_others(self, names: Sequence[str]) -> CacheReader:
        """Return a reader of other columns of the same rows."""
        place = (self._paths, self.cache, self.shard_map, self.shards, self._node)
        return CacheReader(*place, tuple(names), None)

    def for_shards(self, shards: Sequence[int]) -> CacheReader:
        """Return a reader of the same columns for a task that has these shards."""
        place = (self._paths, self.cache, self.shard_map, tuple(shards), self._node)
        return CacheReader(*place, self._features, self.label, self._version_at)

    @property
    def is_refreshed(self) -> bool:
        """Whether later epochs may read other rows."""
        return self._version_at is not None

    def at_epoch(self, epoch: int | None) -> CacheReader:
        """Return the reader of the rows of an epoch (None: of the newest ones).

        The first call for an epoch may read them from Ignite. Raises GridError.
        """
        cache = self.cache if self._version_at is None else self._version_at(epoch)
        if cache.version == self.cache.version:
            return self
        if self._later is None or self._later.cache.version != cache.version:
            shard_map = replace(self.shard_map, version=cache.version)
            place = (self._paths, cache, shard_map, self.shards, self._node)
            self._later = CacheReader(*place, self._features, self.label)
        return self._later

    def starts(self, shard: int) -> list[int]:
        """Return the position in the shard of each of its partitions' first row; at the end, its rows."""
        starts = [0]
        for index in self.shard_map.shards[shard]:
            starts.append(starts[-1] + self.cache.partitions[index].rows)
        return starts

    def read_rows(self, shard: int, windows: WindowedColumns | None, plan: ShuffledPlan, step: int) -> Read:
        """Copy the rows of the batch of `step`, in their order, from `windows` of the shard or from the whole
        shard. Raises CorruptPartition."""
        held = self.shard_map.shards[shard]
        origins = tuple([(held[k], rows) for k, rows in plan.rows_of_batch(step)])
        columns = windows or self._map_checked(shard, plan, step)
        arrays = columns.take_batch(plan, step)
        rows = len(arrays[0])
        one = self._stand_in(shard)
        if one is not None:
            self._count([one], [rows])
        else:
            self._count([self._opened[index] for index, _ in origins], [len(found) for _, found in origins])
        return self._structure(arrays), rows, origins

    def _map_checked(self, shard: int, plan: ShuffledPlan, step: int) -> ShardColumns | ShardMemory:
        """Return the columns of a shard, mapped, with the blocks of a batch found right."""
        few = 2 * plan.rows < self.starts(shard)[-1] if shard not in self._shards else False
        while True:
            columns = self.map_shard(shard, few=few)
            found = columns.find_damage(plan, step) if isinstance(columns, ShardColumns) else None
            if found is None:
                return columns
            self._set_aside(shard, self.shard_map.shards[shard][found[0]], found[1])
            plan.forget_places()

    def _set_aside(self, shard: int, index: int, error: CorruptPartition) -> None:
        """Use a copy no more of which a block is damaged."""
        with self._opening:
            opened = self._opened.get(index)
            if opened is None or str(opened.copy.partition.path) not in str(error):
                return  # another thread was faster
            DAMAGED.set_aside(opened.copy.partition.path, error)
            self._forget(shard, index)

    def _forget(self, shard: int, index: int) -> None:
        """Open a partition again at its next use. The lock is held."""
        self._opened.pop(index, None)
        self._prefaulted.discard(index)
        self._shards.pop(shard, None)
        self._alike.pop(shard, None)

    def _stand_in(self, shard: int) -> _Opened | None:
        """Return a partition that stands for all of the shard, if they count alike; else None."""
        try:
            return self._alike[shard]
        except KeyError:
            opened = [self._opened[index] for index in self.shard_map.shards[shard]]
            first = opened[0]
            alike = all(o.copy.local == first.copy.local and o.row_bytes == first.row_bytes for o in opened)
            self._alike[shard] = found = first if alike else None
            return found

    def reopen_cut_files(self, shard: int) -> None:
        """Forget the partitions of a shard whose files were cut short: other copies are mapped then.

        The system ends a process that reads a mapped file beyond its end.
        """
        for index in self.shard_map.shards[shard] if self.cache.codec is None else ():
            opened = self._opened.get(index)
            if opened is not None and is_cut_short(opened.copy.partition.path, opened.copy.info):
                with self._opening:
                    self._forget(shard, index)

    def map_shard(self, shard: int, *, few: bool = False) -> ShardColumns | ShardMemory:
        """Return the columns of a shard, mapped into memory. `few`: most rows won't be read.

        Those of a compressed cache are decompressed there, block by block. Raises CorruptPartition.
        """
        if shard not in self._shards and self.cache.codec is not None:
            source = self._find_source(shard)
            with self._opening:
                self._ahead = self._ahead or ReadAhead()
                if shard not in self._shards:
                    self._shards[shard] = ShardMemory(source, self._ahead, memory_bytes() // 2, few=few)
        if shard not in self._shards:
            held = self.shard_map.shards[shard]
            partitions = [self._open(index).copy.partition for index in held]
            with self._opening:
                if shard not in self._shards:
                    self._shards[shard] = ShardColumns(partitions, self.cache.columns, self._columns, few=few)
        return self._shards[shard]

    def read_windows(
        self, shard: int, order: WindowOrder, following: Callable[[], WindowOrder]
    ) -> WindowedColumns:
        """Return the columns of a shard, read in the windows of `order`, then the first one of `following()`.

        Raises CorruptPartition. Close it at the end.
        """
        with self._opening:
            self._ahead = self._ahead or ReadAhead()
            process, prepared = self._prepared.pop(shard, (0, None))
        if process != os.getpid():
            prepared = None  # threads of another process read it, from which this one was forked
        if prepared is not None and prepared.order == order:
            columns = prepared
        else:
            if prepared is not None:
                prepared.close()
            columns = WindowedColumns(self._find_source(shard), order, self._ahead)

        def prepare() -> None:
            first = WindowedColumns(columns.shard, following(), columns.ahead)
            first.begin(0)
            self._prepared[shard] = (os.getpid(), first)

        columns.at_last_window = prepare
        return columns

    def _find_source(self, shard: int) -> ShardSource:
        if shard not in self._sources:
            self._sources[shard] = self._shard_source(shard)
        return self._sources[shard]

    def _shard_source(self, shard: int) -> ShardSource:
        held = self.shard_map.shards[shard]
        unopened = [index for index in held if index not in self._opened]
        announce_opening(self._paths, self.cache, unopened, self._node)
        copies = [self._open(index).copy for index in held]
        # What fits stays in the page cache for the next epoch. Other tasks here may read the other shards.
        direct = self.cache.bytes >= memory_bytes() // 2
        return self._make_source(copies, self.starts(shard), direct=direct)

    def _make_source(
        self, copies: Sequence[Copy], starts: Sequence[int], *, direct: bool = False
    ) -> ShardSource:
        blocks = [open_blocks(self._paths, self.cache, c, self._columns, direct=direct) for c in copies]
        in_memory = self.cache.columns
        if self.cache.codec is not None:  # only what is chosen is decompressed
            in_memory = tuple(column for column in in_memory if column.name in self.names)
        return ShardSource(blocks, np.array(starts), self.cache.block_rows, in_memory, self._columns)

    def read_ranges(
        self, shard: int, ranges: Sequence[tuple[int, int, int]], *, share_texts: bool = False
    ) -> Read:
        """Return rows [start, stop) of the shard's k-th partitions; in place where they lie in one.

        With `share_texts` equal texts may be one object, which is faster where they repeat.
        """
        held = self.shard_map.shards[shard]
        columns = None if self.cache.codec is None else self.map_shard(shard)
        if isinstance(columns, ShardMemory):
            found = [columns.take_range(*each) for each in ranges]
            opened = [self._opened[held[k]] for k, _, _ in ranges]
        else:
            opened = [self._open_in_order(shard, held[k], start, stop) for k, start, stop in ranges]
            found = [
                [
                    _slice(source.copy.partition.values[column.name], start, stop, share_texts)
                    for column in self._columns
                ]
                for source, (_, start, stop) in zip(opened, ranges, strict=True)
            ]
        arrays = [
            parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*found, strict=True)
        ]
        origins = tuple((held[k], np.arange(start, stop)) for k, start, stop in ranges)
        lengths = [stop - start for _, start, stop in ranges]
        self._count(opened, lengths)
        return self._structure(arrays), sum(lengths), origins

    def read_positions(self, shard: int, positions: Rows) -> Structure:
        """Copy the rows at some positions of a shard, in their order. Reads little else.

        They come from their blocks alone, which are verified. They don't count as read. Raises
        CorruptPartition.
        """
        starts, held = np.array(self.starts(shard)), self.shard_map.shards[shard]
        parts = np.searchsorted(starts, positions, side="right") - 1
        arrays: list[Any] = [
            np.empty((len(positions), *c.shape), object if is_variable(c) else c.dtype) for c in self._columns
        ]
        for part in np.unique(parts).tolist():
            here = np.flatnonzero(parts == part)
            rows = positions[here] - starts[part]
            for array, found in zip(arrays, self._read_few(held[part], rows), strict=True):
                array[here] = found
        return self._structure(arrays)

    def _read_few(self, index: int, rows: Rows) -> list[Any]:
        """Return the given rows of each column of a partition."""
        copy = self._open(index).copy
        if not self.cache.block_rows:
            return [copy.partition.values[name].pick(rows) for name in self.names]
        return self._read_blocks(copy, copy.info.rows, rows)

    def _read_blocks(self, copy: Copy, count: int, rows: Rows) -> list[Any]:
        """Return some of the `count` rows of a partition, of which only their blocks are read."""
        self._ahead = self._ahead or ReadAhead()
        return read_rows(self._make_source([copy], [0, count]), rows, self._ahead)

    def probe(self) -> tuple[Structure, int]:
        """Read (structure, rows) of the first rows of the cache, two at most. They don't count as read.

        Where other hosts alone have these, the rows are the first ones of this task's shards.
        """
        filled = [p.index for p in self.cache.partitions if p.rows]
        index = filled[0]
        if find_missing_here(self._paths, self.cache, [index]):
            held = {own for shard in self.shards for own in self.shard_map.shards[shard]}
            index = next((own for own in filled if own in held), index)
        rows = min(2, self.cache.partitions[index].rows)
        return self._structure(self._read_few(index, np.arange(rows))), rows

    def _open_in_order(self, shard: int, index: int, start: int, stop: int) -> _Opened:
        """Open a partition, all of whose pages are about to be read, like the others of its shard.

        The blocks of rows [start, stop) are right.
        """
        while True:
            opened = self._open(index)
            if opened.checks is None or opened.checks.done:
                break
            size = opened.copy.partition.block_rows
            try:
                opened.checks.check(np.arange(start // size, -(-stop // size)))
                break
            except CorruptPartition as error:
                self._set_aside(shard, index, error)
        if index not in self._prefaulted:
            self._prefaulted.add(index)
            held = self.shard_map.shards[shard]
            opened.copy.partition.prefault(sum(self.cache.partitions[other].bytes for other in held))
        return opened

    def _open(self, index: int) -> _Opened:
        with self._opening:
            opened = self._opened.get(index)
            if opened is None:
                copy = self._open_copy(index)
                partition = copy.partition
                row_bytes = sum(partition.bytes_per_row(name) for name in self.names)
                checks = partition.make_checks(self._columns) if partition.is_marked else None
                opened = self._opened[index] = _Opened(copy, row_bytes, checks)
                self._alike.clear()
            return opened

    def _open_copy(self, index: int) -> Copy:
        try:
            copy = open_copy(self._paths, self.cache, index, self._node)
        except CorruptPartition as error:
            name, version = self.cache.name, self.cache.version
            if Catalog(self._paths).find(name, version) is None:
                raise UnknownCache(
                    f"Version {version} of cache {name} was replaced or dropped while this dataset was "
                    f"reading it. Make a new dataset; a job keeps its version to its end"
                ) from error
            raise
        if copy.node not in self._noted:
            self._noted.add(copy.node)
            note_read(self._paths, copy.node, self.cache)
        return copy

    def _count(self, opened: Sequence[_Opened], lengths: Sequence[int]) -> None:
        local = local_rows = rows = size = 0.0
        for source, length in zip(opened, lengths, strict=True):
            rows += length
            size += length * source.row_bytes
            if source.copy.local:
                local_rows += length
                local += length * source.row_bytes
        READS.count(round(local), round(size - local), int(local_rows), int(rows - local_rows))

    def _structure(self, arrays: list[Any]) -> Structure:
        count = len(self._features)
        features = arrays[0] if count == 1 else dict(zip(self._features, arrays[:count], strict=True))
        return features if self.label is None else (features, arrays[count])


def _slice(values: Any, start: int, stop: int, share_texts: bool) -> Any:
    is_of_texts = share_texts and type(values) is TextValues
    return values.slice_shared(start, stop) if is_of_texts else values.slice(start, stop)
